"""Presets of PQN."""

from __future__ import annotations

from rlstack.agents.pqn import PQNConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import like, on_policy, preset


@preset
def cartpole_pqn(name: str) -> Experiment:
    """CartPole-v1 by Q-learning on new steps only: no replay, no target network, layer norm.

    The constants are those of the authors' program:
    https://github.com/mttga/purejaxql/blob/main/purejaxql/config/alg/pqn_cartpole.yaml
    """
    agent = PQNConfig(
        return_lambda=0.95,
        num_epochs=4,
        num_minibatches=16,
        epsilon_end=0.2,
        epsilon_frames=100_000,
        optimizer=OptimizerConfig("radam", learning_rate=1e-4),
    )
    return on_policy(
        name,
        agent,
        EnvConfig("CartPole-v1", num_envs=32),
        unroll_length=64,
        frames=500_000,
        network=NetworkConfig(hidden_sizes=(256, 256), activation="relu", norm="layer"),
        normalisation=NormalisationConfig(reward_scale=0.1),
    )


@preset
def gymnax_cartpole_pqn(name: str) -> Experiment:
    """CartPole-v1 of gymnax, in one compiled program: the constants of cartpole-pqn."""
    env = EnvConfig("CartPole-v1", num_envs=32, type="jax")
    return like("cartpole-pqn", name, env=env, topology="fused")
