"""Presets of MPO, V-MPO and PPG; their constants were tuned here where the text names no source."""

from __future__ import annotations

import dataclasses

from rlstack.agents.mpo import MPOConfig
from rlstack.agents.ppg import PPGConfig
from rlstack.agents.vmpo import VMPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import (
    falling,
    like,
    on_policy,
    preset,
    transitions,
)


@preset
def pendulum_mpo(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by actions of the policy that are weighted by their values."""
    agent = MPOConfig(
        discount=0.98, random_frames=1_000, epsilon_mean=1e-2, optimizer=falling(1e-3, 19_000)
    )
    return like(
        "pendulum-sac",
        name,
        agent=agent,
        network=NetworkConfig(hidden_sizes=(64, 64), activation="elu"),
        normalisation=NormalisationConfig(reward_scale=0.1),
        replay=transitions(128, 20_000, min_size=1_000, updates_per_frame=1.0, num_steps=5),
    )


@preset
def cartpole_mpo(name: str) -> Experiment:
    """CartPole-v1 off-policy, by a policy fitted to one that is weighted by values."""
    agent = MPOConfig(
        random_frames=1_000,
        temperature=1.0,
        epsilon=0.01,  # two actions: a policy within 0.1 of the last one is soon certain
        epsilon_mean=1e-3,
        optimizer=falling(1e-3, 25_000),
    )
    return like("cartpole-dqn", name, agent=agent)


@preset
def halfcheetah_mpo(name: str) -> Experiment:
    """HalfCheetah-v4 off-policy, with batches, layers and updates of halfcheetah-sac."""
    agent = MPOConfig(
        target_period=1,
        target_rate=0.01,
        random_frames=5_000,
        epsilon_mean=1e-2,
        epsilon_std=1e-4,
        alpha_std=10.0,  # with 1,000 the deviation would stand still for 200,000 frames
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    network = NetworkConfig(hidden_sizes=(256, 256), activation="elu")
    return like("halfcheetah-sac", name, agent=agent, network=network)


@preset
def cartpole_vmpo(name: str) -> Experiment:
    """CartPole-v1 on-policy, by the better half of the steps of each batch."""
    optimizer = OptimizerConfig(learning_rate=1e-3)
    agent = VMPOConfig(
        discount=0.98,
        num_epochs=10,
        num_minibatches=4,
        epsilon=0.1,
        optimizer=optimizer,
        duals_optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    return on_policy(
        name,
        agent,
        EnvConfig("CartPole-v1", num_envs=8),
        unroll_length=64,
        frames=200_000,
        normalisation=NormalisationConfig(rewards="return"),
    )


@preset
def pendulum_vmpo(name: str) -> Experiment:
    """Pendulum-v1 on-policy, by the better half of the steps of each batch."""
    agent = VMPOConfig(
        discount=0.9,
        gae_lambda=0.8,
        num_epochs=10,
        num_minibatches=16,
        epsilon=0.2,  # the run has 146 updates, and the paper's have a million
        optimizer=OptimizerConfig(learning_rate=1e-3),
        duals_optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    return on_policy(
        name,
        agent,
        EnvConfig("Pendulum-v1", num_envs=8),
        unroll_length=256,
        frames=300_000,
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        normalisation=NormalisationConfig(observations=True, reward_scale=0.1),
    )


@preset
def halfcheetah_vmpo(name: str) -> Experiment:
    """HalfCheetah-v4 on-policy, with the batches, the network and the scales of halfcheetah-ppo."""
    agent = VMPOConfig(
        gae_lambda=0.95,
        num_epochs=20,
        num_minibatches=8,
        epsilon=0.05,  # the run has 488 updates, and the paper's have a million
        epsilon_std=1e-6,  # with the paper's 5e-5 exploration ends early
        optimizer=falling(3e-4, 488 * 20 * 8),
        duals_optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    return like("halfcheetah-ppo", name, agent=agent)


@preset
def cartpole_ppg(name: str) -> Experiment:
    """CartPole-v1 by PPO with an auxiliary phase after every eight updates."""
    agent = PPGConfig(
        discount=0.98,
        gae_lambda=0.8,
        num_epochs=4,
        num_minibatches=1,
        entropy_cost=0.0,
        aux_period=8,
        aux_steps=2048,
        aux_minibatches=8,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    env = EnvConfig("CartPole-v1", num_envs=8)
    made = on_policy(name, agent, env, unroll_length=32, frames=150_000)
    # An update has four steps of the policy phase and, on average, six of the auxiliary phase.
    optimizer = dataclasses.replace(agent.optimizer, anneal_steps=10 * 150_000 // 256)
    return dataclasses.replace(made, agent=dataclasses.replace(agent, optimizer=optimizer))
