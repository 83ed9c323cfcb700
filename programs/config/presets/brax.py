"""Presets of Brax (Freeman et al. 2021, arXiv:2106.13281): its robots, in one program.

The backend is ``spring``, which is the fastest on CPUs. A preset that needs another backend says
why. Returns of different backends are not comparable.
"""

from __future__ import annotations

from typing import Any

from rlstack.agents.ppo import PPOConfig
from rlstack.agents.sac import SACConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig, Norm
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset, transitions

_EVALUATOR = EvaluatorConfig(episodes=32, num_envs=32)


def _env(name: str, num_envs: int, backend: str = "spring") -> EnvConfig:
    return EnvConfig(f"brax/{name}", num_envs=num_envs, type="jax", options={"backend": backend})


def _ppo(name: str, env: str, frames: int, **changes: Any) -> Experiment:
    """Returns PPO with the constants of halfcheetah-ppo, and more environments.

    brax-halfcheetah-ppo has half its value_cost: the returns in docs/fused.md are of this value.
    """
    return on_policy(
        name,
        PPOConfig(entropy_cost=0.0, num_epochs=10, num_minibatches=32, **changes),
        _env(env, num_envs=64),
        unroll_length=64,
        frames=frames,
        topology="fused",
        network=NetworkConfig(policy_log_std=-0.5),
        normalisation=NormalisationConfig(observations=True, rewards="return", reward_clip=10.0),
        evaluator=_EVALUATOR,
    )


def _sac(
    name: str,
    env: EnvConfig,
    frames: int,
    *,
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    norm: Norm = "none",
    reward_scale: float = 1.0,
) -> Experiment:
    """Returns SAC with an update for each frame, as in its paper, and normalised observations.

    The paper is https://arxiv.org/abs/1812.05905; batches and rates are those of halfcheetah-sac.
    """
    return Experiment(
        preset=name,
        agent=SACConfig(target_rate=0.01, optimizer=OptimizerConfig(learning_rate=learning_rate)),
        env=env,
        topology="fused",
        network=NetworkConfig(hidden_sizes=(256, 256), activation="relu", norm=norm),
        normalisation=NormalisationConfig(observations=True, reward_scale=reward_scale),
        replay=transitions(batch_size, max_size=300_000, min_size=5_000, updates_per_frame=1.0),
        evaluator=_EVALUATOR,
        frames=frames,
        checkpoint_replay=False,
    )


@preset
def brax_inverted_double_pendulum_ppo(name: str) -> Experiment:
    """Brax's inverted double pendulum by PPO, in one compiled program."""
    return _ppo(name, "inverted_double_pendulum", frames=1_000_000)


@preset
def brax_halfcheetah_ppo(name: str) -> Experiment:
    """Brax's half cheetah by PPO, in one compiled program."""
    return _ppo(name, "halfcheetah", frames=3_000_000, normalise_advantages=False, value_cost=0.25)


@preset
def brax_ant_ppo(name: str) -> Experiment:
    """Brax's ant by PPO, in one compiled program."""
    return _ppo(name, "ant", frames=10_000_000)


@preset
def brax_inverted_double_pendulum_sac(name: str) -> Experiment:
    """Brax's inverted double pendulum by SAC, in one compiled program.

    Rewards are scaled because 10 a step give values near 1,000. With the backend spring returns did
    not stay high: the cart swings more and more, until it hits the end of its rail.
    """
    return _sac(
        name,
        _env("inverted_double_pendulum", num_envs=16, backend="generalized"),
        frames=50_000,
        learning_rate=3e-4,
        batch_size=256,
        norm="layer",
        reward_scale=0.1,
    )


@preset
def brax_halfcheetah_sac(name: str) -> Experiment:
    """Brax's half cheetah by SAC, in one compiled program."""
    return _sac(name, _env("halfcheetah", num_envs=16), frames=300_000)
