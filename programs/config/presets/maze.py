"""Presets of curricula of mazes, see docs/levels.md.

From the maze experiments of JaxUED (Coward et al. 2024, arXiv:2403.13091;
https://github.com/DramaCow/jaxued/blob/main/examples/maze_plr.py): discount, trace, buffer, replay
probability, staleness and score. The temperature is 1 instead of 0.3, which in runs as short
as these replays few levels. The network, which has no memory here, and the other constants of PPO
are common ones.
"""

from __future__ import annotations

from typing import Literal

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.levels import LevelsConfig
from rlstack.configs.network import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset


def _mazes(name: str, kind: Literal["uniform", "plr", "robust_plr"]) -> Experiment:
    return on_policy(
        name,
        PPOConfig(
            discount=0.995,
            gae_lambda=0.98,
            entropy_cost=0.01,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        EnvConfig(
            "rlstack.jax_envs.maze:Maze",
            num_envs=32,
            type="jax",
            options={"blocked": 0.6},
            levels=2**31 - 1,
            eval_options={"blocked": 0.0, "density": 1.0, "levels": "held_out"},
        ),
        unroll_length=128,
        frames=3_000_000,
        network=NetworkConfig(hidden_sizes=(64, 64)),
        levels=LevelsConfig(kind=kind, temperature=1.0),
        topology="fused",
        evaluator=EvaluatorConfig(episodes=200, num_envs=200, by_index=True),
    )


@preset
def maze_ppo(name: str) -> Experiment:
    """Mazes with levels drawn uniformly (domain randomisation), by PPO in one compiled program."""
    return _mazes(name, "uniform")


@preset
def maze_plr(name: str) -> Experiment:
    """Mazes by PPO, with levels replayed by their scores (prioritised level replay)."""
    return _mazes(name, "plr")


@preset
def maze_robust_plr(name: str) -> Experiment:
    """As maze-plr, learning from replayed levels only (robust prioritised level replay)."""
    return _mazes(name, "robust_plr")
