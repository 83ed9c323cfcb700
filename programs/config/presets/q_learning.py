"""Presets of Q-learning: DQN, C51, Rainbow, QR-DQN, IQN and PQN.

Rainbow is C51 with every refinement of Q-learning.
"""

from __future__ import annotations

import dataclasses

from rlstack.agents.c51 import C51Config
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.iqn import IQNConfig
from rlstack.agents.pqn import PQNConfig
from rlstack.agents.qr_dqn import QRDQNConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import (
    atari,
    falling,
    find,
    like,
    on_policy,
    preset,
    transitions,
)


def _classic(learning_rate: float, updates: int) -> DQNConfig:
    """Returns DQN for classic control."""
    return DQNConfig(
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(learning_rate, updates),
    )


@preset
def cartpole_dqn(name: str) -> Experiment:
    """CartPole-v1 off-policy: double Q-learning with 8-step targets, which keep it stable."""
    return Experiment(
        preset=name,
        agent=_classic(1e-3, 25_000),
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=transitions(
            128, max_size=100_000, min_size=1_000, updates_per_frame=0.25, num_steps=8
        ),
        frames=100_000,
    )


@preset
def gymnax_cartpole_dqn(name: str) -> Experiment:
    """CartPole-v1 of gymnax, in one compiled program: the constants of cartpole-dqn."""
    env = EnvConfig("CartPole-v1", num_envs=4, type="jax")
    return like("cartpole-dqn", name, env=env, topology="fused")


@preset
def acrobot_dqn(name: str) -> Experiment:
    """Acrobot-v1 off-policy: the constants of cartpole-dqn with a smaller learning rate."""
    return like(
        "cartpole-dqn",
        name,
        agent=_classic(5e-4, 25_000),
        env=EnvConfig("Acrobot-v1", num_envs=4),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
    )


@preset
def memory_cartpole_dqn(name: str) -> Experiment:
    """CartPole without velocities by DQN, which has no memory: to compare with R2D2."""
    return like(
        "cartpole-dqn",
        name,
        agent=_classic(1e-3, 75_000),
        env=EnvConfig("rlstack.envs.partial:cartpole_without_velocities", num_envs=4),
        evaluator=EvaluatorConfig(episodes=50, num_envs=50),
        frames=300_000,
    )


@preset
def breakout_dqn(name: str) -> Experiment:
    """Breakout on pixels: Mnih et al. (2015) with double, duelling, prioritized 3-step learning.

    The constants are those of Hessel et al. (2018), https://arxiv.org/abs/1710.02298, table 1, and
    the exploration is that of Dopamine before its noisy networks:
    https://github.com/google/dopamine/blob/master/dopamine/agents/rainbow/configs/rainbow_aaai.gin
    A step is four frames of the game. Deviations: a fifth of the frames, a tenth of the replay, and
    gradients are clipped to a norm of 10, as in Wang et al. (2016) for duelling networks.
    """
    frames = 10_000_000  # 40 million frames of the game
    return Experiment(
        preset=name,
        agent=DQNConfig(
            target_period=2_000,  # 32,000 frames of the game: an update every four steps
            epsilon_end=0.01,
            epsilon_frames=250_000,
            optimizer=OptimizerConfig(learning_rate=6.25e-5, eps=1.5e-4),
        ),
        env=atari("Breakout-v5", num_envs=8),
        network=NetworkConfig(torso="nature", hidden_sizes=(512,), duelling=True),
        replay=ReplayConfig(
            sampler="prioritized",
            batch_size=32,
            unroll_length=3,
            starts="not_last",
            max_size=100_000,  # 0.7 GB: of its four stacked frames a step stores the newest
            frame_stack=4,
            min_size=20_000,
            samples_per_insert=8.0,  # one update every four steps, as in the paper
            priority_exponent=0.5,
            importance_anneal_samples=8 * frames,
        ),
        frames=frames,
        checkpoint_period=1_000_000,
        checkpoint_replay=False,
    )


@preset
def cartpole_c51(name: str) -> Experiment:
    """CartPole-v1 with distributions of returns; otherwise the constants of cartpole-dqn."""
    agent = C51Config(
        min_value=0.0,  # each reward is 1, so returns discounted by 0.99 lie in [0, 100]
        max_value=100.0,
        double=False,
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(1e-3, 25_000),
    )
    return like("cartpole-dqn", name, agent=agent)


