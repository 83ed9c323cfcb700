"""Presets of agents with a bonus for new observations, on tasks that random actions do not solve.

The bonus has the weights and the discount of random network distillation (Burda et al. 2019,
arXiv:1810.12894); the rest is tuned here for small observations.
"""

from __future__ import annotations

from rlstack.agents.rnd import RNDConfig, RNDDQNConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset, transitions

_DEEP_SEA = "rlstack.jax_envs.toy:DeepSea"


@preset
def deepsea_rnd(name: str) -> Experiment:
    """Deep Sea of 20 x 20 by PPO with a bonus: 1 of 2^20 sequences of actions finds the treasure.

    With --agent.intrinsic-weight 0 it is PPO alone, which ends at 0.
    """
    agent = RNDConfig(
        discount=0.999,
        num_epochs=4,
        num_minibatches=4,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        predictor=OptimizerConfig(learning_rate=1e-3),
    )
    return on_policy(
        name,
        agent,
        EnvConfig(_DEEP_SEA, num_envs=32, type="jax", options={"size": 20}),
        unroll_length=64,
        frames=200_000,
        topology="fused",
        evaluator=EvaluatorConfig(episodes=32, num_envs=32),
    )


@preset
def deepsea_rnd_dqn(name: str) -> Experiment:
    """Deep Sea of 20 x 20 by DQN with a bonus, added to the rewards of each batch."""
    agent = RNDDQNConfig(
        epsilon_frames=5_000,
        epsilon_end=0.02,
        target_period=100,
        intrinsic_weight=0.1,
        optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-8),
        predictor=OptimizerConfig(learning_rate=1e-3),
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig(_DEEP_SEA, num_envs=8, type="jax", options={"size": 20}),
        topology="fused",
        network=NetworkConfig(activation="relu"),
        replay=transitions(128, max_size=50_000, min_size=1_000, updates_per_frame=0.25),
        evaluator=EvaluatorConfig(episodes=32, num_envs=32),
        frames=60_000,
        checkpoint_replay=False,
    )
