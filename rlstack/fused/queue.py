"""The on-policy part of a compiled loop: unrolls that are learned from once, as from a fifo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlstack.fused.acting import Acting, Actors, Tally
from rlstack.fused.learning import Learning, Updater, Updates
from rlstack.replay import ReplayConfig
from rlstack.types import Array, Batch, PRNGKey, PyTree, Transition


class Queue:
    """Unrolls of all environments, in batches; the methods are pure.

    The state is the step that the last unroll ended with, because the next one begins with it.

    Attributes:
      steps: of every environment in one iteration.
      most_updates: the largest number of updates in one iteration.
    """

    def __init__(self, cfg: ReplayConfig, actors: Actors, updater: Updater) -> None:
        """Stores the parts; ``batch_size`` and the number of environments must divide one another.

        Raises:
          ValueError: they do not.
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
        self._unrolls = max(1, cfg.batch_size // num_envs)  # in one batch
        self._parts = max(1, num_envs // cfg.batch_size)  # batches of one unroll
        self.steps = self._unrolls * cfg.unroll_length
        self.most_updates = self._parts

    def start(
        self, learning: Learning, acting: Acting, rng_key: PRNGKey
    ) -> tuple[Acting, Transition]:
        """Acts once: the first unroll begins with this step. The key is not used."""
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
        shape = (self._length + 1, self._batch_size)
        trajectory = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*shape, *x.shape[1:]), x.dtype), last
        )
        weights: Any = jax.ShapeDtypeStruct((self._batch_size,), jnp.float32)
        return Batch(trajectory, weights)

    def iterate(
        self,
        learning: Learning,
        acting: Acting,
        last: Transition,
        tally: Tally,
        updates: Updates,
        most: Array,
    ) -> tuple[Learning, Acting, Transition, Tally, Updates]:
        """Acts for one batch, or for one unroll if it has several, and learns from it.

        Args:
          learning: the state of learning.
          acting: the state of acting.
          last: the step that the last unroll ended with.
          tally: of this iteration so far; ``bad`` has what happened before it too.
          updates: what was learned before.
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
        weights = jnp.ones(self._batch_size, jnp.float32)
        if self._parts == 1:
            learning, updates, _ = self._updater.update(
                learning, updates, Batch(trajectory, weights), good
            )
            return learning, acting, last, tally, updates

        def learn(carry: Any, part: PyTree) -> tuple[Any, None]:
            learning, updates = carry
            active = good & (learning.version < most)
            after = self._updater.update(learning, updates, Batch(part, weights), active)
            return after[:2], None

        parts = jax.tree.map(self._split, trajectory)
        (learning, updates), _ = jax.lax.scan(learn, (learning, updates), parts)
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

    def _split(self, x: Array) -> Array:
        """Returns ``[T+1, B, ...]`` as ``[parts, T+1, batch_size, ...]``."""
        x = x.reshape((x.shape[0], self._parts, self._batch_size, *x.shape[2:]))
        return jnp.moveaxis(x, 1, 0)


def _side_by_side(x: Array) -> Array:
    """Returns unrolls ``[n, T+1, B, ...]`` as ``[T+1, n * B, ...]``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape((x.shape[0], -1, *x.shape[3:]))