@preset
def cartpole_rainbow(name: str) -> Experiment:
    """CartPole-v1 with all of Rainbow: noise on weights explores after epsilon has fallen to 0."""
    base = find("cartpole-dqn")
    return like(
        "cartpole-dqn",
        name,
        agent=C51Config(
            min_value=0.0,
            max_value=100.0,
            target_rate=0.005,
            epsilon_frames=16_000,  # with noise alone, one of three seeds learns nothing
            epsilon_end=0.0,
            optimizer=falling(1e-3, 15_000),
        ),
        network=dataclasses.replace(
            base.network,
            duelling=True,
            noisy_sigma=0.1,  # the paper's 0.5 is slower here
        ),
        replay=dataclasses.replace(
            base.replay,
            sampler="prioritized",
            priority_exponent=0.5,
            importance_anneal_samples=32 * 60_000,
        ),
        frames=60_000,
    )


@preset
def breakout_rainbow(name: str) -> Experiment:
    """Breakout on pixels with the constants of Hessel et al. (2018), table 1.

    https://arxiv.org/abs/1710.02298, and its authors' colleagues' program:
    https://github.com/google/dopamine/blob/master/dopamine/agents/rainbow/configs/rainbow_aaai.gin
    A step is four frames of the game. Deviation: gradients are clipped to a norm of 10, as in Wang
    et al. (2016) for duelling networks.
    """
    base = find("breakout-dqn")
    frames = 50_000_000  # 200 million frames of the game, four per step
    return like(
        "breakout-dqn",
        name,
        agent=C51Config(
            # 32,000 frames of the game: an update every four steps, a step is four frames.
            target_period=2_000,
            epsilon_start=0.0,
            epsilon_end=0.0,
            optimizer=OptimizerConfig(learning_rate=6.25e-5, eps=1.5e-4),
        ),
        network=dataclasses.replace(base.network, noisy_sigma=0.5),
        replay=dataclasses.replace(
            base.replay,
            max_size=1_000_000,  # 7 GB
            importance_anneal_samples=8 * frames,
        ),
        frames=frames,
    )


@preset
def cartpole_qrdqn(name: str) -> Experiment:
    """CartPole-v1 by quantile regression; otherwise the constants of cartpole-dqn."""
    agent = QRDQNConfig(
        double=False,
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(1e-3, 15_000),
    )
    network = dataclasses.replace(find("cartpole-dqn").network, num_atoms=51)
    return like("cartpole-dqn", name, agent=agent, network=network, frames=60_000)


@preset
def cartpole_iqn(name: str) -> Experiment:
    """CartPole-v1 by implicit quantiles, 8 at a time; otherwise the constants of cartpole-dqn."""
    agent = IQNConfig(
        num_acting_fractions=8,
        num_fractions=8,
        num_target_fractions=8,
        double=False,
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(1e-3, 30_000),
    )
    replay = dataclasses.replace(
        find("cartpole-dqn").replay, batch_size=32, samples_per_insert=16.0
    )
    return like("cartpole-dqn", name, agent=agent, replay=replay, frames=60_000)


@preset
def cartpole_pqn(name: str) -> Experiment:
    """CartPole-v1 by Q-learning on new steps only: no replay, no target network, layer norm.

    The constants are those of the authors' program:
    https://github.com/mttga/purejaxql/blob/main/purejaxql/config/alg/pqn_cartpole.yaml
    """
    agent = PQNConfig(
        return_lambda=0.95,
        num_epochs=4,
        num_minibatches=16,
        epsilon_end=0.2,
        epsilon_frames=100_000,
        optimizer=OptimizerConfig("radam", learning_rate=1e-4),
    )
    return on_policy(
        name,
        agent,
        EnvConfig("CartPole-v1", num_envs=32),
        unroll_length=64,
        frames=500_000,
        network=NetworkConfig(hidden_sizes=(256, 256), activation="relu", norm="layer"),
        normalisation=NormalisationConfig(reward_scale=0.1),
    )


@preset
def gymnax_cartpole_pqn(name: str) -> Experiment:
    """CartPole-v1 of gymnax, in one compiled program: the constants of cartpole-pqn."""
    env = EnvConfig("CartPole-v1", num_envs=32, type="jax")
    return like("cartpole-pqn", name, env=env, topology="fused")
