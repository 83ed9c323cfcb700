"""Waiting between the writers and the reader of a shared replay buffer."""

from __future__ import annotations

import time

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayTimeoutError
from rlstack.replay.memory import ring_shape
from rlstack.replay.shared_memory.steps import ASKED, INSERTS, SAMPLES, SIZE, STARVED, Counters

Ids = slice | np.ndarray

_SHORTEST, _LONGEST = 50e-6, 2e-3  # seconds of sleep between two checks


class PollingWait:
    """Waits for another process by sleeps of increasing length, until a deadline."""

    def __init__(self, timeout: float):
        self._start = time.monotonic()
        self._deadline = self._start + timeout
        self._pause = _SHORTEST

    def sleep(self) -> bool:
        """Sleeps and returns True; returns False without sleep when the deadline has passed."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._pause, left))
        self._pause = min(self._pause * 1.5, _LONGEST)
        return True

    @property
    def seconds(self) -> float:
        """Returns the seconds since the wait began."""
        return time.monotonic() - self._start


class InsertLimiter:
    """Decides whether a writer may add a step, from the counters that the reader publishes.

    Attributes:
      may_block: whether any rule of this config can block a writer.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, numbers: Counters, where: str):
        self._cfg, self._numbers, self._where = cfg, numbers, where
        self.may_block = cfg.sampler == "fifo" or cfg.samples_per_insert is not None
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._steps_held = ring_shape(cfg, num_envs).items * self._period + self._length
        self._free = 0  # `_free_of` may add steps at least up to this one
        self._free_of: slice | None = None

    def blocking_rule(self, ids: Ids, steps: int | np.ndarray) -> str:
        """Returns the name of the rule that blocks the next step of some environments, or "".

        full: an environment has its largest number of queued items.
        queue: all environments together have their largest number of queued items. Fewer items
          than a batch never block, because the reader could not make room.
        ahead: the reader has not yet sampled the number of items that samples_per_insert requires.
          With ``d = samples_per_insert * (inserts - min_size) - samples``, a batch of B items waits
          while ``d < B - tolerance``, and a writer while ``d > max(tolerance, B - tolerance)``:
          never both. B is the config's batch size, or the requested one if that is larger. If
          another rule blocks a reader (STARVED), for example because all items have been sampled
          max_times_sampled times and removed, writers may add one batch beyond the ratio each time
          the reader checks.

        Args:
          ids: the environments.
          steps: the next step of each, [n]; or one number for adjacent environments at the same
              step.
        """
        cfg, head = self._cfg, self._numbers.head
        if cfg.sampler == "fifo":
            if self._is_full(ids, steps):
                return "full"
            coming = self._coming(ids, steps)
            if coming:
                queued = self._uncounted() + int(head[SIZE])
                if queued >= cfg.batch_size and queued + coming > cfg.max_size:
                    return "queue"
        if cfg.samples_per_insert is not None:
            uncounted, batch = self._uncounted(), max(cfg.batch_size, int(head[ASKED]))
            inserts = uncounted + int(head[INSERTS])
            due = cfg.samples_per_insert * (inserts - cfg.min_size) - int(head[SAMPLES])
            if due > max(cfg.tolerance, batch - cfg.tolerance) and not (
                head[STARVED] and uncounted < batch
            ):
                return "ahead"
        return ""

    def _is_full(self, ids: Ids, steps: int | np.ndarray) -> bool:
        released = self._numbers.released
        if isinstance(steps, np.ndarray):
            return bool(np.count_nonzero(steps >= released[ids] + self._steps_held))
        assert isinstance(ids, slice)
        if ids != self._free_of or steps >= self._free:  # `released` only grows
            self._free_of, self._free = ids, int(released[ids].min()) + self._steps_held
        return steps >= self._free

    def _coming(self, ids: Ids, steps: int | np.ndarray) -> int:
        """Returns the number of items that end with these steps, including broken ones."""
        starts = steps - self._length
        if isinstance(starts, np.ndarray):
            return int(np.count_nonzero((starts >= 0) & (starts % self._period == 0)))
        assert isinstance(ids, slice)
        return 0 if starts < 0 or starts % self._period else ids.stop - ids.start

    def _uncounted(self) -> int:
        """Returns the number of items that writers have completed and the reader has not counted.

        The reader publishes its counts before ``seen``. So a read between the two counts an item
        twice, instead of not counting it.
        """
        seen, steps = self._numbers.seen, self._numbers.steps
        ended = [np.maximum(0, (n - 1 - self._length) // self._period + 1) for n in (steps, seen)]
        return int((ended[0] - ended[1]).sum())

    def timed_out(self, rule: str) -> ReplayTimeoutError:
        """Returns the error of a writer that a rule has blocked for too long."""
        text = {
            "full": "an environment's items must be fewer than max_size_per_env",
            "queue": f"the queued items must be fewer than max_size ({self._cfg.max_size})",
            "ahead": "inserts must not be ahead of samples by more than samples_per_insert allows",
        }[rule]
        return ReplayTimeoutError(
            f"{self._where}.add: {text} before a step is added; nothing was sampled in time. Check "
            "that the learner runs and is fast enough, or raise timeout_seconds or that limit."
        )
