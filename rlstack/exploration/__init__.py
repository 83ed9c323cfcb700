"""Policies, which choose an action from a distribution, and schedules for their parameters.

A policy is any callable ``(rng_key, distribution, counts) -> action`` on ``[B, ...]``. The policies
here are frozen dataclasses, so an agent that holds one can be pickled. Row i of the action depends
on row i of the distribution, row i of the counts, and the key. A parameter of a policy is a float
or a schedule, ``counts -> [B] float32``, so that it can depend on the progress of each environment.

Evaluation runs the same agent with ``Greedy`` instead of its policy, and frozen agents act with
``After``, as they did at the end of their training.

Pure.

May import: rlstack, rlstack.configs, rlstack.distributions, rlstack.imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstack.configs.exploration import PolicyConfig
from rlstack.exploration.policies import (
    After,
    EpsilonGreedy,
    GaussianNoise,
    Greedy,
    Policy,
    Sample,
    Softmax,
    UniformNoise,
    explores,
)
from rlstack.exploration.schedules import (
    Constant,
    DrawnByEpisode,
    EpsilonLadder,
    Exponential,
    Linear,
    MultiPhaseLinear,
    RunCounts,
    Schedule,
    epsilon_ladder,
    initial_counts,
    next_counts,
    with_env_ids,
    with_run_counts,
)
from rlstack.imports.deferred import on_first_use
from rlstack.types import Counts

if TYPE_CHECKING:
    from rlstack.exploration.configured import WarmUp, make_policy

__all__ = [
    "After",
    "Constant",
    "Counts",
    "DrawnByEpisode",
    "EpsilonGreedy",
    "EpsilonLadder",
    "Exponential",
    "GaussianNoise",
    "Greedy",
    "Linear",
    "MultiPhaseLinear",
    "Policy",
    "PolicyConfig",
    "RunCounts",
    "Sample",
    "Schedule",
    "Softmax",
    "UniformNoise",
    "WarmUp",
    "epsilon_ladder",
    "explores",
    "initial_counts",
    "make_policy",
    "next_counts",
    "with_env_ids",
    "with_run_counts",
]

# What agents that sample their policy do not need.
__getattr__ = on_first_use(__name__, {"WarmUp": "configured", "make_policy": "configured"})
