"""Presets of agents that do not learn: baselines for other agents, and experts to clone."""

from __future__ import annotations

from rlstack.agents.fixed import RandomConfig, ScriptedConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy_replay, preset


def _cartpole(name: str, agent: RandomConfig | ScriptedConfig) -> Experiment:
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("CartPole-v1", num_envs=8),
        replay=on_policy_replay(8, 32),
        frames=20_000,
    )


@preset
def cartpole_random(name: str) -> Experiment:
    """CartPole-v1 with random actions: a return of about 20, to compare learned policies with."""
    return _cartpole(name, RandomConfig())


@preset
def cartpole_scripted(name: str) -> Experiment:
    """CartPole-v1 with a rule that balances for all 500 steps."""
    return _cartpole(name, ScriptedConfig("rlstack.agents.rules:balance_cartpole"))


@preset
def mountain_car_continuous_scripted(name: str) -> Experiment:
    """MountainCarContinuous-v0 with a rule that swings up the hill."""
    return Experiment(
        preset=name,
        agent=ScriptedConfig("rlstack.agents.rules:push_with_velocity"),
        env=EnvConfig("MountainCarContinuous-v0", num_envs=4),
        replay=on_policy_replay(4, 32),
        frames=4_000,
    )


@preset
def entity_floor_is_lava_scripted(name: str) -> Experiment:
    """FloorIsLava with a rule that always jumps to the high ground."""
    return Experiment(
        preset=name,
        agent=ScriptedConfig("rlstack.agents.rules:jump_to_high_ground"),
        env=EnvConfig("rlstack.entity.games:FloorIsLava", num_envs=16),
        replay=on_policy_replay(16, 32),
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=5_000,
    )
