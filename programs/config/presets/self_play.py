"""Presets of board games by self-play."""

from __future__ import annotations

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.member_config import HistoryConfig, MemberConfig
from rlstack.programs.config.presets.registry import falling, on_policy_replay, preset


@preset
def connect_four_selfplay(name: str) -> Experiment:
    """Connect Four by PPO against the versions of its own past that it loses to most often.

    Returns are undiscounted, because a game has at most 42 stones and half of a seat's steps wait.
    """
    games, unroll, epochs, frames = 128, 16, 4, 800_000
    updates = frames // (games * unroll)
    return Experiment(
        preset=name,
        agent=PPOConfig(
            discount=1.0,
            gae_lambda=0.9,
            entropy_cost=0.01,
            num_epochs=epochs,
            num_minibatches=4,
            optimizer=falling(1e-3, updates * epochs * 4),
        ),
        env=EnvConfig("rlstack.envs.seats.games:ConnectFour", num_envs=2 * games),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=on_policy_replay(games, unroll),
        policies={
            "learner": MemberConfig(seats=("first",)),
            "past": MemberConfig(
                seats=("second",),
                # Each version that plays costs a call of the network in every step.
                history=HistoryConfig(
                    of="learner", draw="prioritised", period=80_000, max_versions=8
                ),
            ),
        },
        seating="drawn",
        evaluator=EvaluatorConfig(episodes=200, num_envs=40),
        frames=frames,
    )
