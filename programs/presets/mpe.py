"""Presets of the multi-agent particle environments (MPE): independent PPO, and MAPPO."""

from __future__ import annotations

from typing import Any

from agents.ppo import PPOConfig
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import on_policy, preset
from rlstack.acting.evaluator import EvaluatorConfig
from rlstack.families.normalised import NormalisationConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig

_LENGTH = 25  # steps of an episode, as in all published results


def _spread(name: str, **options: Any) -> Experiment:
    """Returns PPO on simple_spread with three agents, with the constants of Yu et al. (2022).

    Their value normalisation is replaced by rewards divided by the deviation of returns. An update
    has whole episodes of 32 games; theirs has 128, and takes as many gradient steps.
    """
    agents, games = 3, 32
    return on_policy(
        name,
        PPOConfig(
            num_epochs=10,
            num_minibatches=2,
            max_grad_norm=10.0,
            optimizer=OptimizerConfig(learning_rate=7e-4),
        ),
        EnvConfig(
            "rlstack.envs.seats.pettingzoo:Parallel",
            num_envs=agents * games,
            options={
                "game": "mpe2.simple_spread_v3",
                "N": agents,
                "max_cycles": _LENGTH,
                **options,
            },
        ),
        unroll_length=_LENGTH,
        frames=3_000_000,
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        normalisation=NormalisationConfig(observations=True, rewards="return", reward_clip=10.0),
        evaluator=EvaluatorConfig(episodes=300, num_envs=60),
    )


@preset
def mpe_spread_ippo(name: str) -> Experiment:
    """simple_spread, three agents with one policy: independent PPO (extra pettingzoo)."""
    return _spread(name)


@preset
def mpe_spread_mappo(name: str) -> Experiment:
    """simple_spread, three agents with one policy, and a critic that sees the state: MAPPO."""
    return _spread(name, critic_state="game")
