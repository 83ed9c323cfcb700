"""Transfer of params from the learner to the inferencers, by version.

An inferencer holds one version and asks a `ParamsSource` for a newer one. In the learner's process,
a `ParamsPublisher` encodes each version once for all readers. In the acting process, a
`ParamsPuller` asks in a thread, so that no batch waits for the network.
"""

from __future__ import annotations

import collections
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from rlstack.types import Params, PyTree

_Published = tuple[int, Params]
_FIRST_PAUSE = 0.001  # seconds between two pulls until the first params arrive
_PAUSE_AFTER_ERROR = 0.05


class ParamsError(RuntimeError):
    """The source of params failed; the message contains its traceback, also for remote callers."""


class ParamsClosedError(RuntimeError):
    """The publisher or puller was closed."""


class ParamsSource(Protocol):
    """Provides params by version: a Learner, or a client of one."""

    def get_params(self, newer_than: int = -1) -> _Published | None:
        """Returns (version, params), or None when there is nothing newer."""


class FixedParams:
    """A `ParamsSource` of params that never change."""

    def __init__(self, params: Params) -> None:
        self._params = params

    def get_params(self, newer_than: int = -1) -> _Published | None:
        """Returns version 0, once."""
        return (0, self._params) if newer_than < 0 else None


class ParamsPublisher:
    """Provides a learner's newest params as bytes; safe to call from many threads."""

    def __init__(self, learner: ParamsSource, encode: Callable[[PyTree], bytes]) -> None:
        """Stores the arguments.

        Args:
          learner: the source of params; published params must not change later.
          encode: converts params to bytes. It runs in the thread of the first reader of a version,
              so the learner does not wait for it, and a version without readers is never encoded.
        """
        self._learner, self._encode = learner, encode
        self._lock = threading.Lock()  # guards the counters
        self._encoding = threading.Lock()
        self._encoded: tuple[int, bytes] | None = None
        self._closed = False
        self._reads = self._encodes = 0
        self._lags: collections.deque[int] = collections.deque(maxlen=1024)

    def get(self, newer_than: int = -1) -> tuple[int, bytes] | None:
        """Returns the newest (version, bytes), or None when there is nothing newer.

        Args:
          newer_than: the version that the reader has; -1 for none.

        Raises:
          ParamsClosedError: `close` was called before.
        """
        if self._closed:
            raise ParamsClosedError("ParamsPublisher.get: the publisher is closed.")
        published = self._learner.get_params(newer_than)
        if published is None:
            return None
        version, params = published
        with self._lock:
            self._reads += 1
            if newer_than >= 0:
                self._lags.append(version - newer_than)
        return version, self._bytes_of(version, params)

    def stats(self) -> dict[str, float]:
        """Returns counts, and by how many versions the latest readers were behind."""
        newest = self._learner.get_params(-1)
        with self._lock:
            return {
                "publisher/version": -1 if newest is None else newest[0],
                "publisher/reads": self._reads,
                "publisher/encodes": self._encodes,
                "publisher/bytes": 0 if self._encoded is None else len(self._encoded[1]),
                "publisher/lag_mean": sum(self._lags) / max(len(self._lags), 1),
                "publisher/lag_max": max(self._lags, default=0),
            }

    def close(self) -> None:
        """Makes later reads raise `ParamsClosedError`."""
        self._closed = True

    def _bytes_of(self, version: int, params: Params) -> bytes:
        """Encodes each version at most once; concurrent readers wait for the first encoding."""
        with self._encoding:
            if self._encoded is not None and self._encoded[0] == version:
                return self._encoded[1]
            encoded = self._encode(params)
            with self._lock:
                self._encodes += 1
                # A slow reader of an older version must not replace the bytes of the newest one.
                if self._encoded is None or self._encoded[0] < version:
                    self._encoded = version, encoded
            return encoded


class RemoteParams:
    """A `ParamsSource` over a publisher in another process."""

    def __init__(
        self,
        get: Callable[[int], tuple[int, bytes] | None],
        decode: Callable[[bytes], PyTree],
    ) -> None:
        """Stores the arguments.

        Args:
          get: `ParamsPublisher.get`, or a client of it.
          decode: converts the publisher's bytes to params.
        """
        self._get, self._decode = get, decode

    def get_params(self, newer_than: int = -1) -> _Published | None:
        """Returns (version, params), or None when there is nothing newer."""
        answer = self._get(newer_than)
        return None if answer is None else (answer[0], self._decode(answer[1]))


