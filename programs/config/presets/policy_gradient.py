"""Presets of policy gradients: IMPALA, A2C, REINFORCE and PPO-Lagrangian.

PPO-Lagrangian has a limit on costs (Ray et al. 2019, "Benchmarking Safe Exploration").
"""

from __future__ import annotations

from rlstack.agents.a2c import A2CConfig
from rlstack.agents.impala import ImpalaConfig
from rlstack.agents.ppo_lagrangian import PPOLagrangianConfig
from rlstack.agents.reinforce import ReinforceConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import atari, on_policy, preset


@preset
def cartpole_impala(name: str) -> Experiment:
    """CartPole-v1 by V-trace; tuned here."""
    return on_policy(
        name,
        ImpalaConfig(entropy_cost=0.0, optimizer=OptimizerConfig(learning_rate=1e-3)),
        EnvConfig("CartPole-v1", num_envs=16),
        unroll_length=20,
        frames=500_000,
        # With values near 100 the value loss would dominate the clipped gradient norm.
        normalisation=NormalisationConfig(reward_scale=0.1),
    )


@preset
def memory_cartpole_impala(name: str) -> Experiment:
    """CartPole without velocities, with an LSTM that starts from stored states; tuned here."""
    optimizer = OptimizerConfig(learning_rate=3e-3)
    return on_policy(
        name,
        ImpalaConfig(entropy_cost=0.0, vtrace_lambda=0.95, optimizer=optimizer),
        EnvConfig("rlstack.envs.partial:cartpole_without_velocities", num_envs=16),
        unroll_length=16,
        frames=300_000,
        network=NetworkConfig(hidden_sizes=(64,), core="lstm", core_size=64),
        normalisation=NormalisationConfig(reward_scale=0.1),
    )


@preset
def pong_impala(name: str) -> Experiment:
    """Pong on pixels: the deep residual torso, with constants after Espeholt et al. (2018).

    The paper (https://arxiv.org/abs/1802.01561, table G.1) sums losses over the 32 unrolls of 20
    steps; here they are means. So its gradient norm of 40 is divided by those 640 transitions, and
    RMSProp's epsilon of 0.01, which is added to squares, by 640^2. RMSProp's decay is that of the
    authors' program,
    https://github.com/google-deepmind/scalable_agent/blob/master/experiment.py, whose mean of
    squares starts at 1; here it starts at 0. Deviation: a fifth of the frames.
    """
    num_envs, unroll_length = 32, 20
    transitions = num_envs * unroll_length
    optimizer = OptimizerConfig(
        name="rmsprop", learning_rate=6e-4, eps=0.01 / transitions**2, decay=0.99
    )
    return on_policy(
        name,
        ImpalaConfig(max_grad_norm=40 / transitions, optimizer=optimizer),
        atari("Pong-v5", num_envs),
        unroll_length,
        frames=10_000_000,
        network=NetworkConfig(torso="impala", hidden_sizes=(256,), shared=True),
    )


@preset
def cartpole_a2c(name: str) -> Experiment:
    """CartPole-v1 by short unrolls and RMSProp, as in Mnih et al. (2016) and Stable Baselines3.

    The constants are those of Stable Baselines3:
    https://github.com/DLR-RM/stable-baselines3/blob/master/stable_baselines3/a2c/a2c.py. Its value
    loss is not halved, so its weight of 0.5 is 1 here. Deviations: rewards are scaled by 0.1, the
    learning rate falls to 0, and RMSProp's eps is inside the square root.
    """
    optimizer = OptimizerConfig(name="rmsprop", learning_rate=7e-4, decay=0.99)
    return on_policy(
        name,
        A2CConfig(entropy_cost=0.0, value_cost=1.0, optimizer=optimizer),
        EnvConfig("CartPole-v1", num_envs=16),
        unroll_length=5,
        frames=500_000,
        # With values near 100 the value loss would dominate the clipped gradient norm.
        normalisation=NormalisationConfig(reward_scale=0.1),
    )


@preset
def cartpole_reinforce(name: str) -> Experiment:
    """CartPole-v1 by whole returns, from unrolls that hold an episode; tuned here."""
    return on_policy(
        name,
        ReinforceConfig(entropy_cost=0.0, optimizer=OptimizerConfig(learning_rate=5e-3)),
        EnvConfig("CartPole-v1", num_envs=8),
        unroll_length=512,
        frames=500_000,
        # Values are then at most 1, and the baseline learns them quickly.
        normalisation=NormalisationConfig(reward_scale=0.01),
    )


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
