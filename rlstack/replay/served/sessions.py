"""The writers of a replay service: one session for each process that writes."""

from __future__ import annotations

import threading

import jax
import numpy as np

from rlstack.replay.base import ReplayClosedError
from rlstack.replay.shared_memory import SharedMemReplayBuffer, SharedMemWriter

# Sessions that may wait at the same time. The others try again by themselves, so that writers that
# wait do not take all threads of the transport from the reader.
_WAITING = 4


class Session:
    """The steps of one writer; calls of a writer are answered one at a time."""

    def __init__(
        self,
        writer: SharedMemWriter,
        env_ids: range,
        columns: list[tuple[tuple[int, ...], np.dtype]],
        places: threading.Semaphore,
    ) -> None:
        """Stores the parts.

        Args:
          writer: the writer of these environments in the table's process.
          env_ids: consecutive ids.
          columns: shape and dtype of each leaf of one environment's step.
          places: limits the number of waiting calls; a place is held during a wait.
        """
        self._writer, self._columns, self._places = writer, columns, places
        self.env_ids = env_ids
        self._all = slice(env_ids.start, env_ids.stop)
        self._lock = threading.Lock()
        self._number, self._answer = 0, (0, "")
        self._replaced = False

    def put(
        self,
        number: int,
        counts: np.ndarray,
        env_ids: np.ndarray | None,
        leaves: list[np.ndarray],
        seconds: float,
    ) -> tuple[int, str]:
        """Adds steps; see `rlstack.replay.served.service.ReplayService.put`."""
        with self._lock:
            if not self._begin(number):
                return self._answer
            self._check(counts, env_ids, leaves)
            done = at = 0
            reason = ""
            for count in counts.tolist():
                ids = self._all if env_ids is None else self._ids(env_ids[at : at + count])
                reason = self._wait(ids, seconds)
                if reason:
                    break
                self._writer.write(ids, [leaf[at : at + count] for leaf in leaves])
                at += count
                done += 1
            self._answer = done, reason
            return self._answer

    def gap(self, number: int, env_ids: np.ndarray) -> None:
        """Breaks the streams of some environments."""
        with self._lock:
            if self._begin(number):
                self._check_ids(env_ids)
                self._writer.gap(env_ids + self.env_ids.start)

    def _begin(self, number: int) -> bool:
        """Returns whether a call is new; a call is repeated if its answer was lost."""
        self._check_open()
        if number == self._number:
            return False
        if number != self._number + 1:
            raise ValueError(
                f"ReplayService.put: calls must be numbered one by one; got {number} after "
                f"{self._number}."
            )
        self._number, self._answer = number, (0, "")
        return True

    def _check_open(self) -> None:
        if self._replaced:
            raise ReplayClosedError(
                f"ReplayService.put: environments {self.env_ids} have another writer now."
            )
        self._writer.check_open("add")

    def _check(
        self, counts: np.ndarray, env_ids: np.ndarray | None, leaves: list[np.ndarray]
    ) -> None:
        """Checks the arrays of a call; they come from another process."""
        rows, many = int(counts.sum()), len(self.env_ids)
        fits = [(rows, *shape) for shape, _ in self._columns] == [x.shape for x in leaves]
        fits = fits and [dtype for _, dtype in self._columns] == [x.dtype for x in leaves]
        fits = fits and counts.dtype.kind == "i" and bool((counts >= 0).all())
        if env_ids is None:
            fits = fits and bool((counts == many).all())
        else:
            fits = fits and env_ids.shape == (rows,)
        if not fits:
            raise ValueError(
                f"ReplayService.put: leaves must be {rows} steps like {self._columns!r:.300}; got "
                f"{[(x.shape, x.dtype) for x in leaves]!r:.300}."
            )
        if env_ids is not None:
            self._check_ids(env_ids)

    def _check_ids(self, env_ids: np.ndarray) -> None:
        many = len(self.env_ids)
        if env_ids.dtype.kind != "i" or not ((env_ids >= 0) & (env_ids < many)).all():
            raise ValueError(
                f"ReplayService.put: env_ids must be ints in 0..{many - 1}; got {env_ids!r:.200}."
            )

    def _ids(self, env_ids: np.ndarray) -> slice | np.ndarray:
        return self._writer.checked(env_ids + self.env_ids.start, "add")

    def _wait(self, ids: slice | np.ndarray, seconds: float) -> str:
        """Waits until a step may be added; returns why it may not."""
        reason = self._writer.may_write(ids, 0.0)
        if not reason or seconds <= 0 or not self._places.acquire(blocking=False):
            return reason
        try:
            return self._writer.may_write(ids, seconds)
        finally:
            self._places.release()

    def end(self, *, replaced: bool) -> None:
        """Ends the session, after a call that is running."""
        self._replaced = replaced
        with self._lock:
            if not replaced:
                self._writer.close()


class Sessions:
    """The sessions of a service, by token."""

    def __init__(self, buffer: SharedMemReplayBuffer, num_envs: int) -> None:
        """Starts without sessions."""
        self._buffer, self._num_envs = buffer, num_envs
        leaves = jax.tree_util.tree_leaves(buffer.spec)
        self._columns = [(tuple(x.shape), np.dtype(x.dtype)) for x in leaves]
        self._places = threading.BoundedSemaphore(_WAITING)
        self._lock = threading.Lock()
        self._open: dict[int, Session] = {}

    def open(self, token: int, env_ids: range) -> None:
        """Makes a session; it replaces those that have one of its environments."""
        if not 0 <= env_ids.start < env_ids.stop <= self._num_envs:
            raise ValueError(
                f"ReplayService.open_writer: environments must be within 0..{self._num_envs - 1}; "
                f"got {env_ids}."
            )
        with self._lock:
            if token in self._open:
                return
            for other, session in list(self._open.items()):
                theirs = session.env_ids
                if theirs.start < env_ids.stop and env_ids.start < theirs.stop:
                    session.end(replaced=True)
                    del self._open[other]
            writer = self._buffer.writer(env_ids)
            self._open[token] = Session(writer, env_ids, self._columns, self._places)

    def find(self, token: int) -> Session:
        """Returns a session.

        Raises:
          ReplayClosedError: the session was replaced or closed, or another service made it.
        """
        session = self._open.get(token)
        if session is None:
            raise ReplayClosedError(
                "ReplayService.put: this writer must be open; another one has its environments "
                "now, or the service was restarted."
            )
        return session

    def close(self, token: int) -> None:
        """Ends a session, if it is open."""
        with self._lock:
            session = self._open.pop(token, None)
        if session is not None:
            session.end(replaced=False)
