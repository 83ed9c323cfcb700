"""Small experiments with several policies."""

import dataclasses

import jax
import numpy as np

from rlstack.agents.dqn import DQNConfig
from rlstack.agents.fixed import ScriptedConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.member_config import HistoryConfig, MemberConfig
from rlstack.programs.config.presets.registry import on_policy_replay, transitions
from rlstack.programs.run.run_session import drive

CHAIN = EnvConfig("rlstack.envs.seats.games:SupplyChain", num_envs=12, options={"weeks": 8})
THROWS = EnvConfig("rlstack.envs.seats.games:RockPaperScissors", num_envs=8)
DQN = DQNConfig(epsilon_frames=200)
RULE = ScriptedConfig("rlstack.agents.rules:order_up_to_base_stock")
DQN_REPLAY = transitions(8, max_size=500, min_size=40, updates_per_frame=0.1)
PAST = MemberConfig(history=HistoryConfig(of="learner", period=16, max_versions=3))


def small(env, policies, rows, **changes):
    """PPO by default, with this many rows for each policy that learns by PPO."""
    fields = {
        "preset": "small",
        "agent": PPOConfig(num_epochs=1, num_minibatches=1),
        "env": env,
        "network": NetworkConfig(hidden_sizes=(8,)),
        "replay": on_policy_replay(rows, 8),
        "policies": policies,
        "evaluator": EvaluatorConfig(episodes=4, num_envs=4),
        "frames": 300,
        "log_period": 100,
        "loggers": ("jsonl",),
    }
    return Experiment(**{**fields, **changes})


def chain(**changes):
    """Four chains: PPO, DQN and a rule."""
    policies = {
        "retailer": MemberConfig(seats=("retailer",)),
        "distributor": MemberConfig(seats=(1,), agent=DQN, replay=DQN_REPLAY),
        "factory": MemberConfig(agent=RULE),
    }
    return small(CHAIN, policies, 4, **changes)


def selfplay(draw="uniform", **changes):
    """Four games of a learner against its past."""
    history = dataclasses.replace(PAST.history, draw=draw)
    policies = {
        "learner": MemberConfig(seats=("first",)),
        "past": dataclasses.replace(PAST, history=history),
    }
    return small(THROWS, policies, 4, seating="drawn", **changes)


def leaves_equal(left, right):
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    return len(left) == len(right) and all(map(np.array_equal, left, right))


class Unlogged:
    """Periodic actions that do nothing, for a number of steps of the loop."""

    def __init__(self, steps):
        self.left, self.names = steps, set()

    def ended_by(self, frames, updates):
        return "" if self.left else "steps"

    def log(self, logs, prefix=""):
        self.names |= {prefix + name for name in logs or ()}

    def tick(self, frames, counters):
        self.left -= 1


def trained(loop, steps):
    """Trains a loop for a number of steps, and returns the names that it logged."""
    periodic = Unlogged(steps)
    drive(loop, periodic, lambda: False)
    return periodic.names
