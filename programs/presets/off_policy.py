"""Presets of the agents with a policy and critics that learn off-policy: SAC, TD3 and DDPG.

The constants of Pendulum were tuned here, with one update a frame and rates that fall to 0. Those
of HalfCheetah make the most of a few processor cores: batches and updates are half as many as in
the papers, with rates as much larger.
"""

from __future__ import annotations

from typing import Any

from agents.ddpg import DDPGConfig
from agents.sac import SACConfig
from agents.td3 import TD3Config
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import preset
from rlstack.acting.evaluator import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.replay import ReplayConfig


def _transitions(
    batch_size: int, max_size: int, warm_up: int, updates_a_frame: float, num_steps: int = 1
) -> ReplayConfig:
    """Transitions of ``num_steps``, drawn evenly once there are ``warm_up`` of them."""
    return ReplayConfig(
        sampler="uniform",
        batch_size=batch_size,
        unroll_length=num_steps,
        starts="not_last",
        max_size=max_size,
        min_size=warm_up,
        samples_per_insert=batch_size * updates_a_frame,
    )


def _pendulum(name: str, agent: Any) -> Experiment:
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("Pendulum-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        replay=_transitions(128, max_size=20_000, warm_up=1_000, updates_a_frame=1.0),
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=20_000,
    )


def _falling(learning_rate: float, steps: int) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=learning_rate, anneal_steps=steps)


@preset
def pendulum_sac(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a policy that learns how random to be."""
    optimizer = _falling(2e-3, 19_000)
    return _pendulum(name, SACConfig(discount=0.98, random_frames=1_000, optimizer=optimizer))


@preset
def pendulum_td3(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a deterministic policy and two critics."""
    agent = TD3Config(
        discount=0.98,
        random_frames=1_000,
        optimizer=_falling(2e-3, 19_000),
        policy_optimizer=_falling(2e-3, 9_500),  # it makes half as many steps
    )
    return _pendulum(name, agent)


@preset
def pendulum_ddpg(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a deterministic policy and one critic."""
    optimizer = _falling(2e-3, 19_000)
    return _pendulum(name, DDPGConfig(discount=0.98, random_frames=1_000, optimizer=optimizer))


def _halfcheetah(name: str, agent: Any) -> Experiment:
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("HalfCheetah-v4", num_envs=4),
        network=NetworkConfig(hidden_sizes=(256, 256), activation="relu"),
        replay=_transitions(128, max_size=300_000, warm_up=5_000, updates_a_frame=0.5),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=300_000,
        checkpoint_replay=False,
    )


@preset
def halfcheetah_sac(name: str) -> Experiment:
    """HalfCheetah-v4 off-policy: an update every second frame, of larger rates."""
    agent = SACConfig(target_rate=0.01, optimizer=OptimizerConfig(learning_rate=1e-3))
    return _halfcheetah(name, agent)


@preset
def halfcheetah_td3(name: str) -> Experiment:
    """HalfCheetah-v4 off-policy, by a deterministic policy: an update every second frame."""
    agent = TD3Config(target_rate=0.01, optimizer=OptimizerConfig(learning_rate=1e-3))
    return _halfcheetah(name, agent)


@preset
def cartpole_sac(name: str) -> Experiment:
    """CartPole-v1 off-policy: discrete actions, and 8-step targets as in cartpole-dqn.

    The temperature is fixed: what a single action is worth is so little here that one which keeps
    an entropy, even of 0.1, stops learning at half the return.
    """
    return Experiment(
        preset=name,
        agent=SACConfig(
            target_rate=0.01,
            temperature=0.02,
            learn_temperature=False,
            max_grad_norm=1.0,
            random_frames=1_000,
            optimizer=_falling(1e-3, 24_750),
        ),
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=_transitions(128, 100_000, warm_up=1_000, updates_a_frame=0.25, num_steps=8),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=100_000,
    )
