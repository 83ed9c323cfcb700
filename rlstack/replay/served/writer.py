"""The writing half of a served replay: collects steps and sends them in messages of many."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import NamedTuple

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.served.calls import MARGIN, NAME, ServiceCalls, own_name, unreachable
from rlstack.replay.step_counter import StepCounter
from rlstack.replay.storage import StepRing
from rlstack.rpc import UnavailableError
from rlstack.types import Transition

_WAIT = 0.5  # seconds that one call waits on the service
_PAUSE = 0.01  # seconds before a call that could not wait there is made again
_RETRY = 0.1  # seconds before a service that does not answer is called again
_LAST = 0.5  # seconds for the last steps when the writer is closed


class _Steps:
    """Steps that are to be sent, in arrays that are reused."""

    counts: list[int]  # number of environments in each step
    rows: int  # their sum
    is_whole: bool  # whether each step has all environments in order

    def __init__(self, rows: int, spec: Transition):
        leaves = jax.tree_util.tree_leaves(spec)
        self.leaves = [np.empty((rows, *x.shape), x.dtype) for x in leaves]
        self.env_ids = np.empty(rows, np.int32)
        self.clear()

    def clear(self) -> None:
        """Removes all steps."""
        self.rows, self.counts, self.is_whole = 0, [], True

    def append(self, env_ids: np.ndarray | None, leaves: list[np.ndarray], count: int) -> None:
        """Appends one step of some environments; None for all in order."""
        end = self.rows + count
        for all_rows, leaf in zip(self.leaves, leaves, strict=True):
            all_rows[self.rows : end] = leaf
        self.env_ids[self.rows : end] = np.arange(count) if env_ids is None else env_ids
        self.is_whole = self.is_whole and env_ids is None
        self.counts.append(count)
        self.rows = end


class _Message(NamedTuple):
    """The arguments of `ReplayService.put` that describe the steps."""

    counts: np.ndarray
    env_ids: np.ndarray | None
    leaves: list[np.ndarray]

    @classmethod
    def of(cls, steps: _Steps) -> _Message:
        """Returns the steps as views."""
        rows = slice(steps.rows)
        ids = None if steps.is_whole else steps.env_ids[rows]
        return cls(np.array(steps.counts, np.int64), ids, [leaf[rows] for leaf in steps.leaves])

    def after(self, done: int) -> _Message:
        """Returns the rest, without the first ``done`` steps."""
        at = int(self.counts[:done].sum())
        ids = None if self.env_ids is None else self.env_ids[at:]
        return _Message(self.counts[done:], ids, [leaf[at:] for leaf in self.leaves])


class ServedWriter:
    """Sends steps of consecutive environments to a service.

    ``add`` copies a step. Another thread sends all steps that wait when they complete an item, so
    an actor does not wait for the network; the steps of an unroll are one message. While a message
    is on its way, further steps collect for the next one.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        env_ids: range,
        spec: Transition,
        calls: ServiceCalls,
        layout: str,
        *,
        max_pending: int,
    ):
        """Stores the parts; `add` sends the first steps.

        Args:
          cfg: the rules of the table.
          num_envs: number of environments of all writers.
          env_ids: consecutive ids of the environments of this writer.
          spec: the spec of one environment's step.
          calls: the service.
          layout: the layout of the config; the service compares it with its own layout.
          max_pending: number of rows (a step of one environment) that may wait to be sent. 0: every
            ``add`` waits until its step is in the table.
        """
        self._cfg, self._env_ids, self._calls, self._layout = cfg, env_ids, calls, layout
        self._counter = StepCounter(len(env_ids))  # counts steps since the last gap
        self._checks = StepRing(cfg, num_envs)  # never written; checks leaves
        leaves = jax.tree_util.tree_leaves(spec)
        self._checks.use(spec, [np.empty((1, num_envs, *x.shape), x.dtype) for x in leaves])
        self._in_background, rows = max_pending > 0, max(max_pending, len(env_ids))
        self._steps, self._sending = _Steps(rows, spec), _Steps(rows, spec)
        self._capacity = rows
        self._changed = threading.Condition()
        self._due = self._busy = self._closed = False
        self._reason = ""  # why the steps could not be added
        self._error: Exception | None = None
        self._token, self._number = secrets.randbits(62), 0
        self._is_open = False
        self._thread: threading.Thread | None = None

    def add(self, env_ids: np.ndarray | None, transition: Transition, timeout: float) -> None:
        """Appends one step of each of some environments; see ``ReplayBuffer.add``."""
        with self._changed:
            self._check_open("add")
            ids = self._local(env_ids, "add")
            count = len(self._env_ids) if ids is None else len(ids)
            leaves = self._checks.leaves(transition, count)
            if not self._in_background:
                self._add_now(ids, leaves, count, timeout)
                return
            if not self._changed.wait_for(lambda: self._has_room(count), timeout):
                raise self._timed_out("add", timeout)
            self._check_open("add")
            self._steps.append(ids, leaves, count)
            if self._completes(ids) or not self._has_room(count):
                self._send_soon()

    def _local(self, env_ids: np.ndarray | None, where: str) -> np.ndarray | None:
        return self._counter.check_own_ids(f"{NAME}.{where}", env_ids, self._env_ids.start)

    def _has_room(self, count: int) -> bool:
        ended = self._error is not None or self._closed
        return ended or self._steps.rows + count <= self._capacity

    def _completes(self, ids: np.ndarray | None) -> bool:
        """Counts a step; returns whether it completes an item."""
        counter, period = self._counter, self._cfg.step_period
        if ids is None and (counter.together or counter.rejoin()):
            start = counter.step - self._cfg.unroll_length
            counter.step += 1
            return start >= 0 and start % period == 0
        counter.separate()
        ids = counter.envs if ids is None else ids
        starts = counter.steps[ids] - self._cfg.unroll_length
        counter.steps[ids] += 1
        return bool(((starts >= 0) & (starts % period == 0)).any())

    def _add_now(
        self, ids: np.ndarray | None, leaves: list[np.ndarray], count: int, timeout: float
    ) -> None:
        """Adds a step and waits until it is in the table."""
        self._steps.clear()
        self._steps.append(ids, leaves, count)
        if self._put(_Message.of(self._steps), time.monotonic() + timeout).counts.size:
            raise self._timed_out("add", timeout)

    def _put(self, message: _Message, deadline: float) -> _Message:
        """Sends steps until all are added or the deadline has passed; returns the rest."""
        while True:
            left = max(0.0, min(_WAIT, deadline - time.monotonic()))
            try:
                if not self._is_open:
                    ids = self._env_ids
                    self._calls("open_writer", self._token, ids.start, len(ids), self._layout)
                    self._is_open = True
                sent = time.monotonic()
                done, self._reason = self._calls(
                    "put", self._token, self._number + 1, *message, left, seconds=left
                )
            except UnavailableError as error:
                self._reason, pause = unreachable("add", error), _RETRY
            else:
                self._number += 1
                message = message.after(done)
                if not message.counts.size:
                    return message
                pause = _PAUSE if time.monotonic() - sent < left else 0.0
            if self._closed or time.monotonic() + pause >= deadline:
                return message
            time.sleep(pause)

    def _timed_out(self, where: str, seconds: float) -> ReplayTimeoutError:
        reason = own_name(self._reason) or "steps are still being sent to the replay service."
        return ReplayTimeoutError(f"{NAME}.{where}: waited {seconds:g} s: {reason}")

    def _send_soon(self) -> None:
        """Makes the thread send the steps that wait; the caller holds ``_changed``."""
        self._due = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="replay-writer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._swap():
                deadline = _LAST if self._closed else float("inf")
                self._put(_Message.of(self._sending), time.monotonic() + deadline)
        except Exception as error:
            self._error = error
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _swap(self) -> bool:
        """Waits until steps are to be sent and takes them; returns False at the end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._due or self._closed)
            if not self._due:
                return False
            self._steps, self._sending = self._sending, self._steps
            self._steps.clear()
            self._due, self._busy = False, True
            self._changed.notify_all()
            return True

    def flush(self, timeout: float) -> None:
        """Waits until all completed items are in the table.

        Raises:
          ReplayTimeoutError: the wait exceeded the timeout; the items are still being sent.
        """
        with self._changed:
            self._check_open("flush")
            if not self._in_background:
                return
            if self._steps.rows:
                self._send_soon()
            if not self._changed.wait_for(self._is_idle, timeout):
                raise self._timed_out("flush", timeout)
            self._check_open("flush")

    def _is_idle(self) -> bool:
        return self._error is not None or self._closed or not (self._due or self._busy)

    def gap(self, env_ids: np.ndarray | None, timeout: float) -> None:
        """Drops the unfinished items of these environments."""
        self.flush(timeout)
        with self._changed:
            self._check_open("gap")
            ids = self._local(env_ids, "gap")
            ids = self._counter.envs if ids is None else ids
            self._counter.separate()
            self._counter.steps[ids] = 0
            self._counter.rejoin()
            if not self._is_open:
                return  # no step was sent yet
            deadline = time.monotonic() + timeout
            while True:
                try:
                    self._calls("gap", self._token, self._number + 1, ids.astype(np.int64))
                    self._number += 1
                    return
                except UnavailableError as error:
                    if time.monotonic() > deadline:
                        raise ReplayTimeoutError(unreachable("gap", error)) from None

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"{NAME}.{where}: the buffer is closed.")
        if self._error is not None:
            if isinstance(self._error, ReplayClosedError):
                raise ReplayClosedError(str(self._error)) from self._error
            raise self._error

    def close(self) -> None:
        """Sends the steps that the table accepts immediately, and ends the stream."""
        if self._closed:
            return
        self._closed = True  # ends a wait in `add`
        with self._changed:
            if self._in_background and self._steps.rows and self._error is None:
                self._send_soon()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2 * _LAST)
        if self._is_open and self._error is None:
            # The service may have ended.
            with contextlib.suppress(UnavailableError, ReplayClosedError, ValueError):
                self._calls("close_writer", self._token, seconds=_LAST - MARGIN)
