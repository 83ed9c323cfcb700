"""Presets of agents that learn to cooperate: QMIX, VDN and MADDPG, on joint rows."""

from __future__ import annotations

from typing import Any

from rlstack.agents.maddpg import MADDPGConfig
from rlstack.agents.qmix import QMIXConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import preset, transitions


def _two_step(name: str, agent: QMIXConfig) -> Experiment:
    """Returns the two-step game with the constants of Rashid et al. (2018), section 5.

    https://arxiv.org/abs/1803.11485. All actions are random, an update of 32 of the last 500
    episodes follows each episode, and the target is copied after 100.
    """
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig(
            "rlstack.jax_envs.two_step:TwoStep",
            num_envs=8,
            type="jax",
            options={"joint": True, "critic_state": "game"},
        ),
        topology="fused",
        network=NetworkConfig(hidden_sizes=(64,), activation="relu"),
        replay=transitions(64, max_size=1_000, min_size=64, updates_per_frame=0.5),
        evaluator=EvaluatorConfig(episodes=8, num_envs=8),
        frames=10_000,
    )


@preset
def twostep_qmix(name: str) -> Experiment:
    """The two-step game by QMIX, whose greedy return becomes the best one, 8."""
    agent = QMIXConfig(
        mixer_size=8, hyper_size=0, epsilon_end=1.0, epsilon_frames=1, target_period=100
    )
    return _two_step(name, agent)


@preset
def twostep_vdn(name: str) -> Experiment:
    """The two-step game by VDN, whose sum of values cannot represent it: 7."""
    agent = QMIXConfig(mixer="sum", epsilon_end=1.0, epsilon_frames=1, target_period=100)
    return _two_step(name, agent)


def _spread(num_envs: int, **options: str) -> EnvConfig:
    return EnvConfig(
        "jaxmarl/MPE_simple_spread_v3",
        num_envs=num_envs,
        type="jax",
        options={"joint": True, **options},
    )


@preset
def spread_qmix(name: str) -> Experiment:
    """simple_spread by QMIX, in one compiled program (extra jaxmarl)."""
    return Experiment(
        preset=name,
        agent=QMIXConfig(
            discount=0.9,  # with 0.95 and more values rise while returns fall
            target_rate=0.01,
            epsilon_frames=50_000,
            optimizer=OptimizerConfig(learning_rate=3e-4),
        ),
        env=_spread(32),
        topology="fused",
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        replay=transitions(512, max_size=500_000, min_size=5_000, updates_per_frame=1 / 32),
        evaluator=EvaluatorConfig(episodes=288, num_envs=96),
        frames=1_000_000,
        checkpoint_replay=False,
    )


def _maddpg(name: str, env: EnvConfig, frames: int, **fields: Any) -> Experiment:
    """Returns MADDPG with its paper's discount, rates of targets and sizes; the rest tuned here."""
    return Experiment(
        preset=name,
        agent=MADDPGConfig(
            noise_scale=0.2,
            random_frames=5_000,
            optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-8),
        ),
        env=env,
        topology="fused",
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        replay=transitions(512, max_size=300_000, min_size=5_000, updates_per_frame=1 / 32),
        evaluator=EvaluatorConfig(episodes=288, num_envs=96),
        frames=frames,
        **fields,
    )


@preset
def cover_maddpg(name: str) -> Experiment:
    """Agents that cover landmarks, with continuous moves, by MADDPG in one compiled program."""
    options: dict[str, Any] = {"joint": True, "continuous": True}
    env = EnvConfig("rlstack.jax_envs.cover:Cover", num_envs=32, type="jax", options=options)
    return _maddpg(name, env, 300_000)


@preset
def spread_maddpg(name: str) -> Experiment:
    """simple_spread with continuous actions by MADDPG, in one compiled program (extra jaxmarl)."""
    env = _spread(32, action_type="Continuous")
    return _maddpg(name, env, 1_000_000, checkpoint_replay=False)
