"""Presets of PPO."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig, InferencerConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import (
    atari,
    find,
    on_policy,
    on_policy_replay,
    preset,
)
from rlstack.programs.config.program_config import ProgramConfig


@preset
def cartpole_ppo(name: str) -> Experiment:
    """CartPole-v1 in seconds: short unrolls and many epochs, as in RL Baselines3 Zoo.

    https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml. Deviations: 150,000
    frames instead of 100,000, a clip_ratio that does not fall, and a value loss of half the weight,
    since Stable Baselines3 does not halve it; with Adam and no layer in common this matters little.
    """
    agent = PPOConfig(
        discount=0.98,
        gae_lambda=0.8,
        entropy_cost=0.0,
        num_epochs=20,
        num_minibatches=1,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    env = EnvConfig("CartPole-v1", num_envs=8)
    return on_policy(name, agent, env, unroll_length=32, frames=150_000)


@preset
def gymnax_cartpole_ppo(name: str) -> Experiment:
    """CartPole-v1 of gymnax, in one compiled program: fewer epochs than cartpole-ppo."""
    env = EnvConfig("CartPole-v1", num_envs=8, type="jax")
    base: Any = find("cartpole-ppo").agent
    agent = dataclasses.replace(
        base,
        num_epochs=6,
        # Of a policy that balances to the end, standardised advantages would be noise of size 1:
        # single updates would unlearn it.
        advantage_epsilon=0.1,
        optimizer=OptimizerConfig(learning_rate=2e-3),
    )
    return on_policy(name, agent, env, unroll_length=32, frames=150_000, topology="fused")


@preset
def memorychain_ppo(name: str) -> Experiment:
    """A bit to be remembered over 100 steps, bsuite's longest chain, in one compiled program.

    Of the 101 actions of an episode, only the last one counts. An unroll holds two episodes.
    """
    agent = PPOConfig(
        discount=0.99,
        num_epochs=2,
        num_minibatches=4,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    env = EnvConfig("MemoryChain-bsuite", num_envs=32, type="jax", options={"memory_length": 100})
    network = NetworkConfig(hidden_sizes=(64,), core="mingru")
    fields: dict[str, Any] = {"network": network, "topology": "fused"}
    return on_policy(name, agent, env, unroll_length=256, frames=1_500_000, **fields)


@preset
def acrobot_ppo(name: str) -> Experiment:
    """Acrobot-v1 with normalised observations."""
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return Experiment(
        preset=name,
        agent=PPOConfig(gae_lambda=0.94, entropy_cost=0.0, optimizer=optimizer),
        env=EnvConfig("Acrobot-v1", num_envs=16),
        normalisation=NormalisationConfig(observations=True),
        replay=on_policy_replay(16, 128),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=500_000,
    )


@preset
def pendulum_ppo(name: str) -> Experiment:
    """Pendulum-v1, continuous; a short horizon suits it."""
    return on_policy(
        name,
        PPOConfig(
            discount=0.9,
            entropy_cost=0.0,
            num_epochs=10,
            num_minibatches=16,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        EnvConfig("Pendulum-v1", num_envs=8),
        unroll_length=256,
        frames=300_000,
        normalisation=NormalisationConfig(observations=True, reward_scale=0.1),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
    )


_NATURE = NetworkConfig(torso="nature", hidden_sizes=(512,), shared=True)


def _atari(
    name: str,
    game: str,
    learning_rate: float,
    frames: int,
    value_clip: float = 0.1,
    **options: int,
) -> Experiment:
    """Returns PPO on an Atari game, with the constants of Huang et al. (2022).

    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/ and
    https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo_atari.py
    """
    env = atari(game, num_envs=8)
    optimizer = OptimizerConfig(learning_rate=learning_rate)
    return on_policy(
        name,
        PPOConfig(clip_ratio=0.1, value_clip=value_clip, optimizer=optimizer),
        dataclasses.replace(env, options={**env.options, **options}),
        unroll_length=128,
        frames=frames,
        network=_NATURE,
    )


@preset
def pong_ppo(name: str) -> Experiment:
    """Pong on pixels, with the constants of Huang et al. (2022) for Atari."""
    return _atari(name, "Pong-v5", 2.5e-4, frames=10_000_000)


@preset
def breakout_ppo(name: str) -> Experiment:
    """Breakout on pixels, with the constants of Huang et al. (2022) for Atari."""
    return _atari(name, "Breakout-v5", 2.5e-4, frames=10_000_000)


def _atari_on_gpu(name: str, game: str, frames: int) -> Experiment:
    """Returns PPO on an Atari game with enough environments for a GPU beside 16 cores.

    Two actors, in threads, step 48 environments each and act on the GPU. Minibatches have twice as
    many steps as those of `_atari`, and the learning rate is larger by about the square root of 2.
    Values are not clipped: the returns in docs/results.md are of this.
    """
    actors, num_envs = 2, 96
    optimizer = OptimizerConfig(learning_rate=3.5e-4)
    experiment = on_policy(
        name,
        PPOConfig(clip_ratio=0.1, num_minibatches=12, optimizer=optimizer),
        atari(game, num_envs),
        unroll_length=64,
        frames=frames,
        network=_NATURE,
        topology="heavy_env",
        program=ProgramConfig(launch="threads", num_actors=actors),
        inferencer=InferencerConfig(devices=(0,)),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10, period="off"),
        log_period=20_000,
        checkpoint_period=1_000_000,
        checkpoint_replay=False,  # up to 1.2 GB
    )
    env = dataclasses.replace(experiment.env, num_envs=num_envs // actors)
    return dataclasses.replace(experiment, env=env)


@preset
def pong_gpu_ppo(name: str) -> Experiment:
    """Pong on pixels with 96 environments, for a GPU and many cores."""
    return _atari_on_gpu(name, "Pong-v5", frames=5_400_000)


@preset
def breakout_gpu_ppo(name: str) -> Experiment:
    """Breakout on pixels with 96 environments, for a GPU and many cores."""
    return _atari_on_gpu(name, "Breakout-v5", frames=10_000_000)


@preset
def pong_small_ppo(name: str) -> Experiment:
    """Pong on images of 42x42, at three times the speed of pong-ppo on CPUs.

    It has twice the learning rate, because it is short. Values are not clipped: the return in
    docs/results.md is of this.
    """
    size = {"img_height": 42, "img_width": 42}
    return _atari(name, "Pong-v5", 5e-4, frames=2_000_000, value_clip=0.0, **size)


def _mujoco(name: str, env: str, **changes: Any) -> Experiment:
    """Returns PPO on a MuJoCo task, with the constants of Tianshou's benchmark.

    https://github.com/thu-ml/tianshou/blob/v1.0.0/examples/mujoco/mujoco_ppo.py. Its value loss is
    not halved, so its weight of 0.25 is 0.5 here. Deviations: a third of the frames; advantages are
    those of the acting network in all epochs; rewards are divided by the deviation of returns,
    instead of values by that of their targets; Adam's eps is 1e-5.
    """
    return on_policy(
        name,
        PPOConfig(entropy_cost=0.0, num_epochs=10, num_minibatches=32, **changes),
        EnvConfig(env, num_envs=8),
        unroll_length=256,
        frames=1_000_000,
        network=NetworkConfig(policy_log_std=-0.5),
        normalisation=NormalisationConfig(observations=True, rewards="return", reward_clip=10.0),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
    )


@preset
def halfcheetah_ppo(name: str) -> Experiment:
    """HalfCheetah-v4, which never falls: without normalised advantages it runs much farther."""
    return _mujoco(name, "HalfCheetah-v4", normalise_advantages=False)


@preset
def hopper_ppo(name: str) -> Experiment:
    """Hopper-v4, which falls: without normalised advantages it only learns to stand.

    Tianshou does not normalise them either: docs/presets.md has the returns of both.
    """
    return _mujoco(name, "Hopper-v4")
