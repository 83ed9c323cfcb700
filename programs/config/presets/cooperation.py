"""Presets of agents that learn to cooperate: QMIX, VDN and MADDPG on joint rows, then PPO on MPE.

MPE are the multi-agent particle environments, here with independent PPO and with MAPPO. The game is
PettingZoo's, in Python, or JaxMARL's, in one compiled program with training. The latter makes the
20 million steps of published results in about a quarter of an hour.
"""

from __future__ import annotations

from typing import Any

from rlstack.agents.maddpg import MADDPGConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.qmix import QMIXConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset, transitions


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


_LENGTH = 25  # steps of an episode of MPE, as in all published results
_SEATS = 3 * 32  # seats of all games of MPE


def _spread_ppo(name: str, env: EnvConfig, frames: int, **fields: Any) -> Experiment:
    """Returns PPO on simple_spread with three agents, with most constants of Yu et al. (2022).

    https://arxiv.org/abs/2103.01955, and their program:
    https://github.com/marlbenchmark/on-policy/blob/main/onpolicy/config.py and
    https://github.com/marlbenchmark/on-policy/blob/main/onpolicy/scripts/train_mpe_scripts/train_mpe_spread.sh
    Deviations, with which the returns in docs/policies.md were measured: their value normalisation
    is replaced by rewards divided by the deviation of returns; values are not clipped, their error
    is squared instead of Huber's, and the value loss has a weight of 0.5 instead of 1, which
    matters little, as policy and value share no layers; the learning rate falls to 0. An update has
    whole episodes of 32 games in two minibatches; theirs has 128 in one. It takes twice as many
    gradient steps.
    """
    return on_policy(
        name,
        PPOConfig(
            num_epochs=10,
            num_minibatches=2,
            max_grad_norm=10.0,
            optimizer=OptimizerConfig(learning_rate=7e-4),
        ),
        env,
        unroll_length=_LENGTH,
        frames=frames,
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        normalisation=NormalisationConfig(observations=True, rewards="return", reward_clip=10.0),
        **fields,
    )


def _spread_in_python(name: str, **options: Any) -> Experiment:
    env = EnvConfig(
        "rlstack.envs.seats.pettingzoo:Parallel",
        num_envs=_SEATS,
        options={"game": "mpe2.simple_spread_v3", "N": 3, "max_cycles": _LENGTH, **options},
    )
    evaluator = EvaluatorConfig(episodes=300, num_envs=60)
    return _spread_ppo(name, env, 3_000_000, evaluator=evaluator)


def _spread_in_jax(name: str, **options: Any) -> Experiment:
    env = EnvConfig("jaxmarl/MPE_simple_spread_v3", num_envs=_SEATS, type="jax", options=options)
    return _spread_ppo(
        name,
        env,
        60_000_000,
        topology="fused",
        evaluator=EvaluatorConfig(episodes=288, num_envs=96),
        log_period=50_000,
        checkpoint_period=5_000_000,
    )


@preset
def mpe_spread_ippo(name: str) -> Experiment:
    """simple_spread, three agents with one policy: independent PPO (extra pettingzoo)."""
    return _spread_in_python(name)


@preset
def mpe_spread_mappo(name: str) -> Experiment:
    """simple_spread, three agents with one policy, and a critic that sees the state: MAPPO."""
    return _spread_in_python(name, critic_state="game")


@preset
def jaxmarl_spread_ippo(name: str) -> Experiment:
    """simple_spread in one compiled program, independent PPO (extra jaxmarl)."""
    return _spread_in_jax(name)


@preset
def jaxmarl_spread_mappo(name: str) -> Experiment:
    """simple_spread in one compiled program, MAPPO with all observations (extra jaxmarl)."""
    return _spread_in_jax(name, critic_state="joined")
