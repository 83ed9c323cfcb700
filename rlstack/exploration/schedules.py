"""Counts of an environment's progress, and schedules that depend on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.checks import Checked
from rlstack.configs.exploration import Over, check_schedule
from rlstack.types import Array, Counts, PyTree, TimeStep


class RunCounts(NamedTuple):
    """The mean progress of the environments of a run, with which new acting state begins."""

    env_steps: Array | int = 0
    episodes: Array | int | None = 0  # None if it is not known; counts then stay as they are


Schedule = Callable[[Counts], Array]


def initial_counts(batch_size: int) -> Counts:
    """Returns counts of zero for ``batch_size`` environments with the ids 0, 1, ..."""
    zeros = jnp.zeros(batch_size, jnp.int32)
    return Counts(zeros, zeros, jnp.arange(batch_size, dtype=jnp.int32))


def with_env_ids(state: PyTree, env_ids: Array) -> PyTree:
    """Returns an agent's state with these ids in its `Counts`, if it contains any.

    Args:
      state: pytree of ``[B, ...]``, with or without `Counts`.
      env_ids: int ``[B]``, the id of each row's environment in the whole experiment.
    """

    def replaced(node: PyTree) -> PyTree:
        if isinstance(node, Counts) and node.env_ids is not None:
            return node._replace(env_ids=jnp.asarray(env_ids, jnp.int32))
        return node

    return jax.tree.map(replaced, state, is_leaf=lambda node: isinstance(node, Counts))


def with_run_counts(state: PyTree, run_counts: RunCounts) -> PyTree:
    """Returns an agent's state with these counts in its `Counts`, if it contains any.

    Args:
      state: pytree of ``[B, ...]``, with or without `Counts`.
      run_counts: the counts that every environment starts with; schedules continue from them.
    """

    def replaced(node: PyTree) -> PyTree:
        if isinstance(node, Counts):
            counted = {
                name: jnp.full_like(getattr(node, name), value)
                for name, value in run_counts._asdict().items()
                if value is not None
            }
            return node._replace(**counted)
        return node

    return jax.tree.map(replaced, state, is_leaf=lambda node: isinstance(node, Counts))


def next_counts(counts: Counts, timestep: TimeStep) -> Counts:
    """Returns the counts after an agent has acted at ``timestep`` ([B, ...]).

    The environment ignores the action at LAST, so this step counts as the end of an episode and not
    as an environment step.
    """
    last = jnp.asarray(timestep.last())
    return counts._replace(
        env_steps=counts.env_steps + jnp.where(last, 0, 1),
        episodes=counts.episodes + jnp.where(last, 1, 0),
    )


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant schedule."""

    value: float
    "The value."

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        return jnp.full(jnp.shape(counts.env_steps), self.value, jnp.float32)


class _Counting(Checked):
    """A schedule that depends on steps or episodes; subclasses are dataclasses with both fields."""

    over: Over
    num_envs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("num_envs", self.num_envs > 0, "positive")

    def _progress(self, counts: Counts) -> Array:
        """Returns the progress, [B] float32, because the product could overflow int32."""
        return jnp.asarray(getattr(counts, self.over), jnp.float32) * self.num_envs


@dataclasses.dataclass(frozen=True)
class Linear(_Counting):
    """A schedule that changes linearly from ``start`` to ``end`` and stays there."""

    start: float
    "The value until `begin`."
    end: float
    "The value from `begin + steps` on."
    steps: int
    "Number of steps (or episodes) from start to end."
    over: Over = "env_steps"
    "The unit of progress: env_steps or episodes."
    begin: int = 0
    "The step (or episode) at which the change begins."
    num_envs: int = 1
    "Factor of the counts; set it to the number of environments to count the steps of all of them."

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self, "linear")

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        progress = self._progress(counts)
        # Floats, because JAX refuses Python integers beyond int32.
        done = (progress - float(self.begin)) / float(self.steps)
        return self.start + (self.end - self.start) * jnp.clip(done, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class MultiPhaseLinear(_Counting):
    """A piecewise linear schedule through points; constant before the first and after the last."""

    points: tuple[tuple[int, float], ...]
    "(step, value) pairs with strictly increasing steps."
    over: Over = "env_steps"
    "The unit of progress: env_steps or episodes."
    num_envs: int = 1
    "Factor of the counts; set it to the number of environments to count the steps of all of them."

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self, "multi_phase")

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        steps, values = (
            np.asarray(column, np.float32) for column in zip(*self.points, strict=True)
        )
        return jnp.interp(self._progress(counts), steps, values)


