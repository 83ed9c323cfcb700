"""Presets of PPO."""

from __future__ import annotations

import dataclasses
from typing import Any

from agents.ppo import PPOConfig
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import atari, find, on_policy, preset
from rlstack.acting.evaluator import EvaluatorConfig
from rlstack.families.normalised import NormalisationConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig


def _annealed(
    agent: PPOConfig, learning_rate: float, frames: int, num_envs: int, unroll_length: int
) -> PPOConfig:
    """Lets the learning rate fall to 0 over the optimizer steps of the whole run."""
    batches = frames // (num_envs * unroll_length)
    steps = batches * agent.num_epochs * agent.num_minibatches
    optimizer = OptimizerConfig(learning_rate=learning_rate, anneal_steps=steps)
    return dataclasses.replace(agent, optimizer=optimizer)


@preset
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
        replay=on_policy(8, 32),
        frames=frames,
    )


@preset
def acrobot_ppo(name: str) -> Experiment:
    """Acrobot-v1 with normalised observations."""
    return Experiment(
        preset=name,
        agent=PPOConfig(
            gae_lambda=0.94,
            entropy_cost=0.0,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        env=EnvConfig("Acrobot-v1", num_envs=16),
        normalisation=NormalisationConfig(observations=True),
        replay=on_policy(16, 128),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=500_000,
    )


@preset
def pendulum_ppo(name: str) -> Experiment:
    """Pendulum-v1, continuous; a short horizon suits it."""
    frames = 300_000
    agent = PPOConfig(
        discount=0.9,
        entropy_cost=0.0,
        num_epochs=10,
        num_minibatches=16,
    )
    return Experiment(
        preset=name,
        agent=_annealed(agent, 1e-3, frames, 8, 256),
        env=EnvConfig("Pendulum-v1", num_envs=8),
        normalisation=NormalisationConfig(observations=True, reward_scale=0.1),
        replay=on_policy(8, 256),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=frames,
    )


@preset
def pong_ppo(name: str) -> Experiment:
    """Pong on pixels, with the constants of Huang et al. (2022) for Atari."""
    frames = 10_000_000
    return Experiment(
        preset=name,
        agent=_annealed(PPOConfig(clip_ratio=0.1), 2.5e-4, frames, 8, 128),
        env=atari("Pong-v5", num_envs=8),
        network=NetworkConfig(torso="nature", hidden_sizes=(512,), shared=True),
        replay=on_policy(8, 128),
        frames=frames,
    )


@preset
def pong_small_ppo(name: str) -> Experiment:
    """Pong on images of 42x42, at three times the speed of pong-ppo where there are only CPUs."""
    frames = 2_000_000
    whole = find("pong-ppo")
    options = {**whole.env.options, "img_height": 42, "img_width": 42}
    return dataclasses.replace(
        whole,
        preset=name,
        agent=_annealed(PPOConfig(clip_ratio=0.1), 5e-4, frames, 8, 128),
        env=dataclasses.replace(whole.env, options=options),
        frames=frames,
    )


def _mujoco(name: str, env: str, **changes: Any) -> Experiment:
    """Returns PPO on a MuJoCo task, with the constants of Tianshou's benchmark."""
    frames = 1_000_000
    agent = PPOConfig(entropy_cost=0.0, num_epochs=10, num_minibatches=32, **changes)
    return Experiment(
        preset=name,
        agent=_annealed(agent, 3e-4, frames, 8, 256),
        env=EnvConfig(env, num_envs=8),
        network=NetworkConfig(policy_log_std=-0.5),
        normalisation=NormalisationConfig(observations=True, rewards="return", reward_clip=10.0),
        replay=on_policy(8, 256),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=frames,
    )


@preset
def halfcheetah_ppo(name: str) -> Experiment:
    """HalfCheetah-v4, which never falls: advantages as they are take it much farther."""
    return _mujoco(name, "HalfCheetah-v4", normalise_advantages=False, value_cost=0.25)


@preset
def hopper_ppo(name: str) -> Experiment:
    """Hopper-v4, which falls: with normalised advantages, or it learns to stand."""
    return _mujoco(name, "Hopper-v4")
