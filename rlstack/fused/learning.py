"""Learning inside a compiled loop: an update is dropped, and the loop ends, if it gives NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.agent import Agent, is_finite
from rlstack.fused.devices import Devices
from rlstack.types import Array, Batch, LearnerState, Params


class Learning(NamedTuple):
    """The state of learning."""

    params: Params
    learner_state: LearnerState
    version: Array  # [] int32, number of updates


class Updates(NamedTuple):
    """The results of the updates of one call."""

    logs: Array  # [number of logs] float32, sums over the updates
    failed: Array  # [] bool, whether the last update was dropped
    failed_logs: Array  # [number of logs] float32, logs of the update that was dropped
    # Of the dropped update, zeros if none: its batch or, with `Updater.keeps_cells`, where its
    # items are in replay, ``[B]`` int32, and their weights ``[B]``. () without the check.
    batch: Any


class Feedback(NamedTuple):
    """What an update tells the replay, see `rlstack.types.LearnerOutput`."""

    priorities: Array | None
    updates: Any


class Updater:
    """Makes updates; the methods are pure.

    Attributes:
      names: the names of the logs.
      writes_back: whether updates give new values of stored steps.
      keeps_cells: whether the cells of a batch are kept in place of the batch, for a caller that
        gathers the batch before the replay changes.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        check_finite: bool = True,
        devices: Devices,
        keeps_cells: bool = False,
    ) -> None:
        """Stores the agent, which learns by its ``learner_step``, and the devices that share it."""
        self._agent, self._check_finite, self._devices = agent, check_finite, devices
        self.keeps_cells = keeps_cells
        self.names: tuple[str, ...] = ()
        self.writes_back = agent.writes_back
        # Traced once: `none` needs its shapes, and tracing an update takes a part of a second.
        self._step = jax.jit(self._make, inline=True)

    def version(self, learning: Learning) -> Array:
        """Returns the number of updates that a budget counts, [] int32."""
        return learning.version

    def failed(self, updates: Updates) -> Array:
        """Returns whether an update was dropped, [] bool."""
        return updates.failed

    def none(self, learning: Learning, batch: Batch) -> Updates:
        """Returns the result of no updates.

        Args:
          learning: the state.
          batch: shapes and dtypes of the batches.
        """
        logs = jax.eval_shape(self._step, learning, batch)[1]
        kept: Any = ()
        if self.keeps_cells:
            size = batch.weights.shape
            kept = jnp.zeros(size, jnp.int32), jnp.zeros(size)
        elif self._check_finite:
            kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        zeros = jnp.zeros(logs.shape)
        return Updates(zeros, jnp.zeros((), bool), zeros, kept)

    def update(
        self,
        learning: Learning,
        updates: Updates,
        make_batch: Callable[[], Batch],
        active: Array | bool | None = None,
        cells: Array | None = None,
    ) -> tuple[Learning, Updates, Feedback]:
        """Makes one update, unless an earlier one failed.

        Args:
          learning: the state.
          updates: the results of this call's updates so far.
          make_batch: returns the batch, trajectory ``[T+1, B, ...]`` and weights ``[B]``. It is
            pure, and is called again to keep the batch of an update that fails.
          active: whether to make the update, [] bool.
          cells: where the items are in replay, for `keeps_cells`.

        Returns:
          The new state, the new result, and what the agent gives the items.
        """

        def make() -> Batch:
            batch = make_batch()
            divided = self._devices.divided
            return Batch(divided(batch.trajectory, 1), divided(batch.weights, 0))

        batch = make()
        after, logs, finite, feedback = self._step(learning, batch)
        fails = ~finite if self._check_finite else jnp.zeros((), bool)
        learned = ~fails
        if active is not None:
            active = jnp.asarray(active) & ~updates.failed
            fails, learned = active & fails, active & learned
        kept: Any = ()
        if self.keeps_cells:
            kept = _where(fails, (cells, batch.weights), updates.batch)
        elif self._check_finite:
            kept = _where_made(fails, make, updates.batch)
        updates = Updates(
            updates.logs + jnp.where(learned, logs, 0.0),
            updates.failed | fails,
            jnp.where(fails, logs, updates.failed_logs),
            kept,
        )
        return _where(learned, after, learning), updates, feedback

    def _make(self, learning: Learning, batch: Batch) -> tuple[Learning, Array, Array, Feedback]:
        params, learner_state, output = self._agent.learner_step(
            learning.params, learning.learner_state, batch
        )
        self.names = tuple(output.logs)  # the same in every trace
        logs = [jnp.mean(jnp.asarray(x, jnp.float32)) for x in output.logs.values()]
        after = Learning(params, learner_state, learning.version + 1)
        finite = is_finite(output.logs, params)
        feedback = Feedback(output.priorities, output.updates)
        return after, jnp.array(logs, jnp.float32), finite, feedback


def _where(condition: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


def _where_made(condition: Array, make: Callable[[], Any], old: Any) -> Any:
    """Returns ``make()`` where the condition, [] bool, holds, and else ``old``."""

    def make_if_needed() -> Any:
        # An update reads only a part of its batch. To gather the rest from replay in each update
        # takes a tenth of the time of a small network.
        return jax.lax.cond(condition, make, lambda: old)

    # An accelerator's branch would wait for its condition on the host.
    return jax.lax.platform_dependent(
        cpu=make_if_needed, default=lambda: _where(condition, make(), old)
    )
