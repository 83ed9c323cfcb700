"""Params on their way from the learner to whoever acts, by version.

The learner's `ParamsPublisher` serialises each version once, however many readers ask. Where one
acts, a `BackgroundParams` pulls in a thread, so that no batch ever waits for the network.
"""

from __future__ import annotations

import collections
import math
import threading
import time
import traceback
from collections.abc import Callable

from rlstack.acting.inferencer import ParamsSource
from rlstack.types import Params, PyTree

_Published = tuple[int, Params]
_SHORTEST_PAUSE = 0.001  # seconds between two pulls; taken while someone waits for a version
_PAUSE_AFTER_ERROR = 0.05


class ParamsError(RuntimeError):
    """The source of params failed; its traceback is in the text, which survives a network."""


class ParamsClosedError(RuntimeError):
    """The publisher or puller was closed."""


class ParamsPublisher:
    """Holds the newest params and hands them out as bytes; safe to call from many threads."""

    def __init__(self, encode: Callable[[PyTree], bytes]) -> None:
        """Starts without params.

        Args:
          encode: turns params into bytes. It runs in the thread of the first reader of a version,
            so the learner does not wait for it, and a version nobody reads is never encoded.
        """
        self._encode = encode
        self._condition = threading.Condition()
        self._encoding = threading.Lock()
        self._published: _Published | None = None
        self._encoded: tuple[int, bytes] | None = None
        self._closed = False
        self._reads = self._encodes = 0
        self._lags: collections.deque[int] = collections.deque(maxlen=1024)

    def publish(self, version: int, params: Params) -> None:
        """Makes ``params``, not written to later, the newest; ``version`` must have grown."""
        with self._condition:
            if self._published is not None and version <= self._published[0]:
                raise ValueError(
                    "ParamsPublisher.publish: versions must grow; got "
                    f"{version} after {self._published[0]}."
                )
            self._published = version, params
            self._condition.notify_all()

    def get(self, newer_than: int = -1, wait_s: float = 0.0) -> tuple[int, bytes] | None:
        """Returns the newest (version, bytes), or None when there is nothing newer.

        Args:
          newer_than: the version held by the reader; -1 for none.
          wait_s: how long to wait for something newer, in seconds.

        Raises:
          ParamsClosedError: after `close`, to those who wait too.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._has(newer_than), wait_s)
            if self._closed:
                raise ParamsClosedError("ParamsPublisher.get: the publisher is closed.")
            if not self._has(newer_than):
                return None
            assert self._published is not None
            version, params = self._published
            self._reads += 1
            if newer_than >= 0:
                self._lags.append(version - newer_than)
        return version, self._bytes_of(version, params)

    def stats(self) -> dict[str, float]:
        """Returns counts, and by how many versions the latest readers were behind."""
        with self._condition:
            return {
                "publisher/version": -1 if self._published is None else self._published[0],
                "publisher/reads": self._reads,
                "publisher/encodes": self._encodes,
                "publisher/bytes": 0 if self._encoded is None else len(self._encoded[1]),
                "publisher/lag_mean": sum(self._lags) / max(len(self._lags), 1),
                "publisher/lag_max": max(self._lags, default=0),
            }

    def close(self) -> None:
        """Wakes everyone who waits; later reads are refused."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _has(self, newer_than: int) -> bool:
        return self._published is not None and self._published[0] > newer_than

    def _bytes_of(self, version: int, params: Params) -> bytes:
        """Encodes at most once a version; other readers of it wait for the first one."""
        with self._encoding:
            if self._encoded is not None and self._encoded[0] == version:
                return self._encoded[1]
            encoded = self._encode(params)
            with self._condition:
                self._encodes += 1
                # A slow reader of an older version must not replace the newest one's bytes.
                if self._encoded is None or self._encoded[0] < version:
                    self._encoded = version, encoded
            return encoded


class EncodedParams:
    """A `ParamsSource` over a publisher that answers in bytes.

    ``get`` is `ParamsPublisher.get` or a client of it; ``decode`` turns its bytes into params.
    """

    def __init__(
        self,
        get: Callable[[int], tuple[int, bytes] | None],
        decode: Callable[[bytes], PyTree],
    ) -> None:
        self._get, self._decode = get, decode

    def get_params(self, newer_than: int = -1) -> _Published | None:
        """Returns (version, params), or None when there is nothing newer."""
        answer = self._get(newer_than)
        return None if answer is None else (answer[0], self._decode(answer[1]))


