"""Presets of IMPALA."""

from __future__ import annotations

from rlstack.agents.impala import ImpalaConfig
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
