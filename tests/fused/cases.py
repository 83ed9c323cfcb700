"""Small policy sets for the topology fused."""

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agents.a2c import A2CConfig
from rlstack.agents.fixed import RandomConfig, ScriptedConfig
from rlstack.fused.loop import NO_LIMIT, Limits
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.fused_config import FusedConfig
from rlstack.programs.config.member_config import HistoryConfig, MemberConfig
from rlstack.programs.config.presets.registry import on_policy_replay
from tests.programs.multi_policy.cases import DQN, DQN_REPLAY, small

_SHORT = FusedConfig(call_seconds=0.01)  # calls of any length
STAY = ScriptedConfig("tests.fused.cases:stay")


def stay(observation):
    """A rule for Cover."""
    return jnp.zeros(len(observation), jnp.int32)


def cover(policies, games=4, rows=4, **changes):
    """Games of three seats with episodes of five steps."""
    env = EnvConfig("rlstack.jax_envs.cover:Cover", 3 * games, "jax", options={"length": 5})
    fields = {"topology": "fused", "fused": _SHORT, "frames": 10**6, **changes}
    return small(env, policies, rows, **fields)


def on_policy(**changes):
    """PPO with unrolls of 8 steps, A2C with unrolls of 6, and a random policy."""
    policies = {
        "first": MemberConfig(seats=(0,)),
        "second": MemberConfig(seats=(1,), agent=A2CConfig(), replay=on_policy_replay(4, 6)),
        "rest": MemberConfig(agent=RandomConfig()),
    }
    return cover(policies, updates=4, **changes)


def mixed(**changes):
    """PPO, DQN and a rule; the policy that plays first does not learn."""
    policies = {
        "ruled": MemberConfig(seats=(1,), agent=STAY),
        "deep": MemberConfig(seats=(0,), agent=DQN, replay=DQN_REPLAY),
        "actor": MemberConfig(),
    }
    return cover(policies, **changes)


def throws(draw="uniform", **changes):
    """Four games of a learner against its past."""
    env = EnvConfig("rlstack.jax_envs.rock_paper_scissors:RockPaperScissors", 8, "jax")
    history = HistoryConfig(of="learner", draw=draw, period=16, max_versions=3)
    policies = {"learner": MemberConfig(seats=(0,)), "past": MemberConfig(history=history)}
    fields = {"topology": "fused", "fused": _SHORT, "seating": "drawn", "frames": 10**6}
    return small(env, policies, 4, **{**fields, **changes})


class _Never:
    """Periodic actions of which nothing is due."""

    next_due = float("inf")


def called(loop, iterations, updates=NO_LIMIT):
    """Runs a loop for some iterations, or until it has made the updates, in several calls."""
    left, most = iterations, 1
    while left:
        report = loop.call(Limits(min(left, most), loop.until_due(_Never()), updates))
        left, most = left - int(report.iterations), iterations
        if not int(report.iterations):
            break
    return loop


def counted(run):
    """Frames and updates so far."""
    return run.env_frames, run.learner.version


def close(left, right):
    """Checks that params are equal up to rounding: XLA joins other operations in a loop."""
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
