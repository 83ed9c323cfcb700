"""Presets of Craftax (Matthews et al. 2024, arXiv:2402.16801), an open world, without pixels.

The games are EnvPool's. EnvPool for CPython 3.10 does not have them. The constants are those of the
authors' PPO, except for 64 environments instead of 1,024, because these runs have a million steps
instead of a billion: https://github.com/MichaelTMatthews/Craftax_Baselines/blob/main/ppo.py
"""

from __future__ import annotations

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset


def _ppo(name: str, env: str) -> Experiment:
    agent = PPOConfig(
        gae_lambda=0.8,
        entropy_cost=0.01,
        value_clip=0.2,
        num_epochs=4,
        num_minibatches=8,
        max_grad_norm=1.0,
        optimizer=OptimizerConfig(learning_rate=2e-4),
    )
    return on_policy(
        name,
        agent,
        EnvConfig(env, num_envs=64),
        unroll_length=64,
        frames=1_000_000,
        network=NetworkConfig(hidden_sizes=(512, 512, 512), activation="tanh"),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
    )


@preset
def craftax_classic_ppo(name: str) -> Experiment:
    """Craftax-Classic by PPO: Crafter's rules, 22 achievements (CPython 3.11 or newer)."""
    return _ppo(name, "Craftax-Classic-Symbolic-v1")


@preset
def craftax_ppo(name: str) -> Experiment:
    """Craftax by PPO: nine floors, 67 achievements of 226 points in all (CPython 3.11 or newer)."""
    return _ppo(name, "Craftax-Symbolic-v1")
