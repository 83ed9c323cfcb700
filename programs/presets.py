"""Ready experiments, named ENV-AGENT. Constants come from the sources named, or were tuned here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from agents.dqn import DQNConfig
from agents.ppo import PPOConfig
from programs.experiment import EnvConfig, Experiment, nearest
from rlstack.evaluator import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.replay import ReplayConfig

PRESETS: dict[str, Callable[[], Experiment]] = {}
_DESCRIPTIONS: dict[str, str] = {}


def preset(name: str) -> Experiment:
    """Returns a preset by name.

    Raises:
      ValueError: there is none of that name; suggests the nearest.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: there is no {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]()


def describe(name: str) -> str:
    """Returns a preset's one-line description; "" for an unknown name."""
    return _DESCRIPTIONS.get(name, "")


def _preset(function: Callable[[str], Experiment]) -> Callable[[str], Experiment]:
    name = function.__name__.replace("_", "-")
    PRESETS[name] = lambda: function(name)
    _DESCRIPTIONS[name] = (function.__doc__ or "").splitlines()[0]
    return function


def _on_policy(num_envs: int, unroll_length: int) -> ReplayConfig:
    """Each unroll of every environment, once."""
    return ReplayConfig(
        sampler="fifo",
        batch_size=num_envs,
        unroll_length=unroll_length,
        max_size=2 * num_envs,
    )


def _annealed(
    agent: PPOConfig, learning_rate: float, frames: int, num_envs: int, unroll_length: int
) -> PPOConfig:
    """Lets the learning rate fall to 0 over the optimizer steps of the whole run."""
    batches = frames // (num_envs * unroll_length)
    steps = batches * agent.num_epochs * agent.num_minibatches
    optimizer = OptimizerConfig(learning_rate=learning_rate, anneal_steps=steps)
    return dataclasses.replace(agent, optimizer=optimizer)


@_preset
def cartpole_ppo(name: str) -> Experiment:
    """CartPole-v1 in seconds: short unrolls and many epochs, as in RL Baselines3 Zoo."""
    frames = 150_000
    agent = PPOConfig(
        discount=0.98, gae_lambda=0.8, entropy_cost=0.0, num_epochs=20, num_minibatches=1
    )
    return Experiment(
        preset=name,
        agent=_annealed(agent, 1e-3, frames, 8, 32),
        env=EnvConfig("CartPole-v1", num_envs=8),
        replay=_on_policy(8, 32),
        frames=frames,
    )


@_preset
def cartpole_dqn(name: str) -> Experiment:
    """CartPole-v1 off-policy: double Q-learning with 8-step targets, which keep it stable."""
    return Experiment(
        preset=name,
        agent=DQNConfig(
            target_rate=0.005,
            epsilon_frames=16_000,
            epsilon_end=0.04,
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=25_000),
        ),
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=ReplayConfig(
            sampler="uniform",
            batch_size=128,
            unroll_length=8,
            starts="not_last",
            max_size=100_000,
            min_size=1_000,
            samples_per_insert=32.0,
        ),
        frames=100_000,
    )


@_preset
def acrobot_ppo(name: str) -> Experiment:
    """Acrobot-v1 with normalised observations."""
    return Experiment(
        preset=name,
        agent=PPOConfig(
            gae_lambda=0.94,
            entropy_cost=0.0,
            normalise_observations=True,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        env=EnvConfig("Acrobot-v1", num_envs=16),
        replay=_on_policy(16, 128),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=500_000,
    )


@_preset
def pendulum_ppo(name: str) -> Experiment:
    """Pendulum-v1, continuous; a short horizon suits it."""
    frames = 300_000
    agent = PPOConfig(
        discount=0.9,
        entropy_cost=0.0,
        num_epochs=10,
        num_minibatches=16,
        normalise_observations=True,
        reward_scale=0.1,
    )
    return Experiment(
        preset=name,
        agent=_annealed(agent, 1e-3, frames, 8, 256),
        env=EnvConfig("Pendulum-v1", num_envs=8),
        replay=_on_policy(8, 256),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=frames,
    )


@_preset
def pong_ppo(name: str) -> Experiment:
    """Pong on pixels, with the constants of Huang et al. (2022) for Atari."""
    frames = 10_000_000
    return Experiment(
        preset=name,
        agent=_annealed(PPOConfig(clip_ratio=0.1), 2.5e-4, frames, 8, 128),
        env=EnvConfig(
            "Pong-v5",
            num_envs=8,
            options={"episodic_life": True, "reward_clip": True},
            eval_options={"episodic_life": False, "reward_clip": False},
        ),
        network=NetworkConfig(torso="nature", hidden_sizes=(512,), shared=True),
        replay=_on_policy(8, 128),
        frames=frames,
    )


@_preset
def breakout_dqn(name: str) -> Experiment:
    """Breakout on pixels: Mnih et al. (2015) with double, duelling, prioritized 3-step learning."""
    return Experiment(
        preset=name,
        agent=DQNConfig(
            target_period=2_000,
            epsilon_end=0.01,
            epsilon_frames=250_000,
            optimizer=OptimizerConfig(learning_rate=6.25e-5, eps=1.5e-4),
        ),
        env=EnvConfig(
            "Breakout-v5",
            num_envs=8,
            options={"episodic_life": True, "reward_clip": True},
            eval_options={"episodic_life": False, "reward_clip": False},
        ),
        network=NetworkConfig(torso="nature", hidden_sizes=(512,), duelling=True),
        replay=ReplayConfig(
            sampler="prioritized",
            batch_size=32,
            unroll_length=3,
            starts="not_last",
            max_size=100_000,  # 0.7 GB: of its four stacked frames a step holds the newest
            frame_stack=4,
            min_size=20_000,
            samples_per_insert=8.0,  # one update every four steps, as in the paper
            priority_exponent=0.5,
        ),
        frames=10_000_000,
        checkpoint_period=1_000_000,
        checkpoint_replay=False,
    )


@_preset
def halfcheetah_ppo(name: str) -> Experiment:
    """HalfCheetah-v4, continuous control with normalised observations."""
    frames = 1_000_000
    agent = PPOConfig(
        entropy_cost=0.0,
        num_epochs=10,
        num_minibatches=32,
        normalise_observations=True,
        reward_scale=0.1,
    )
    return Experiment(
        preset=name,
        agent=_annealed(agent, 3e-4, frames, 8, 256),
        env=EnvConfig("HalfCheetah-v4", num_envs=8),
        replay=_on_policy(8, 256),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=frames,
    )
