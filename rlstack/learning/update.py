"""The compiled forms of an agent's update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent, EpochAgent
from rlstack.networks import convolution
from rlstack.types import Array, Batch, LearnerState, Logs, Params, PyTree


class Updated(NamedTuple):
    """The result of an update, which may still be computed."""

    params: Params
    learner_state: LearnerState
    before: tuple[Params, LearnerState]  # for an update that fails
    fetch: Callable[[], Logs]  # waits for the logs, as numpy scalars
    priorities: jax.Array | None  # [B]


class Update(Protocol):
    """Makes one update; the learner state must not be used again."""

    def __call__(self, params: Params, learner_state: LearnerState, batch: Batch) -> Updated:
        """Returns the new params and learner state."""


class OneCall:
    """``learner_step`` as one jitted function, which reuses the memory of the learner state.

    The logs are one vector until they are on the host: an update of a small network takes a few
    hundred microseconds, so each transferred array and each Python loop over the logs takes a
    noticeable fraction of it.

    The params are not donated, because an Inferencer may act with them. The state is, so an update
    that is not finite must return the one that it got.
    """

    def __init__(self, agent: Agent, *, check_finite: bool, where: Any = None) -> None:
        """Compiles nothing yet.

        Args:
          agent: learns by its ``learner_step``.
          check_finite: whether an update with NaN or infinite logs changes nothing.
          where: shardings of params, state, logs and priorities; None lets XLA choose.
        """
        self._agent, self._check_finite = agent, check_finite
        self._names: list[str] = []
        self._jitted = jax.jit(self._packed, donate_argnums=1, out_shardings=where)

    def compile(self, params: Params, learner_state: LearnerState, batch: Batch) -> None:
        """Compiles the update for a batch of these shapes (``jax.ShapeDtypeStruct``)."""
        self._jitted.lower(params, learner_state, batch).compile()

    def __call__(self, params: Params, learner_state: LearnerState, batch: Batch) -> Updated:
        """Returns at once where JAX dispatches asynchronously, as on an accelerator."""
        after, learner_state, logs, priorities = self._jitted(params, learner_state, batch)

        def fetch() -> Logs:
            return dict(zip(self._names, np.asarray(logs), strict=True))

        return Updated(after, learner_state, (params, learner_state), fetch, priorities)

    def _packed(self, params: Params, learner_state: LearnerState, batch: Batch) -> Any:
        before = params, learner_state
        # An agent with epochs scans over its minibatches.
        scans = isinstance(self._agent, EpochAgent)
        with convolution.in_loop() if scans else contextlib.nullcontext():
            *after, output = self._agent.learner_step(params, learner_state, batch)
        self._names[:] = output.logs  # runs during tracing: the names of the compiled function
        logs = jnp.array([jnp.mean(jnp.asarray(x, jnp.float32)) for x in output.logs.values()])
        # Also if all is kept: a state that is an argument would be returned as it is, not copied.
        keep = jnp.isfinite(logs).all() if self._check_finite else True
        params, learner_state = _select(keep, tuple(after), before)
        return params, learner_state, logs, output.priorities


def _select(condition: jax.Array | bool, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


class CallByMinibatch:
    """One jitted call per minibatch, gathered on the host."""

    def __init__(self, agent: EpochAgent) -> None:
        """Compiles nothing yet."""
        self._agent = agent
        self._prepare, self._update = jax.jit(self._prepared), jax.jit(agent.update)
        self._finish = jax.jit(agent.finish)

    def __call__(self, params: Params, learner_state: LearnerState, batch: Batch) -> Updated:
        """Makes the update."""
        agent, before = self._agent, (params, learner_state)
        learner_state, rows, schedule, batch_logs = self._prepare(params, learner_state, batch)
        rows = jax.tree.map(np.asarray, rows)
        all_logs = []
        for indices in np.asarray(schedule):
            minibatch = jax.tree.map(lambda x, i=indices: np.take(x, i, axis=0), rows)
            minibatch = agent.lay_out_rows(minibatch)
            *after, output = self._update(params, learner_state, minibatch)
            all_logs.append(output.logs)
            if agent.may_stop and agent.stops_at(output.logs):
                break
            params, learner_state = after
        params, learner_state = self._finish(params, learner_state)

        def fetch() -> Logs:
            logs = jax.tree.map(_mean, *all_logs) | jax.tree.map(np.asarray, batch_logs)
            if agent.may_stop:
                logs["minibatches"] = np.float32(len(all_logs))
            return logs

        return Updated(params, learner_state, before, fetch, None)

    def _prepared(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, PyTree, Array, Logs]:
        learner_state, rows, schedule = self._agent.prepare(params, learner_state, batch)
        return learner_state, rows, schedule, self._agent.batch_logs(rows)


def _mean(*values: Any) -> np.floating:
    return np.mean([np.asarray(value) for value in values])
