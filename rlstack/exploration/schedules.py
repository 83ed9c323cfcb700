"""How far environments have come, and numbers that change with it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.checks import Checked
from rlstack.types import Array, PyTree, TimeStep


class Counts(NamedTuple):
    """How far each environment of a batch has come."""

    env_steps: Array  # [B] int32, transitions this environment has made
    episodes: Array  # [B] int32, episodes it has ended
    env_ids: Array | None = None  # [B] int32, which environment it is; needed by EpsilonLadder


Schedule = Callable[[Counts], Array]
Over = Literal["env_steps", "episodes"]


def initial_counts(batch_size: int) -> Counts:
    """Returns the counts of ``batch_size`` environments that have not begun; ids are 0, 1, ..."""
    zeros = jnp.zeros(batch_size, jnp.int32)
    return Counts(zeros, zeros, jnp.arange(batch_size, dtype=jnp.int32))


def with_env_ids(state: PyTree, env_ids: Array) -> PyTree:
    """Returns an agent's state with its counts, where it has any, under these ids.

    Args:
      state: pytree of ``[B, ...]``, with or without `Counts` somewhere in it.
      env_ids: int ``[B]``, which environments of the whole experiment the rows are.
    """

    def name(node: Any) -> Any:
        if isinstance(node, Counts) and node.env_ids is not None:
            return node._replace(env_ids=jnp.asarray(env_ids, jnp.int32))
        return node

    return jax.tree.map(name, state, is_leaf=lambda node: isinstance(node, Counts))


def next_counts(counts: Counts, timestep: TimeStep) -> Counts:
    """Returns the counts after an agent has answered ``timestep`` ([B, ...]).

    The answer to LAST is ignored by the environment: it ends an episode and is no env step.
    """
    last = jnp.asarray(timestep.last())
    return counts._replace(
        env_steps=counts.env_steps + jnp.where(last, 0, 1),
        episodes=counts.episodes + jnp.where(last, 1, 0),
    )


@dataclasses.dataclass(frozen=True)
class Constant:
    """A schedule that stays where it is."""

    value: float
    "The value."

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        return jnp.full(jnp.shape(counts.env_steps), self.value, jnp.float32)


class _Counting(Checked):
    """A schedule along steps or episodes; subclasses are dataclasses with both fields."""

    over: Over
    num_envs: int

    def _progress(self, counts: Counts) -> Array:
        """What it counts, [B] float32 (int32 would overflow when multiplied)."""
        return jnp.asarray(getattr(counts, self.over), jnp.float32) * self.num_envs

    def _check_progress(self) -> None:
        self.require("over", self.over in get_args(Over), " or ".join(get_args(Over)))
        self.require("num_envs", self.num_envs > 0, "positive")


@dataclasses.dataclass(frozen=True)
class Linear(_Counting):
    """A schedule that goes from ``start`` to ``end`` in a straight line, and stays there."""

    start: float
    "The value up to `begin`."
    end: float
    "The value from `begin + steps` on."
    steps: int
    "How many steps (or episodes) the way takes."
    over: Over = "env_steps"
    "What is counted."
    begin: int = 0
    "Where the way begins."
    num_envs: int = 1
    "Environments of the experiment, where steps count all of theirs: counts are multiplied by it."

    def __post_init__(self):
        self.require("steps", self.steps > 0, "positive")
        self.require_at_least(0, "begin")
        self._check_progress()

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        progress = self._progress(counts)
        # Floats, because JAX refuses Python integers beyond int32.
        done = (progress - float(self.begin)) / float(self.steps)
        return self.start + (self.end - self.start) * jnp.clip(done, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class MultiPhaseLinear(_Counting):
    """A schedule of straight lines from point to point, constant outside them."""

    points: tuple[tuple[int, float], ...]
    "(step, value) pairs with increasing steps, no step twice."
    over: Over = "env_steps"
    "What is counted."
    num_envs: int = 1
    "Environments of the experiment, where steps count all of theirs: counts are multiplied by it."

    def __post_init__(self):
        self.require("points", len(self.points) > 0, "one or more")
        grow = all(a < b for (a, _), (b, _) in itertools.pairwise(self.points))
        self.require("points", grow, "of steps that increase, without duplicates")
        self._check_progress()

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        steps, values = (
            np.asarray(column, np.float32) for column in zip(*self.points, strict=True)
        )
        return jnp.interp(self._progress(counts), steps, values)


@dataclasses.dataclass(frozen=True)
class Exponential(_Counting):
    """A schedule whose distance from ``end`` halves every ``half_life`` steps."""

    start: float
    "The first value."
    end: float
    "The value that is approached."
    half_life: float
    "Steps (or episodes) in which the distance to `end` halves."
    over: Over = "env_steps"
    "What is counted."
    num_envs: int = 1
    "Environments of the experiment, where steps count all of theirs: counts are multiplied by it."

    def __post_init__(self):
        self.require("half_life", self.half_life > 0, "positive")
        self._check_progress()

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        halvings = self._progress(counts) / float(self.half_life)
        return self.end + (self.start - self.end) * jnp.exp2(-halvings)


def epsilon_ladder(i: Array | int, n: int, base: float = 0.4, alpha: float = 7.0) -> Array:
    """Returns actor i's epsilon of n, ``base ** (1 + alpha * i / (n - 1))``, in i's shape.

    Horgan et al. 2018, "Distributed prioritized experience replay" (Ape-X), section 4.1, with its
    base and alpha. One actor alone gets ``base``.
    """
    rung = jnp.asarray(i, jnp.float32) / max(n - 1, 1)
    return jnp.power(jnp.float32(base), 1.0 + alpha * rung)


@dataclasses.dataclass(frozen=True)
class EpsilonLadder(Checked):
    """A schedule that gives every environment an epsilon of its own, for ever (Ape-X, R2D2)."""

    num_envs: int
    "Environments of the experiment; environment ids are taken modulo it."
    base: float = 0.4
    "The largest epsilon (Ape-X)."
    alpha: float = 7.0
    "The smallest epsilon is base ** (1 + alpha) (Ape-X)."

    def __post_init__(self):
        self.require("num_envs", self.num_envs > 0, "positive")
        self.require("base", 0 < self.base <= 1, "in (0, 1]")
        self.require_at_least(0, "alpha")

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        if counts.env_ids is None:
            raise ValueError(
                "EpsilonLadder: needs counts with env_ids; got None. Start from initial_counts."
            )
        return epsilon_ladder(counts.env_ids % self.num_envs, self.num_envs, self.base, self.alpha)