@dataclasses.dataclass(frozen=True)
class Exponential(_Counting):
    """A schedule that halves its distance from ``end`` every ``half_life`` steps."""

    start: float
    "The first value."
    end: float
    "The value that the schedule approaches."
    half_life: float
    "Number of steps (or episodes) in which the distance to `end` halves."
    over: Over = "env_steps"
    "The unit of progress: env_steps or episodes."
    num_envs: int = 1
    "Factor of the counts; set it to the number of environments to count the steps of all of them."

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self, "exponential")

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        halvings = self._progress(counts) / float(self.half_life)
        return self.end + (self.start - self.end) * jnp.exp2(-halvings)


def epsilon_ladder(i: Array | int, n: int, base: float = 0.4, alpha: float = 7.0) -> Array:
    """Returns the epsilon of actor i of n, ``base ** (1 + alpha * i / (n - 1))``, in i's shape.

    Horgan et al. 2018, "Distributed prioritized experience replay" (Ape-X), section 4.1, with its
    base and alpha. A single actor gets ``base``.
    """
    rung = jnp.asarray(i, jnp.float32) / max(n - 1, 1)
    return jnp.power(jnp.float32(base), 1.0 + alpha * rung)


@dataclasses.dataclass(frozen=True)
class EpsilonLadder(Checked):
    """A schedule that gives every environment its own constant epsilon (Ape-X, R2D2)."""

    num_envs: int
    "Number of environments of the experiment; environment ids are taken modulo it."
    base: float = 0.4
    "The largest epsilon (Ape-X)."
    alpha: float = 7.0
    "The smallest epsilon is base ** (1 + alpha) (Ape-X)."

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("num_envs", self.num_envs > 0, "positive")
        self.require("base", 0 < self.base <= 1, "in (0, 1]")
        self.require_at_least(0, "alpha")

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        if counts.env_ids is None:
            raise ValueError(
                "EpsilonLadder: the counts must have env_ids; got None. Start from initial_counts."
            )
        return epsilon_ladder(counts.env_ids % self.num_envs, self.num_envs, self.base, self.alpha)


@dataclasses.dataclass(frozen=True)
class DrawnByEpisode(Checked):
    """A schedule that gives every environment its own value in each episode, drawn uniformly.

    The draws are functions of the environment's id and the number of its episodes, so they are the
    same in every run.
    """

    minimum: float
    "The smallest value."
    maximum: float
    "The largest value."

    def __post_init__(self) -> None:
        super().__post_init__()
        below = self.minimum <= self.maximum
        self.require("minimum", below, f"at most maximum ({self.maximum})")

    def __call__(self, counts: Counts) -> Array:
        """Returns [B] float32."""
        if counts.env_ids is None:
            raise ValueError(
                "DrawnByEpisode: the counts must have env_ids; got None. Start from initial_counts."
            )

        def draw(env_id: Array, episode: Array) -> Array:
            key = jax.random.fold_in(jax.random.PRNGKey(0), env_id)
            return jax.random.uniform(jax.random.fold_in(key, episode))

        share = jax.vmap(draw)(jnp.asarray(counts.env_ids), jnp.asarray(counts.episodes))
        return self.minimum + (self.maximum - self.minimum) * share
