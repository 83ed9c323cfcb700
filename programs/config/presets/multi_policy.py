"""Presets with several policies: different algorithms side by side, and self-play."""

from __future__ import annotations

from rlstack.agents.dqn import DQNConfig
from rlstack.agents.fixed import ScriptedConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.member_config import HistoryConfig, MemberConfig
from rlstack.programs.config.presets.registry import falling, on_policy_replay, preset, transitions

_BASE_STOCK = ScriptedConfig("rlstack.agents.rules:order_up_to_base_stock")


@preset
def supply_chain_policies(name: str) -> Experiment:
    """A supply chain: PPO is the retailer, DQN the distributor, the factory follows a rule.

    All pay the mean cost of the chain. If each pays its own, the retailer has no reason to order
    evenly, and what the distributor pays depends on the retailer's orders more than on its own.
    """
    chains = 8
    return Experiment(
        preset=name,
        agent=PPOConfig(
            discount=0.95,
            entropy_cost=0.003,
            num_epochs=8,
            optimizer=falling(1e-3, 9_600),
        ),
        env=EnvConfig(
            "rlstack.envs.seats.games:SupplyChain", num_envs=3 * chains, options={"shared": 1.0}
        ),
        network=NetworkConfig(hidden_sizes=(64, 64)),
        normalisation=NormalisationConfig(reward_scale=0.1),
        replay=on_policy_replay(chains, 64),
        policies={
            "retailer": MemberConfig(seats=("retailer",)),
            "distributor": MemberConfig(
                seats=("distributor",),
                agent=DQNConfig(
                    discount=0.95,
                    target_rate=0.01,
                    epsilon_frames=40_000,
                    epsilon_end=0.02,
                    optimizer=falling(1e-3, 38_000),
                ),
                network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
                replay=transitions(
                    64, max_size=100_000, min_size=1_000, updates_per_frame=0.25, num_steps=3
                ),
            ),
            "factory": MemberConfig(seats=("factory",), agent=_BASE_STOCK),
        },
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=300_000,
    )


@preset
def rock_paper_scissors_selfplay(name: str) -> Experiment:
    """Rock, paper, scissors by PPO against its newest version; a win by rock counts twice.

    A large entropy bonus and a recent version let the newest params approach the equilibrium.
    Against the uniform mixture of all versions only their average does: the newest params are an
    answer to it.
    """
    games = 64
    return Experiment(
        preset=name,
        agent=PPOConfig(
            discount=1.0,
            gae_lambda=1.0,
            entropy_cost=0.2,
            num_epochs=2,
            num_minibatches=1,
            normalise_advantages=False,
            optimizer=falling(3e-3, 2_400),
        ),
        env=EnvConfig(
            "rlstack.envs.seats.games:RockPaperScissors",
            num_envs=2 * games,
            options={"rock": 2.0},
        ),
        network=NetworkConfig(hidden_sizes=(16,)),
        replay=on_policy_replay(games, 8),
        policies={
            "learner": MemberConfig(seats=("first",)),
            "past": MemberConfig(
                seats=("second",),
                history=HistoryConfig(of="learner", draw="latest", period=1_000, max_versions=32),
            ),
        },
        seating="drawn",
        evaluator=EvaluatorConfig(episodes=1_000, num_envs=50),
        frames=300_000,
    )


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
