"""The inference service: joins the requests of many actors into one batch of one Inferencer.

A batch is complete when it is full or when all live clients wait; then the thread of the last
request computes the whole batch and gives all answers. Otherwise a worker thread computes the batch
when its first request has waited long enough. `submit` does not wait for the answer, so that a
transport needs no thread for each call in progress; `inference` does. This module has no transport.

With greedy policies the answers for an environment do not depend on the rest of its batch, except
for rounding, which differs between batch sizes. With sampling policies only the noise depends on
it. The answers to a batch of all environments equal those of a local Inferencer bit for bit.
"""

from __future__ import annotations

import collections
import math
import threading
import time
import traceback
from concurrent.futures import Future

import numpy as np

from rlstack.acting.batches import BatchJoiner, TimestepSpec, padded_sizes
from rlstack.acting.inference import Inference, Servable
from rlstack.acting.request_queue import ClientName, Request, RequestQueue, Taken
from rlstack.configs.acting import ServiceConfig
from rlstack.rpc import remote
from rlstack.types import TimeStep

_WINDOW = 2048  # number of latest requests and batches in means and percentiles


class InferenceError(RuntimeError):
    """Acting failed; the message contains the traceback, also for remote callers."""


class InferenceService:
    """Acts for many clients; safe to call from any number of threads."""

    def __init__(
        self, cfg: ServiceConfig, inferencer: Servable, *, one_thread: bool = False
    ) -> None:
        """Starts the threads that compute batches and that end overdue requests.

        Args:
          cfg: options for collecting requests into batches.
          inferencer: the inferencer that acts; from now on only this service may use it. It calls
              its source of params between batches, so the source should return immediately
              (`rlstack.acting.params.ParamsPuller`).
          one_thread: whether one thread computes all batches, and never that of a caller.
        """
        num_envs = inferencer.num_envs
        self._timeout = min(cfg.timeout_s, threading.TIMEOUT_MAX)
        self._num_envs = num_envs
        self._all_ids = np.arange(num_envs, dtype=np.int32)
        self._inferencer = inferencer
        self._acting = threading.Lock()  # guards the inferencer
        self._compiled: set[tuple[int, bool]] = set()  # the kinds of batches so far
        self._compiled_at = -math.inf  # when the last compilation ended; infinite during one
        spec = inferencer.obs_spec
        extras = inferencer.extras_spec
        self._timestep_spec = None if spec is None else TimestepSpec.of(spec, extras)
        sizes = padded_sizes(cfg.batch_sizes, cfg.max_batch, num_envs)
        self._joiner = BatchJoiner(sizes, num_envs)
        self._statistics = _Statistics(min(cfg.max_batch, num_envs))
        self._queue = RequestQueue(
            num_envs, cfg.max_batch, cfg.max_wait_ms / 1e3, cfg.live_s, cfg.lock_step, one_thread
        )
        self._ended = threading.Event()
        self._worker = threading.Thread(target=self._work, name="inference", daemon=True)
        self._worker.start()
        self._watch = threading.Thread(target=self._end_overdue, name="overdue", daemon=True)
        self._watch.start()

    @remote()
    def next_incarnation(self, client: ClientName) -> int:
        """Returns a number above all incarnations of a client, for an actor that starts."""
        return self._queue.next_incarnation(client)

    @remote()
    def inference(
        self, client: ClientName, incarnation: int, env_ids: np.ndarray | None, timestep: TimeStep
    ) -> Inference:
        """Acts on some of a client's environments; blocks until there is an answer.

        Args:
          client: the actor's name or rank.
          incarnation: a number that grows each time the actor is restarted. The first call with a
              new number resets the agent state of the actor's environments; calls with earlier
              numbers are then refused.
          env_ids: int ``[B]``, distinct ids in ``[0, num_envs)``; None for all in order.
          timestep: ``[B, ...]``, row i of environment ``env_ids[i]``.

        Returns:
          numpy arrays ``[B, ...]``, which are read-only and never change.

        Raises:
          ValueError: ids or timestep are malformed, or an environment belongs to another client.
          StaleIncarnationError: the actor has been restarted as a later incarnation.
          TimeoutError: there was no answer within ``timeout_s``, not counting compilation. If the
              batch was already being computed, the agent state of the request's environments may
              have advanced.
          InferenceError: acting failed for the whole batch; the service continues.
          ServiceClosedError: the service was closed.
        """
        return self.submit(client, incarnation, env_ids, timestep).result()

    def submit(
        self, client: ClientName, incarnation: int, env_ids: np.ndarray | None, timestep: TimeStep
    ) -> Future[Inference]:
        """Does the same without waiting for the answer, except if this request completes a batch.

        Other threads may wait for the future or be called by it, but nobody may set or cancel it.

        Raises:
          ValueError, StaleIncarnationError, ServiceClosedError: see `inference`. All other errors
              are those of the future.
        """
        leaves = (self._timestep_spec or self._learn_spec(timestep)).leaves(timestep)
        request = Request(self._checked(env_ids, len(leaves[0])), leaves)
        if (taken := self._queue.submit(request, client, incarnation)) is not None:
            self._serve(taken)
        return request.answer

    def stats(self) -> dict[str, float]:
        """Returns counts since the start, and means and percentiles over the latest requests.

        Queue time is from a request's arrival to the start of its batch, latency to its answer.
        Fill is the number of environments divided by ``max_batch``; padding is the fraction of
        padding rows.
        """
        queued, live = self._queue.counts()
        return {
            **self._statistics.read(),
            "service/queued": queued,
            "service/live_clients": live,
            "service/compiled_sizes": len(self._joiner.sizes_seen),
        }

    @property
    def sizes_seen(self) -> tuple[int, ...]:
        """The batch sizes used so far; each was compiled once."""
        return tuple(sorted(self._joiner.sizes_seen))

    def close(self, timeout: float = 30.0) -> None:
        """Makes every waiting call raise, and ends the worker after the current batch.

        Raises:
          TimeoutError: the current batch does not end within ``timeout`` seconds.
        """
        self._ended.set()
        self._queue.close()
        self._watch.join()
        self._worker.join(timeout)
        if self._worker.is_alive():
            raise TimeoutError(
                f"InferenceService.close: the present batch must end within {timeout:g} s; it "
                "still runs."
            )

    def _learn_spec(self, timestep: TimeStep) -> TimestepSpec:
        """Takes the spec from the first request, for agents without an ``obs_spec``."""
        with self._acting:
            self._timestep_spec = self._timestep_spec or TimestepSpec(timestep)
            return self._timestep_spec

    def _checked(self, env_ids: np.ndarray | None, size: int) -> np.ndarray:
        """Returns the ids as int32 ``[size]``; raises ValueError if they are malformed."""
        ids = self._all_ids if env_ids is None else np.asarray(env_ids)
        where = "InferenceService.inference"
        if ids.shape != (size,) or size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{where}: env_ids must be integers, one for each of the {size} rows and at least "
                f"one; got {ids.dtype} {list(ids.shape)}."
            )
        grows = bool((ids[1:] > ids[:-1]).all())
        low, high = (ids[0], ids[-1]) if grows else (ids.min(), ids.max())
        if low < 0 or high >= self._num_envs or not (grows or len(np.unique(ids)) == size):
            raise ValueError(
                f"{where}: env_ids must be distinct and in [0, {self._num_envs}); got {ids}."
            )
        return ids.astype(np.int32, copy=False)

    def _work(self) -> None:
        """The loop of the worker thread: computes batches until the service is closed."""
        try:
            while (taken := self._queue.take()) is not None:
                self._serve(taken)
        finally:
            self._queue.close()  # also after an error: calls would hang without the worker

    def _end_overdue(self) -> None:
        """The loop of the second thread: gives an error to requests that wait for too long."""
        wait = self._timeout
        while not self._ended.wait(wait):
            # The first batch of a size is compiled, which may take longer than any other batch.
            now = time.perf_counter()
            compiled_at = min(self._compiled_at, now)
            if compiled_at + self._timeout <= now:
                for request, reason in self._queue.overdue(now - self._timeout):
                    request.answer.set_exception(self._overdue(request, reason))
            since = min(max(self._queue.oldest(), compiled_at), now)
            wait = since + self._timeout - now

    def _overdue(self, request: Request, reason: str) -> TimeoutError:
        return TimeoutError(
            f"InferenceService.inference: an answer must come within {self._timeout:g} s; the "
            f"request of client {request.client.name!r} {reason}. Raise timeout_s, or find the "
            "cause."
        )

    def _serve(self, taken: Taken) -> None:
        start = time.perf_counter()
        try:
            env_ids, answer = self._act(taken)
        except BaseException as raised:  # raised in the callers; the service continues
            error = raised
            text = (
                f"InferenceService: acting failed for a batch of {len(taken.requests)} requests.\n"
                f"{traceback.format_exc()}"
            )

            def make_error() -> Exception:
                told = InferenceError(text)
                told.__cause__ = error
                return told

            self._queue.settle(None, make_error)
            if not isinstance(error, Exception):
                raise
        else:
            self._statistics.add(taken.requests, len(env_ids), start)
            self._queue.settle(answer)

    def _act(self, taken: Taken) -> tuple[np.ndarray, Inference]:
        assert self._timestep_spec is not None  # set before the first request
        with self._acting:
            if taken.to_reset is not None:
                self._inferencer.reset(taken.to_reset)
            before = self._inferencer.save()
            try:
                env_ids, timestep = self._joiner.join(taken.requests, self._timestep_spec)
                kind = len(env_ids), env_ids[-1] == self._num_envs  # padded or not
                if kind in self._compiled:
                    return env_ids, self._inferencer.inference(env_ids, timestep)
                return env_ids, self._compile(kind, env_ids, timestep)
            except BaseException:
                # JAX may report a failure only after it has returned the arrays, including the
                # table.
                self._inferencer.load(before)
                raise

    def _compile(
        self, kind: tuple[int, bool], env_ids: np.ndarray, timestep: TimeStep
    ) -> Inference:
        """Acts on the first batch of a kind, which compiles it; no request times out meanwhile."""
        self._compiled_at = math.inf
        try:
            answer = self._inferencer.inference(env_ids, timestep)
            self._compiled.add(kind)
            return answer
        finally:
            self._compiled_at = time.perf_counter()


