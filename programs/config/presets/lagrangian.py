"""Presets of agents with a limit on costs (Ray et al. 2019, "Benchmarking Safe Exploration")."""

from __future__ import annotations

from rlstack.agents.ppo_lagrangian import PPOLagrangianConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset


@preset
def toll_ppo_lagrangian(name: str) -> Experiment:
    """Tolls under a limit of 2 by PPO-Lagrangian: the best return is 8, and 16 without a limit."""
    agent = PPOLagrangianConfig(
        cost_limit=2.0,
        num_epochs=8,
        entropy_cost=0.02,
        entropy_anneal_steps=2_500,
        optimizer=OptimizerConfig(learning_rate=2e-3),
        multiplier=OptimizerConfig("sgd", 0.1, anneal_steps=240, final_learning_rate=0.01),
    )
    return on_policy(
        name,
        agent,
        EnvConfig("rlstack.jax_envs.toy:Toll", num_envs=128, type="jax"),
        unroll_length=32,
        frames=1_000_000,
        topology="fused",
        evaluator=EvaluatorConfig(episodes=512, num_envs=128),
    )