class ParamsPuller:
    """A `ParamsSource` that answers from memory while a thread pulls from another source."""

    def __init__(
        self,
        source: ParamsSource,
        interval: float = 0.05,
        *,
        patience: float = 0.0,
        first_timeout: float = 60.0,
    ) -> None:
        """Starts the thread and waits for the first params.

        Args:
          source: the source of the params; its calls should return in bounded time.
          interval: seconds between two pulls.
          patience: seconds for which pulls may fail before `get_params` raises.
          first_timeout: seconds to wait for the first params.

        Raises:
          ParamsError: the source failed.
          TimeoutError: the source published nothing in time.
        """
        if min(interval, patience) < 0:
            raise ValueError(
                f"ParamsPuller: times must be at least 0; got {interval} and {patience}."
            )
        self._source, self._interval, self._patience = source, interval, patience
        self._condition = threading.Condition()
        self._held: _Published | None = None
        self._held_since = time.monotonic()
        self._error: Exception | None = None
        self._failing_since = math.inf
        self._closed = False
        self._pulls = self._updates = self._errors = self._skipped = 0
        self._pull_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="params", daemon=True)
        self._thread.start()
        try:
            self._wait_for_first(first_timeout)
        except BaseException:
            self._stop(1.0)
            raise

    def get_params(self, newer_than: int = -1) -> _Published | None:
        """Returns the newest (version, params) in memory without waiting; None if not newer.

        Raises:
          ParamsError: pulls have failed for longer than ``patience``.
          ParamsClosedError: `close` was called before.
        """
        if self._closed:
            raise ParamsClosedError("ParamsPuller.get_params: it is closed.")
        error = self._error
        if error is not None and self._is_overdue():
            raise _failure(error)
        held = self._held
        return held if held is not None and held[0] > newer_than else None

    def has_newer(self, version: int, timeout: float) -> bool:
        """Waits until ``get_params`` has params newer than a version; returns whether it has.

        Args:
          version: the version that the caller has.
          timeout: the longest wait, in seconds.

        Raises:
          ParamsError: pulls have failed for longer than ``patience``.
          ParamsClosedError: `close` was called before.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._closed or (self._held is not None and self._held[0] > version),
                timeout,
            )
        return self.get_params(version) is not None

    def stats(self) -> dict[str, float]:
        """Returns counts. ``skipped`` counts versions that were replaced between two pulls."""
        with self._condition:
            return {
                "params/version": -1 if self._held is None else self._held[0],
                "params/pulls": self._pulls,
                "params/updates": self._updates,
                "params/skipped": self._skipped,
                "params/errors": self._errors,
                "params/pull_ms": 1e3 * self._pull_seconds / max(self._pulls, 1),
                "params/age_s": time.monotonic() - self._held_since,
            }

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread as soon as the current call of the source returns.

        Raises:
          TimeoutError: the source's current call takes longer than ``timeout`` seconds.
        """
        if not self._stop(timeout):
            raise TimeoutError(
                f"ParamsPuller.close: a pull must end within {timeout:g} s; it still runs. "
                "Give the source's calls a deadline."
            )

    def _wait_for_first(self, timeout: float) -> None:
        with self._condition:
            self._condition.wait_for(
                lambda: self._held is not None or self._is_overdue(), timeout=timeout
            )
            if self._held is not None:
                return
            if self._error is not None:
                raise _failure(self._error)
        raise TimeoutError(
            f"ParamsPuller: the first params must come within {timeout:g} s; got none. "
            "Check that the learner runs."
        )

    def _stop(self, timeout: float) -> bool:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closed:
            self._pull()
            with self._condition:
                pause = _FIRST_PAUSE if self._error is None else _PAUSE_AFTER_ERROR
                if self._held is not None:
                    pause = max(pause, self._interval)
                self._condition.wait_for(lambda: self._closed, pause)

    def _pull(self) -> None:
        held = -1 if self._held is None else self._held[0]
        start = time.monotonic()
        try:
            published, error = self._source.get_params(newer_than=held), None
        except Exception as raised:  # get_params raises it to its caller
            published, error = None, raised
        now = time.monotonic()
        with self._condition:
            self._pulls += 1
            self._pull_seconds += now - start
            self._errors += error is not None
            self._error = error
            # From the end of the call: after a stop of the process, one call fails late.
            self._failing_since = math.inf if error is None else min(self._failing_since, now)
            if published is not None and published[0] > held:
                if held >= 0:
                    self._skipped += published[0] - held - 1
                self._updates += 1
                self._held, self._held_since = published, now
            self._condition.notify_all()

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._failing_since >= self._patience


def _failure(cause: Exception) -> ParamsError:
    text = "".join(traceback.format_exception(cause))
    error = ParamsError(f"ParamsPuller: the source failed.\n{text}")
    error.__cause__ = cause
    return error