class _Statistics:
    """Counters, and a sliding window over the latest requests and batches."""

    def __init__(self, full: int) -> None:
        self._lock = threading.Lock()
        self._full = full
        self._batches = self._requests = self._envs = 0
        self._fills: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._paddings: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._queued: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._latencies: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def add(self, requests: list[Request], size: int, start: float) -> None:
        """Adds a batch of ``size`` rows that began at ``start`` and has just ended."""
        end = time.perf_counter()
        envs = sum(len(request.env_ids) for request in requests)
        with self._lock:
            self._batches += 1
            self._requests += len(requests)
            self._envs += envs
            self._fills.append(envs / self._full)
            self._paddings.append(1 - envs / size)
            self._queued.extend(start - request.arrived for request in requests)
            self._latencies.extend(end - request.arrived for request in requests)

    def read(self) -> dict[str, float]:
        with self._lock:
            stats: dict[str, float] = {
                "service/batches": self._batches,
                "service/requests": self._requests,
                "service/envs": self._envs,
            }
            windows = [
                np.array(window or [0.0])
                for window in (self._fills, self._paddings, self._queued, self._latencies)
            ]
        fills, paddings, queued, latencies = windows
        stats["service/fill_mean"] = float(fills.mean())
        stats["service/fill_p50"] = float(np.percentile(fills, 50))
        stats["service/padding_mean"] = float(paddings.mean())
        for name, seconds in (("queue_ms", queued), ("latency_ms", latencies)):
            for percent, value in zip((50, 99), np.percentile(seconds, (50, 99)), strict=True):
                stats[f"service/{name}_p{percent}"] = 1e3 * float(value)
        return stats
