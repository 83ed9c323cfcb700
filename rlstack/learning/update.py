"""The compiled forms of an agent's update."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent, EpochAgent, is_finite
from rlstack.devices.placement import Placement
from rlstack.networks.layers import forms
from rlstack.types import Array, Batch, LearnerState, Logs, Params, PyTree


class Updated(NamedTuple):
    """The result of an update, which may still be computed."""

    params: Params
    learner_state: LearnerState
    before: tuple[Params, LearnerState]  # restored if the update is not finite
    # Waits for the logs, as numpy scalars, and for whether the update is finite.
    fetch: Callable[[], tuple[Logs, bool]]
    priorities: jax.Array | None  # [B]
    votes: jax.Array | None = None  # [devices, n] int32, if the update carries them
    updates: PyTree = None  # of `LearnerOutput`
    failed: jax.Array | None = None  # whether it changed nothing, for the update that follows


class Update(Protocol):
    """Makes one update; the learner state must not be used again."""

    def place(self, batch: Batch, votes: Sequence[int] = (1,)) -> Any:
        """Moves a batch, and the votes of this process if the update carries them, to the devices.

        Raises:
          ValueError: the size of the batch is no multiple of the number of devices.
        """

    def __call__(self, params: Params, learner_state: LearnerState, placed: Any) -> Updated:
        """Returns the new params and learner state."""

    def compiled(self, params: Params, learner_state: LearnerState, placed: Any) -> dict[str, int]:
        """Returns the compiled functions, as XLA's HLO, and how often an update calls each."""


class OneCall:
    """``learner_step`` as one jitted function, which reuses the memory of the learner state.

    The logs are one vector until they are on the host: an update of a small network takes a few
    hundred microseconds, so each transferred array and each Python loop over the logs takes a
    noticeable fraction of it.

    The params are not donated, because an Inferencer may act with them. The state is, so an update
    that is not finite must return the one that it got. So must the next one, if it begins before
    the first has ended.
    """

    def __init__(self, agent: Agent, placement: Placement, *, check_finite: bool) -> None:
        """Prepares the jitted update; the first use or `compile` compiles it.

        Args:
          agent: the agent whose ``learner_step`` is compiled.
          placement: the devices; XLA divides the update over several.
          check_finite: whether an update that is not finite changes nothing.
        """
        self._agent, self._placement, self._check_finite = agent, placement, check_finite
        self._names: list[str] = []
        where = placement.of_update()
        self._jitted = jax.jit(self._packed, donate_argnums=1, out_shardings=where)
        self._none_failed = jax.device_put(np.False_)

    def place(self, batch: Batch, votes: Sequence[int] = (1,)) -> Batch:
        """Divides the batch over several devices; it carries no votes."""
        del votes
        return self._placement.batch(batch)

    def compile(self, params: Params, learner_state: LearnerState, batch: Batch) -> None:
        """Compiles the update for a batch of these shapes (``jax.ShapeDtypeStruct``)."""
        self._jitted.lower(params, learner_state, batch, self._none_failed).compile()

    def __call__(
        self,
        params: Params,
        learner_state: LearnerState,
        placed: Batch,
        failed: jax.Array | None = None,
    ) -> Updated:
        """Returns at once where JAX dispatches asynchronously, as on an accelerator.

        Args:
          params: the params.
          learner_state: the learner state.
          placed: the batch.
          failed: `Updated.failed` of an update that may still run; if that is true, this one
            changes nothing either. None if there is none.
        """
        failed = self._none_failed if failed is None else failed
        after, learner_state, logs, back, failed = self._jitted(
            params, learner_state, placed, failed
        )
        before, (priorities, updates) = (params, learner_state), back
        logs_on_host = functools.partial(fetch, self._names, logs)
        return Updated(
            after, learner_state, before, logs_on_host, priorities, updates=updates, failed=failed
        )

    def compiled(
        self, params: Params, learner_state: LearnerState, placed: Batch
    ) -> dict[str, int]:
        """Returns the compiled function, as XLA's HLO, which an update calls once."""
        lowered = self._jitted.lower(params, learner_state, placed, self._none_failed)
        return {lowered.compile().as_text() or "": 1}

    def _packed(
        self, params: Params, learner_state: LearnerState, batch: Batch, failed: Array
    ) -> Any:
        before = params, learner_state
        with layer_forms(self._agent):
            *after, output = self._agent.learner_step(params, learner_state, batch)
        self._names[:] = output.logs  # runs during tracing: the names of the compiled function
        finite = is_finite(output.logs, after[0])
        logs = mean_logs(output.logs, finite)
        # Also if all is kept: a state that is an argument would be returned as it is, not copied.
        keep = finite & ~failed if self._check_finite else True
        params, learner_state = select(keep, tuple(after), before)
        return params, learner_state, logs, (output.priorities, output.updates), ~jnp.asarray(keep)


def in_thread(function: Callable[..., None], *arguments: Any) -> Future[None]:
    """Calls a function in a thread, which does not outlive the process; returns its future."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function(*arguments)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="compile", daemon=True).start()
    return future


def layer_forms(agent: Agent) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which an agent's update is traced."""
    # An agent with epochs scans over its minibatches.
    return forms.in_loop() if isinstance(agent, EpochAgent) else contextlib.nullcontext()


def mean_logs(logs: Logs, *others: jax.Array) -> jax.Array:
    """Returns the mean of each log, and other scalars after them, ``[n]`` float32."""
    scalars = (*logs.values(), *others)
    return jnp.array([jnp.mean(jnp.asarray(x, jnp.float32)) for x in scalars], jnp.float32)


def fetch(names: Sequence[str], logs: jax.Array) -> tuple[Logs, bool]:
    """Waits for the logs and, after them, whether the update is finite.

    Returns:
      The logs by name, as numpy scalars, and whether it is.
    """
    *scalars, finite = np.asarray(logs)
    return dict(zip(names, scalars, strict=True)), bool(finite)


def select(condition: jax.Array | bool, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new arrays where the condition holds, and else the old ones."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
