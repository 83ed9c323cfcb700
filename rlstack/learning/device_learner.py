"""Learning from a replay in the memory of the learner's device, for environments on the host.

Batches are drawn where they are learned from, so one call makes all updates that follow a step. The
host waits for the device only when it reads the logs of a call, with an accelerator after it has
started the next one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent
from rlstack.configs.learner import LearnerConfig
from rlstack.fused.devices import Devices
from rlstack.fused.learning import Learning, Updater, Updates
from rlstack.fused.ring import RingState
from rlstack.learning.device_replay import DeviceReplay
from rlstack.learning.learner import Learner, SampleReader, in_micro_batches, non_finite
from rlstack.learning.update import layer_forms
from rlstack.networks.layers import forms
from rlstack.types import Array, Batch, LearnerState, Logs, Params, PRNGKey, PyTree


class _Call(NamedTuple):
    """A call of the compiled updates, which may still run."""

    before: int  # the version before it
    # Sums of the logs, the number of updates made, and whether one was dropped.
    report: jax.Array
    dropped: tuple[Array, Any]  # the logs and the batch of that one


class DeviceLearner(Learner):
    """Learns from a `DeviceReplay`, all updates that follow a step in one call.

    An update that is not finite changes nothing and ends the call. With an accelerator the error is
    raised after the next call, which changes nothing either.
    """

    def __init__(
        self, cfg: LearnerConfig, agent: Agent, replay: DeviceReplay, rng_key: PRNGKey
    ) -> None:
        """Initialises params and learner state; arguments as in `Learner`.

        Raises:
          ValueError: there are several devices.
        """
        super().__init__(cfg, agent, replay, rng_key)
        if self._placement.several:
            raise ValueError("DeviceLearner: there must be one device; got several.")
        agent = in_micro_batches(agent, cfg)
        self._replay, self._agent = replay, agent
        self._updater = Updater(
            agent,
            check_finite=cfg.check_finite,
            devices=Devices(),
            keeps_cells=cfg.check_finite and self._placement.on_cpu,
        )
        self._table = replay.table(self._updater)
        # The params are not donated, because an Inferencer may act with them.
        self._one = jax.jit(self._learned_once, donate_argnums=(1, 3))
        self._all = jax.jit(self._learned, donate_argnums=(1, 3))
        has_convolutions = any(leaf.ndim >= 4 for leaf in jax.tree.leaves(self.params))
        # XLA's loops over convolutions on the CPU are many times slower than calls.
        self._by_calls = has_convolutions and self._placement.on_cpu
        self._failed: Array = np.zeros((), bool)
        self._calls: list[_Call] = []
        self._logs: list[dict[str, Any]] = []

    def update_from(self, replay_buffer: SampleReader, most: float = math.inf) -> Logs:
        """Makes all updates that the replay allows now, up to this number ever.

        Args:
          replay_buffer: the replay of this learner, or a wrapper of it.
          most: the number of updates, ever, after which none is made.

        Returns:
          Logs of earlier updates, and on a CPU of these: of each call the means, once for each
          update.

        Raises:
          NonFiniteError: an update gave NaN or infinity; params and learner state are as before.
        """
        del replay_buffer
        count = int(min(self._replay.counters.ready(), most - self.version))
        while count > 0:
            made = 1 if self._by_calls else count
            self.start_updates(made)
            count -= made
            if self._placement.on_cpu:
                self._read_calls(0)
        self._read_calls(1)
        return self._taken()

    def last_logs(self) -> Logs:
        """Waits for the updates that still run; returns the logs that were not returned yet.

        Raises:
          NonFiniteError: see `update_from`.
        """
        self._read_calls(0)
        return self._taken()

    def save(self) -> PyTree:
        """Returns params, a copy of the learner state, and the version, after the last update."""
        self._read_calls(0)
        return super().save()

    def start_updates(self, count: int) -> None:
        """Starts this number of updates, which the replay must allow now, as one call."""
        replay, run = self._replay, self._one if count == 1 else self._all
        steps = replay.last_step()
        learned = run(
            self.params,
            self.learner_state,
            np.int32(self.version),
            replay.state,
            self._failed,
            np.int32(count),
            *steps,
        )
        self.params, self.learner_state, replay.state, self._failed, *found = learned
        replay.counters.draw(count)
        self._calls.append(_Call(self.version, *found))
        self.version += count

    def _learned_once(self, *arguments: Any) -> tuple[Any, ...]:
        return self._run(layer_forms(self._agent), self._once, *arguments)

    def _learned(self, *arguments: Any) -> tuple[Any, ...]:
        return self._run(forms.in_loop(), self._table.learn, *arguments)

    def _once(
        self, learning: Learning, ring: RingState, updates: Updates, good: Array, most: Array
    ) -> tuple[Learning, RingState, Updates]:
        del most
        return self._table.learn_once(learning, ring, updates, good)

    def _run(
        self,
        form: contextlib.AbstractContextManager[None],
        learn: Callable[..., tuple[Learning, RingState, Updates]],
        params: Params,
        learner_state: LearnerState,
        version: Array,
        ring: RingState,
        failed: Array,
        count: Array,
        words: Array,
        octets: Array,
    ) -> tuple[Any, ...]:
        """Adds a step and makes updates, unless an earlier one failed; pure."""
        if len(words):
            ring = self._replay.with_steps(ring, words, octets)
        learning = Learning(params, learner_state, jnp.asarray(version, jnp.int32))
        with form:
            updates = self._updater.none(learning, self._table.batch_spec(ring))
            updates = updates._replace(failed=jnp.asarray(failed))
            learning, ring, updates = learn(learning, ring, updates, ~failed, version + count)
        made = learning.version - version
        report = jnp.append(updates.logs, jnp.array([made, updates.failed], jnp.float32))
        dropped = updates.failed_logs, updates.batch
        return learning.params, learning.learner_state, ring, updates.failed, report, dropped

    def _read_calls(self, kept: int) -> None:
        """Reads the logs of all calls but the newest ones, of which ``kept`` may still run."""
        while len(self._calls) > kept:
            call = self._calls.pop(0)
            *sums, made, failed = np.asarray(call.report)
            if made:
                means = sums if made == 1 else [np.full(int(made), x / made) for x in sums]
                self._logs.append(dict(zip(self._updater.names, means, strict=True)))
            if failed and self._cfg.check_finite:
                self._raise(call, int(made))

    def _taken(self) -> Logs:
        logs, self._logs = self._logs, []
        if len(logs) < 2:
            return logs[0] if logs else {}
        return {name: np.hstack([log[name] for log in logs]) for name in logs[0]}

    def _raise(self, call: _Call, made: int) -> None:
        """Raises the error of a call with a dropped update; since then nothing was learned."""
        self._calls.clear()
        self.version, self._failed = call.before + made, np.zeros((), bool)
        logs, batch = call.dropped
        if self._updater.keeps_cells:  # nothing was added or drawn since
            cells, weights = batch
            batch = Batch(jax.jit(self._table.items)(self._replay.state, cells), weights)
        self._replay.count_again()
        found = dict(zip(self._updater.names, np.asarray(logs), strict=True))
        raise non_finite(found, (self.params, self.learner_state), batch, self.version)
