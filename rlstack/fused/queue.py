"""The on-policy part of a compiled loop: each unroll is learned from once, as in a fifo."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.fused.acting import Acting, Actors, EpisodeStats
from rlstack.fused.learning import Learning, Updater, Updates
from rlstack.types import Array, Batch, PRNGKey, PyTree, Transition


class _Unrolls:
    """Splits unrolls of all environments into one or more batches and learns from them.

    Attributes:
      steps: environment steps, per environment, between two learning phases.
      most_updates: the largest number of updates in one learning phase.
    """

    def __init__(self, cfg: ReplayConfig, actors: Actors, updater: Updater) -> None:
        """Stores the parts; ``batch_size`` and the number of environments must divide one another.

        Raises:
          ValueError: neither number divides the other.
        """
        self._actors, self._updater = actors, updater
        self._length, self._batch_size = cfg.unroll_length, cfg.batch_size
        num_envs = actors.num_envs
        if cfg.batch_size % num_envs and num_envs % cfg.batch_size:
            raise ValueError(
                f"Queue: batch_size ({cfg.batch_size}) must be a multiple or a divisor of the "
                f"number of environments ({num_envs}), because all of them complete their unrolls "
                "at once. Change --replay.batch-size or --env.num-envs."
            )
        self._unrolls = max(1, cfg.batch_size // num_envs)  # unrolls in one batch
        self._parts = max(1, num_envs // cfg.batch_size)  # batches of one unroll
        self.steps = self._unrolls * cfg.unroll_length
        self.most_updates = self._parts

    def _spec(self, step: Transition) -> Batch:
        """Returns shapes and dtypes of the batches, from those of a step ``[B, ...]``."""
        shape = (self._length + 1, self._batch_size)
        trajectory = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*shape, *x.shape[1:]), x.dtype), step
        )
        weights: Any = jax.ShapeDtypeStruct((self._batch_size,), jnp.float32)
        return Batch(trajectory, weights)

    def _learn(
        self, learning: Learning, updates: Updates, trajectory: PyTree, good: Array, most: Array
    ) -> tuple[Learning, Updates]:
        """Learns from the steps of one iteration, ``[T+1, B, ...]``, in one batch or several."""
        weights = jnp.ones(self._batch_size, jnp.float32)
        if self._parts == 1:
            learning, updates, _ = self._updater.update(
                learning, updates, lambda: Batch(trajectory, weights), good
            )
            return learning, updates

        def learn(carry: Any, part: PyTree) -> tuple[Any, None]:
            learning, updates = carry
            active = good & (learning.version < most)
            after = self._updater.update(learning, updates, lambda: Batch(part, weights), active)
            return after[:2], None

        parts = jax.tree.map(self._split, trajectory)
        (learning, updates), _ = jax.lax.scan(learn, (learning, updates), parts)
        return learning, updates

    def _split(self, x: Array) -> Array:
        """Returns ``[T+1, B, ...]`` as ``[parts, T+1, batch_size, ...]``."""
        x = x.reshape((x.shape[0], self._parts, self._batch_size, *x.shape[2:]))
        return jnp.moveaxis(x, 1, 0)


class Queue(_Unrolls):
    """Unrolls of all environments, in batches; the methods are pure.

    The state is the step that the last unroll ended with, because the next one begins with it.
    """

    def start(
        self, learning: Learning, acting: Acting, rng_key: PRNGKey
    ) -> tuple[Acting, Transition]:
        """Acts once; the first unroll begins with this step. The key is unused."""
        del rng_key
        actors = self._actors
        acting, _, step = actors.step(learning.params, learning.version, acting, actors.tally())
        return acting, step

    def restart(self, learning: Learning, acting: Acting, last: Transition) -> tuple[Acting, Any]:
        """Acts once in environments that were restarted; the unroll in progress is dropped."""
        del last
        return self.start(learning, acting, acting.rng_key)

    def env_axes(self, last: Transition) -> Transition:
        """Returns the axis of environments of each array of a state."""
        return jax.tree.map(lambda _: 0, last)

    def batch_spec(self, last: Transition) -> Batch:
        """Returns shapes and dtypes of the batches."""
        return self._spec(last)

    def iterate(
        self,
        learning: Learning,
        acting: Acting,
        last: Transition,
        tally: EpisodeStats,
        updates: Updates,
        most: Array,
    ) -> tuple[Learning, Acting, Transition, EpisodeStats, Updates]:
        """Acts for one batch, or for one unroll if it has several, and learns from it.

        Args:
          learning: the state of learning.
          acting: the state of acting.
          last: the step that the last unroll ended with.
          tally: the counts of this iteration so far; ``bad`` also covers earlier iterations.
          updates: the results of this call's updates so far.
          most: number of updates, ever, after which no update is made, [] int32.
        """
        one = (acting, last, tally)
        if self._unrolls == 1:
            (acting, last, tally), trajectory = self._unroll(learning, one)
        else:
            (acting, last, tally), several = jax.lax.scan(
                lambda carry, _: self._unroll(learning, carry), one, None, length=self._unrolls
            )
            trajectory = jax.tree.map(_side_by_side, several)
        good = ~jnp.any(tally.bad)
        learning, updates = self._learn(learning, updates, trajectory, good, most)
        return learning, acting, last, tally, updates

    def _unroll(self, learning: Learning, carry: Any) -> tuple[Any, PyTree]:
        """Returns the state after an unroll, and the unroll, ``[T+1, B, ...]``."""
        acting, last, tally = carry

        def step(carry: Any, _: None) -> tuple[Any, Transition]:
            acting, tally, transition = self._actors.step(learning.params, learning.version, *carry)
            return (acting, tally), transition

        (acting, tally), steps = jax.lax.scan(step, (acting, tally), None, length=self._length)
        trajectory = jax.tree.map(lambda x, more: jnp.concatenate([x[None], more]), last, steps)
        return (acting, jax.tree.map(lambda x: x[-1], steps), tally), trajectory


class StepsState(NamedTuple):
    """The steps of the unrolls in progress."""

    steps: Transition  # [n * T + 1, B, ...], steps of the n unrolls of an iteration
    held: Array  # [] int32, number of steps so far


class StepQueue(_Unrolls):
    """A queue that takes one step at a time; other policies may learn between steps."""

    def empty(self, step: Transition, rng_key: PRNGKey) -> StepsState:
        """Returns a queue without steps.

        Args:
          step: shapes and dtypes of the steps, ``[B, ...]``.
          rng_key: unused.
        """
        del rng_key
        steps = jax.tree.map(lambda x: jnp.zeros((self.steps + 1, *x.shape), x.dtype), step)
        return StepsState(steps, jnp.zeros((), jnp.int32))

    def broken(self, state: StepsState) -> StepsState:
        """Drops the unrolls in progress."""
        return state._replace(held=jnp.zeros_like(state.held))

    def batch_spec(self, state: StepsState) -> Batch:
        """Returns shapes and dtypes of the batches."""
        step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.steps)
        return self._spec(step)

    def take(self, state: StepsState, step: Transition, good: Array, spent: Array) -> StepsState:
        """Appends one step of every environment.

        Args:
          state: the steps.
          step: ``[B, ...]``.
          good: whether to add it, [] bool.
          spent: unused, because `learn` drops the unrolls of a policy that has made all its
            updates.
        """
        del spent
        steps = jax.tree.map(lambda old, x: old.at[state.held].set(x), state.steps, step)
        return StepsState(steps, state.held + good.astype(jnp.int32))

    def learn(
        self, learning: Learning, state: StepsState, updates: Updates, good: Array, most: Array
    ) -> tuple[Learning, StepsState, Updates]:
        """Learns if the unrolls are complete.

        A policy that has made its updates drops them, as a full fifo drops what nobody reads.

        Args:
          learning: the state of learning.
          state: the steps.
          updates: the results of this call's updates so far.
          good: whether it may learn, [] bool.
          most: number of updates, ever, after which no update is made, [] int32.
        """
        complete = state.held == self.steps + 1

        def learn(carry: tuple[Learning, Updates]) -> tuple[Learning, Updates]:
            trajectory = jax.tree.map(self._windows, state.steps)
            return self._learn(*carry, trajectory, jnp.ones((), bool), most)

        learning, updates = jax.lax.cond(
            complete & good & (learning.version < most),
            learn,
            lambda carry: carry,
            (learning, updates),
        )
        # The next unrolls begin with the last step of these.
        steps = jax.tree.map(lambda x: x.at[0].set(jnp.where(complete, x[-1], x[0])), state.steps)
        return learning, StepsState(steps, jnp.where(complete, 1, state.held)), updates

    def _windows(self, x: Array) -> Array:
        """Returns steps ``[n * T + 1, B, ...]`` as unrolls ``[T+1, n * B, ...]``."""
        if self._unrolls == 1:
            return x
        starts = self._length * np.arange(self._unrolls)
        return _side_by_side(x[starts[:, None] + np.arange(self._length + 1)])


def _side_by_side(x: Array) -> Array:
    """Returns unrolls ``[n, T+1, B, ...]`` as ``[T+1, n * B, ...]``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape((x.shape[0], -1, *x.shape[3:]))
