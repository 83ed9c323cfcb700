"""Presets of hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495).

From the paper: later places of the episode as goals (future) with a k of 4, which is a share of
0.8; for Reach its DDPG. The other constants were tuned here.
"""

from __future__ import annotations

import dataclasses

from rlstack.agents.ddpg import DDPGConfig
from rlstack.agents.dqn import DQNConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import preset, transitions

_GOALS = "rlstack.jax_envs.goals"


def _with_hindsight(replay: ReplayConfig, **functions: str) -> ReplayConfig:
    """Returns a replay that gives goals in hindsight, by functions of `rlstack.jax_envs.goals`."""
    options = {name: f"{_GOALS}:{function}" for name, function in functions.items()}
    return dataclasses.replace(
        replay,
        item_processor="rlstack.replay.hindsight:Hindsight",
        item_processor_options={**options, "strategy": "future", "share": 0.8},
    )


@preset
def bitflip_her(name: str) -> Experiment:
    """15 bits to flip towards a goal, by DQN with goals in hindsight, in one compiled program."""
    replay = transitions(256, max_size=200_000, min_size=4_000, updates_per_frame=0.125)
    return Experiment(
        preset=name,
        agent=DQNConfig(
            discount=0.98,
            target_rate=0.05,
            epsilon_start=0.5,
            epsilon_end=0.05,
            epsilon_frames=20_000,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        env=EnvConfig(f"{_GOALS}:BitFlip", num_envs=16, type="jax", options={"bits": 15}),
        network=NetworkConfig(hidden_sizes=(256,), activation="relu"),
        replay=_with_hindsight(replay, reward="bits_reward", terminated="has_bits"),
        topology="fused",
        evaluator=EvaluatorConfig(episodes=200, num_envs=200),
        frames=60_000,
    )


@preset
def reach_her(name: str) -> Experiment:
    """A point in a cube that reaches goals, by DDPG with goals in hindsight."""
    replay = transitions(256, max_size=200_000, min_size=4_000, updates_per_frame=0.125)
    return Experiment(
        preset=name,
        agent=DDPGConfig(
            discount=0.98,
            target_rate=0.05,
            noise_scale=0.2,
            random_frames=4_000,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        env=EnvConfig(f"{_GOALS}:Reach", num_envs=16, type="jax"),
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        replay=_with_hindsight(replay, reward="point_reward"),
        topology="fused",
        evaluator=EvaluatorConfig(episodes=200, num_envs=200),
        frames=40_000,
    )