class BackgroundParams:
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
          source: whom to ask; its calls should return in bounded time.
          interval: seconds between two pulls; 0 where the source itself waits for news.
          patience: for how many seconds pulls may fail before callers are told.
          first_timeout: how many seconds to wait for the first params.

        Raises:
          ParamsError: the source failed.
          TimeoutError: it published nothing in time.
        """
        if min(interval, patience) < 0:
            raise ValueError(
                f"BackgroundParams: times must be at least 0; got {interval} and {patience}."
            )
        self._source, self._interval, self._patience = source, interval, patience
        self._condition = threading.Condition()
        self._held: _Published | None = None
        self._held_since = time.monotonic()
        self._error: Exception | None = None
        self._failing_since = math.inf
        self._waiting = 0
        self._hurry = self._closed = False
        self._pulls = self._updates = self._errors = self._skipped = 0
        self._pull_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="params", daemon=True)
        self._thread.start()
        try:
            self.wait_for(-1, first_timeout)
        except BaseException:
            self._stop(1.0)
            raise

    def get_params(self, newer_than: int = -1) -> _Published | None:
        """Returns at once the newest (version, params) in memory, None if that is not newer.

        Raises:
          ParamsError: pulls have failed for longer than ``patience``.
          ParamsClosedError: after `close`.
        """
        self._check("get_params")
        held = self._held
        return held if held is not None and held[0] > newer_than else None

    def wait_for(self, version: int, timeout: float) -> int:
        """Waits until params of ``version`` or newer are in memory; returns the version held.

        Args:
          version: the oldest one that will do; -1 for any.
          timeout: in seconds.

        Raises:
          TimeoutError: they did not come in time.
          ParamsError, ParamsClosedError: as `get_params`.
        """
        with self._condition:
            self._waiting += 1
            self._hurry = True
            self._condition.notify_all()  # the thread now pulls at once, and often
            try:
                self._condition.wait_for(lambda: self._settled(version), timeout)
            finally:
                self._waiting -= 1
            if self._held is not None and self._held[0] >= version and not self._closed:
                return self._held[0]
            self._check("wait_for", at_once=True)
            held = "none" if self._held is None else f"version {self._held[0]}"
        wanted = "any params" if version < 0 else f"params of version {version}"
        raise TimeoutError(
            f"BackgroundParams.wait_for: {wanted} must come within {timeout:g} s; got {held}. "
            "Look whether the learner runs."
        )

    def stats(self) -> dict[str, float]:
        """Returns counts; ``skipped`` are versions that came and went between two pulls."""
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
        """Wakes who waits and ends the thread, once the source's present call returns."""
        if not self._stop(timeout):
            raise TimeoutError(
                f"BackgroundParams.close: a pull must end within {timeout:g} s; it still runs. "
                "Give the source's calls a deadline."
            )

    def _stop(self, timeout: float) -> bool:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closed:
            self._hurry = False
            self._pull()
            with self._condition:
                pause = _SHORTEST_PAUSE if self._error is None else _PAUSE_AFTER_ERROR
                if not self._waiting:
                    pause = max(pause, self._interval)
                self._condition.wait_for(lambda: self._closed or self._hurry, pause)

    def _pull(self) -> None:
        held = -1 if self._held is None else self._held[0]
        start = time.monotonic()
        try:
            published, error = self._source.get_params(newer_than=held), None
        except Exception as raised:  # told to whoever asks for params
            published, error = None, raised
        now = time.monotonic()
        with self._condition:
            self._pulls += 1
            self._pull_seconds += now - start
            self._errors += error is not None
            self._error = error
            self._failing_since = math.inf if error is None else min(self._failing_since, start)
            if published is not None and published[0] > held:
                if held >= 0:
                    self._skipped += published[0] - held - 1
                self._updates += 1
                self._held, self._held_since = published, now
            self._condition.notify_all()

    def _settled(self, version: int) -> bool:
        """Whether waiting for a version is over: it is here, or never will be."""
        here = self._held is not None and self._held[0] >= version
        return self._closed or here or self._overdue()

    def _overdue(self) -> bool:
        return time.monotonic() - self._failing_since >= self._patience

    def _check(self, where: str, at_once: bool = False) -> None:
        if self._closed:
            raise ParamsClosedError(f"BackgroundParams.{where}: it is closed.")
        error = self._error
        if error is not None and (at_once or self._overdue()):
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            raise ParamsError(f"BackgroundParams.{where}: the source failed.\n{text}") from error
