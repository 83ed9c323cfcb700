"""Updates of agents with epochs by one call of a jitted function for each minibatch.

On CPUs this is the fast way for convolutions, which take many times longer in a compiled loop.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rlstack.agent import EpochAgent, is_finite
from rlstack.devices import by_device
from rlstack.devices.packing import Layout
from rlstack.devices.placement import AXIS, Placement
from rlstack.learning.sharded import given_votes, sharded_over, whole_batch
from rlstack.learning.update import Updated
from rlstack.types import Array, Batch, LearnerState, Logs, Params, PyTree


class _Prepared(NamedTuple):
    """A batch that is ready to be split into minibatches."""

    learner_state: LearnerState
    rows: PyTree  # [N, ...]
    schedule: Array  # [number of minibatches, rows of each] int32
    logs: Logs  # logs of the whole batch


class CallByMinibatch:
    """One jitted call per minibatch, gathered on the host; each device computes all of it."""

    def __init__(self, agent: EpochAgent, placement: Placement) -> None:
        """Prepares the jitted functions; the first update compiles them."""
        self._agent, self._placement = agent, placement
        everywhere = placement.everywhere if placement.several else None
        self._prepare = jax.jit(self._prepared, out_shardings=everywhere)
        self._update = jax.jit(self._updated)
        self._finish = jax.jit(agent.finish)

    def place(self, batch: Batch, votes: Sequence[int] = (1,)) -> Any:
        """Divides the batch over several devices; it carries no votes."""
        del votes
        return self._placement.batch(batch)

    def __call__(self, params: Params, learner_state: LearnerState, placed: Any) -> Updated:
        """Makes the update, unless the batch carries a vote against it."""
        before = params, learner_state
        prepared, votes = self._prepare(*before, *self._inputs(placed))
        if votes is not None and not np.asarray(votes)[:, 0].all():
            return Updated(*before, before, lambda: ({}, True), None, votes)
        return self._go_over(prepared, before)._replace(votes=votes)

    def compiled(self, params: Params, learner_state: LearnerState, placed: Any) -> dict[str, int]:
        """Returns the compiled functions, as XLA's HLO, and how often an update calls each."""
        inputs = params, learner_state, *self._inputs(placed)
        prepared, _ = self._prepare(*inputs)
        state, schedule = prepared.learner_state, np.asarray(prepared.schedule)
        minibatch = self._minibatch(_on_host(prepared.rows), schedule[0])
        calls = (
            (self._prepare.lower(*inputs), 1),
            (self._update.lower(params, state, minibatch), len(schedule)),
            (self._finish.lower(params, state), 1),
        )
        return {lowered.compile().as_text() or "": count for lowered, count in calls}

    def _inputs(self, placed: Any) -> tuple[Any, ...]:
        """Returns what `_prepare` takes after params and state."""
        return (placed,)

    def _go_over(self, prepared: _Prepared, before: tuple[Params, LearnerState]) -> Updated:
        """Goes over the minibatches of a batch; ``before`` is the state before the update."""
        agent, rows, all_logs = self._agent, _on_host(prepared.rows), []
        params, learner_state = before[0], prepared.learner_state
        for indices in np.asarray(prepared.schedule):
            minibatch = self._minibatch(rows, indices)
            *after, logs, stops = self._update(params, learner_state, minibatch)
            all_logs.append(logs)
            if agent.may_stop and stops:
                break
            params, learner_state = after
        params, learner_state = self._finish(params, learner_state)

        def on_host() -> tuple[Logs, bool]:
            logs = jax.tree.map(_mean, *all_logs) | _on_host(prepared.logs)
            if agent.may_stop:
                logs["minibatches"] = np.float32(len(all_logs))
            return logs, bool(is_finite(logs, params))

        return Updated(params, learner_state, before, on_host, None)

    def _minibatch(self, rows: PyTree, indices: np.ndarray) -> PyTree:
        minibatch = jax.tree.map(lambda x: np.take(x, indices, axis=0), rows)
        return self._agent.lay_out_rows(minibatch)

    def _prepared(
        self, params: Params, learner_state: LearnerState, batch: Batch, votes: Array | None = None
    ) -> tuple[_Prepared, Array | None]:
        learner_state, rows, schedule = self._agent.prepare(params, learner_state, batch)
        return _Prepared(learner_state, rows, schedule, self._agent.batch_logs(rows)), votes

    def _updated(
        self, params: Params, learner_state: LearnerState, minibatch: PyTree
    ) -> tuple[Params, LearnerState, Logs, Array]:
        """Takes a step; returns its logs, and whether to discard this step and all later ones."""
        agent = self._agent
        params, learner_state, output = agent.update(params, learner_state, minibatch)
        stops = agent.stops_at(output.logs) if agent.may_stop else False
        return params, learner_state, output.logs, jnp.asarray(stops)


class ShardedCalls(CallByMinibatch):
    """One jitted call per minibatch, in which each device has a shard of the rows.

    What the devices exchange, and the votes, are as in `rlstack.learning.sharded.ShardedUpdate`.
    """

    def __init__(self, agent: EpochAgent, placement: Placement) -> None:
        """Prepares the jitted functions; the networks of the agent `can_be_sharded`."""
        super().__init__(sharded_over(agent, placement), placement)
        everywhere, by_row = PartitionSpec(), PartitionSpec(AXIS)
        divide = functools.partial(by_device, mesh=placement.mesh, out_specs=everywhere)

        def prepare(params: Params, state: LearnerState, layout: Layout, *packed: Array) -> Any:
            function = functools.partial(self._prepared_by_all, layout)
            in_specs = (everywhere, everywhere, by_row)
            return divide(function, in_specs=in_specs)(params, state, packed)

        self._prepare = jax.jit(prepare, static_argnums=2)
        self._update = jax.jit(divide(self._updated, in_specs=everywhere))
        self._finish = jax.jit(divide(self._agent.finish, in_specs=everywhere))

    def place(self, batch: Batch, votes: Sequence[int] = (1,)) -> Any:
        """Moves a batch of this process, and its votes, to its devices.

        Raises:
          ValueError: the size of the batch is no multiple of the number of devices.
        """
        return self._placement.packed(batch, given_votes(votes))

    def _inputs(self, placed: Any) -> tuple[Any, ...]:
        return placed

    def _prepared_by_all(
        self, layout: Layout, params: Params, learner_state: LearnerState, packed: PyTree
    ) -> tuple[_Prepared, Array | None]:
        batch, votes = whole_batch(layout, packed, self._placement.mesh.size)
        return self._prepared(params, learner_state, batch, votes)


def _on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


def _mean(*values: Any) -> np.floating:
    return np.mean([np.asarray(value) for value in values])
