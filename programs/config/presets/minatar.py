"""Presets of MinAtar (Young and Tian 2019, arXiv:1903.03176), each in one compiled program."""

from __future__ import annotations

from typing import Any

from rlstack.agents.dqn import DQNConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.pqn import PQNConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset, transitions

_FRAMES = 10_000_000
_EVALUATOR = EvaluatorConfig(episodes=100, num_envs=100)


def _network(game: str, **options: Any) -> NetworkConfig:
    """Returns the network of MinAtar's authors, with some options."""
    if game == "Seaquest":  # its ten channels of ten rows do not tell which axis they are
        options["image_axes"] = "hwc"
    return NetworkConfig(torso="minatar", hidden_sizes=(128,), **options)


def _ppo(name: str, game: str, entropy_cost: float = 0.01) -> Experiment:
    """Returns PPO with constants of purejaxrl, and a learning rate for this torso.

    https://github.com/luchris429/purejaxrl/blob/main/examples/brax_minatar.ipynb. Deviations: a
    learning rate of 1e-3 instead of 5e-3; convolutions with one torso for policy and value, instead
    of two dense networks; values are not clipped, because the published returns were surpassed
    without.
    """
    return on_policy(
        name,
        PPOConfig(
            num_minibatches=8,
            entropy_cost=entropy_cost,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        EnvConfig(f"{game}-MinAtar", num_envs=64, type="jax"),
        unroll_length=128,
        frames=_FRAMES,
        topology="fused",
        network=_network(game, shared=True),
        evaluator=_EVALUATOR,
        log_period=50_000,
        checkpoint_period=1_000_000,
    )


def _pqn(name: str, game: str) -> Experiment:
    """Returns PQN with the constants of its authors' program.

    https://github.com/mttga/purejaxql/blob/main/purejaxql/config/alg/pqn_minatar.yaml
    """
    agent = PQNConfig(
        epsilon_frames=_FRAMES // 10, optimizer=OptimizerConfig("radam", learning_rate=5e-4)
    )
    return on_policy(
        name,
        agent,
        EnvConfig(f"{game}-MinAtar", num_envs=128, type="jax"),
        unroll_length=32,
        frames=_FRAMES,
        topology="fused",
        network=_network(game, norm="layer"),
        evaluator=_EVALUATOR,
        log_period=50_000,
        checkpoint_period=1_000_000,
    )


def _dqn(name: str, game: str) -> Experiment:
    """Returns DQN with the network, replay and learning rate of MinAtar's authors.

    https://github.com/kenjyoung/MinAtar/blob/master/examples/dqn.py. Deviations: 10 million frames
    of 64 environments with an update for every fourth frame, instead of 5 million frames of one
    with an update for each, because these take a quarter of the time; so the target is copied after
    250 updates, which are as many frames as there. Double Q-learning, Adam instead of RMSProp with
    momentum, and an epsilon that falls to 0.05 in 250,000 frames instead of 0.1 in 100,000: the
    returns in docs/fused.md are of these.
    """
    return Experiment(
        preset=name,
        agent=DQNConfig(
            target_period=250,  # 1,000 frames
            epsilon_end=0.05,
            epsilon_frames=250_000,
            optimizer=OptimizerConfig(learning_rate=2.5e-4),
        ),
        env=EnvConfig(f"{game}-MinAtar", num_envs=64, type="jax"),
        topology="fused",
        network=_network(game),
        replay=transitions(32, max_size=100_000, min_size=5_000, updates_per_frame=0.25),
        evaluator=_EVALUATOR,
        frames=_FRAMES,
        log_period=50_000,
        checkpoint_period=1_000_000,
        checkpoint_replay=False,
    )


@preset
def minatar_breakout_ppo(name: str) -> Experiment:
    """Breakout of MinAtar by PPO, in one compiled program."""
    # The game is deterministic: with 0.01 a policy soon repeats one game and explores no more.
    return _ppo(name, "Breakout", entropy_cost=0.05)


@preset
def minatar_asterix_ppo(name: str) -> Experiment:
    """Asterix of MinAtar by PPO, in one compiled program."""
    return _ppo(name, "Asterix")


@preset
def minatar_freeway_ppo(name: str) -> Experiment:
    """Freeway of MinAtar by PPO, in one compiled program."""
    return _ppo(name, "Freeway")


@preset
def minatar_space_invaders_ppo(name: str) -> Experiment:
    """Space Invaders of MinAtar by PPO, in one compiled program."""
    return _ppo(name, "SpaceInvaders")


@preset
def minatar_seaquest_ppo(name: str) -> Experiment:
    """Seaquest of MinAtar by PPO, in one compiled program."""
    return _ppo(name, "Seaquest")


@preset
def minatar_breakout_pqn(name: str) -> Experiment:
    """Breakout of MinAtar by PQN, in one compiled program."""
    return _pqn(name, "Breakout")


@preset
def minatar_asterix_pqn(name: str) -> Experiment:
    """Asterix of MinAtar by PQN, in one compiled program."""
    return _pqn(name, "Asterix")


@preset
def minatar_freeway_pqn(name: str) -> Experiment:
    """Freeway of MinAtar by PQN, in one compiled program."""
    return _pqn(name, "Freeway")


@preset
def minatar_space_invaders_pqn(name: str) -> Experiment:
    """Space Invaders of MinAtar by PQN, in one compiled program."""
    return _pqn(name, "SpaceInvaders")


@preset
def minatar_seaquest_pqn(name: str) -> Experiment:
    """Seaquest of MinAtar by PQN, in one compiled program."""
    return _pqn(name, "Seaquest")


@preset
def minatar_breakout_dqn(name: str) -> Experiment:
    """Breakout of MinAtar by DQN, in one compiled program."""
    return _dqn(name, "Breakout")


@preset
def minatar_asterix_dqn(name: str) -> Experiment:
    """Asterix of MinAtar by DQN, in one compiled program."""
    return _dqn(name, "Asterix")


@preset
def minatar_freeway_dqn(name: str) -> Experiment:
    """Freeway of MinAtar by DQN, in one compiled program."""
    return _dqn(name, "Freeway")


@preset
def minatar_space_invaders_dqn(name: str) -> Experiment:
    """Space Invaders of MinAtar by DQN, in one compiled program."""
    return _dqn(name, "SpaceInvaders")


@preset
def minatar_seaquest_dqn(name: str) -> Experiment:
    """Seaquest of MinAtar by DQN, in one compiled program."""
    return _dqn(name, "Seaquest")
