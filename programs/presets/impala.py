"""Presets of IMPALA."""

from __future__ import annotations

from agents.impala import ImpalaConfig
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import atari, on_policy, preset
from rlstack.families.normalised import NormalisationConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig


@preset
def cartpole_impala(name: str) -> Experiment:
    """CartPole-v1 by V-trace; tuned here."""
    frames, num_envs, unroll_length = 500_000, 16, 20
    return Experiment(
        preset=name,
        agent=ImpalaConfig(
            entropy_cost=0.0,
            optimizer=OptimizerConfig(
                learning_rate=1e-3, anneal_steps=frames // (num_envs * unroll_length)
            ),
        ),
        env=EnvConfig("CartPole-v1", num_envs=num_envs),
        replay=on_policy(num_envs, unroll_length),
        # Values near 100 would take gradient clipping for themselves.
        normalisation=NormalisationConfig(reward_scale=0.1),
        frames=frames,
    )


@preset
def memory_cartpole_impala(name: str) -> Experiment:
    """CartPole whose velocities are not seen, with an LSTM from stored states; tuned here."""
    frames, num_envs, unroll_length = 300_000, 16, 16
    return Experiment(
        preset=name,
        agent=ImpalaConfig(
            entropy_cost=0.0,
            vtrace_lambda=0.95,
            optimizer=OptimizerConfig(
                learning_rate=3e-3, anneal_steps=frames // (num_envs * unroll_length)
            ),
        ),
        env=EnvConfig("rlstack.envs.partial:cartpole_without_velocities", num_envs=num_envs),
        network=NetworkConfig(hidden_sizes=(64,), core="lstm", core_size=64),
        replay=on_policy(num_envs, unroll_length),
        normalisation=NormalisationConfig(reward_scale=0.1),
        frames=frames,
    )


@preset
def pong_impala(name: str) -> Experiment:
    """Pong on pixels: the deep residual torso, with constants after Espeholt et al. (2018).

    The paper (table G.1) sums losses over the 32 unrolls of 20 steps, where ours are means: its
    gradient norm of 40 is divided by those 640 transitions, and RMSProp's epsilon of 0.01, which is
    added to squares, by 640^2. RMSProp's decay is that of the authors' program, scalable_agent,
    whose mean of squares starts at 1, where ours starts at 0.
    """
    frames, num_envs, unroll_length = 10_000_000, 32, 20
    transitions = num_envs * unroll_length
    return Experiment(
        preset=name,
        agent=ImpalaConfig(
            max_grad_norm=40 / transitions,
            optimizer=OptimizerConfig(
                name="rmsprop",
                learning_rate=6e-4,
                eps=0.01 / transitions**2,
                decay=0.99,
                anneal_steps=frames // transitions,
            ),
        ),
        env=atari("Pong-v5", num_envs=num_envs),
        network=NetworkConfig(torso="impala", hidden_sizes=(256,), shared=True),
        replay=on_policy(num_envs, unroll_length),
        frames=frames,
    )
