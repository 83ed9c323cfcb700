"""Presets: one experiment for each policy. ``--module supply_chain.presets`` loads them.

The constants were chosen on training scenarios with seed 1. Every preset is evaluated on the same
held-out scenarios.
"""

from __future__ import annotations

from rlstack.agents.a2c import A2CConfig
from rlstack.agents.ddpg import DDPGConfig
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.fixed import ScriptedConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import (
    falling,
    on_policy,
    on_policy_replay,
    preset,
    transitions,
)

EVALUATION = EvaluatorConfig(episodes=100, num_envs=20)
SCALED = NormalisationConfig(reward_scale=0.05)  # a day's profit is about 20
NETWORK = NetworkConfig(hidden_sizes=(64, 64), activation="relu")


def environment(actions: str, num_envs: int = 8) -> EnvConfig:
    """Returns the supply chain with one kind of actions; evaluation has held-out scenarios."""
    return EnvConfig(
        "supply_chain.environment:SupplyChainEnv",
        num_envs=num_envs,
        options={"actions": actions},
        eval_options={"scenarios": "held_out"},
    )


def _planner(name: str, rule: str, actions: str) -> Experiment:
    """Returns a run of a rule, which does not learn."""
    return Experiment(
        preset=name,
        agent=ScriptedConfig(f"supply_chain.rules:{rule}"),
        env=environment(actions),
        replay=on_policy_replay(8, 14),
        evaluator=EVALUATION,
        frames=1_000,
    )


@preset
def supply_chain_base_stock(name: str) -> Experiment:
    """A planner without forecasts on the supply chain: base stocks in units."""
    return _planner(name, "base_stock", "levels")


@preset
def supply_chain_forecast_stock(name: str) -> Experiment:
    """A planner with forecasts on the supply chain: base stocks in days of expected demand."""
    return _planner(name, "forecast_stock", "cover")


@preset
def supply_chain_dqn(name: str) -> Experiment:
    """DQN on the supply chain: one choice for all facilities."""
    return Experiment(
        preset=name,
        agent=DQNConfig(
            discount=0.97,
            target_rate=0.01,
            epsilon_frames=30_000,
            epsilon_end=0.02,
            optimizer=falling(1e-3, 20_000),
        ),
        env=environment("joint"),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=transitions(
            64, max_size=100_000, min_size=1_000, updates_per_frame=0.25, num_steps=3
        ),
        normalisation=SCALED,
        evaluator=EVALUATION,
        frames=80_000,
    )


@preset
def supply_chain_ppo(name: str) -> Experiment:
    """PPO on the supply chain: a choice for each facility."""
    return on_policy(
        name,
        PPOConfig(
            discount=0.97,
            entropy_cost=0.003,
            num_epochs=8,
            num_minibatches=4,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        environment("choices", num_envs=16),
        unroll_length=56,
        frames=300_000,
        network=NETWORK,
        normalisation=SCALED,
        evaluator=EVALUATION,
    )


@preset
def supply_chain_a2c(name: str) -> Experiment:
    """Advantage actor-critic on the supply chain: a choice for each facility."""
    return on_policy(
        name,
        A2CConfig(
            discount=0.97,
            gae_lambda=0.95,
            entropy_cost=0.003,
            normalise_advantages=True,
            optimizer=OptimizerConfig(learning_rate=2e-3),
        ),
        environment("choices", num_envs=16),
        unroll_length=14,
        frames=300_000,
        network=NETWORK,
        normalisation=SCALED,
        evaluator=EVALUATION,
    )


@preset
def supply_chain_ddpg(name: str) -> Experiment:
    """DDPG on the supply chain: days of cover as real numbers."""
    return Experiment(
        preset=name,
        agent=DDPGConfig(
            discount=0.97,
            random_frames=2_000,
            noise_scale=0.3,
            target_rate=0.01,
            optimizer=falling(1e-3, 30_000),
        ),
        env=environment("cover"),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=transitions(
            128, max_size=100_000, min_size=2_000, updates_per_frame=0.5, num_steps=3
        ),
        normalisation=SCALED,
        evaluator=EVALUATION,
        frames=60_000,
    )
