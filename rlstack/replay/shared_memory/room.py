"""Whether there is room for a step in a shared replay buffer."""

from __future__ import annotations

import numpy as np

from rlstack.replay.base import ReplayConfig, ReplayTimeoutError
from rlstack.replay.shared_memory.steps import ASKED, INSERTS, SAMPLES, SIZE, STARVED, Counters
from rlstack.replay.sizes import layout

Ids = slice | np.ndarray


class Room:
    """Reads the counters that the reader puts, for one writer."""

    def __init__(self, cfg: ReplayConfig, num_envs: int, numbers: Counters, where: str):
        self._cfg, self._numbers, self._where = cfg, numbers, where
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._steps_held = layout(cfg, num_envs).items * self._period + self._length
        self._free = 0  # environments ``_free_of`` may come as far as this, at least
        self._free_of: slice | None = None

    def obstacle(self, ids: Ids, steps: int | np.ndarray) -> str:
        """Returns why the next step of some environments may not be added now, or nothing.

        full: an environment has all the items waiting that fit.
        queue: all environments together have. Less than a batch is never too much, since the
          reader could not make room.
        ahead: the reader has yet to sample what samples_per_insert asks for. With
          ``d = samples_per_insert * (inserts - min_size) - samples`` a batch of B must wait while
          ``d < B - tolerance``, and a writer while ``d > max(tolerance, B - tolerance)``: never
          both. B is what was asked for, if that is more than the config's. A reader that waits for
          another reason (STARVED), such as that all items were sampled often enough and left, is
          given a batch beyond the ratio each time that it looks.

        Args:
          ids: the environments.
          steps: at which each is, [n]; or all, when they are neighbours.
        """
        cfg, head = self._cfg, self._numbers.head
        if cfg.sampler == "fifo":
            if self._is_full(ids, steps):
                return "full"
            coming = self._coming(ids, steps)
            if coming:
                waiting = self._uncounted() + int(head[SIZE])
                if waiting >= cfg.batch_size and waiting + coming > cfg.max_size:
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
        if ids != self._free_of or steps >= self._free:  # it only ever grows
            self._free_of, self._free = ids, int(released[ids].min()) + self._steps_held
        return steps >= self._free

    def _coming(self, ids: Ids, steps: int | np.ndarray) -> int:
        """Returns how many items would end with these steps, were none broken."""
        starts = steps - self._length
        if isinstance(starts, np.ndarray):
            return int(np.count_nonzero((starts >= 0) & (starts % self._period == 0)))
        assert isinstance(ids, slice)
        return 0 if starts < 0 or starts % self._period else ids.stop - ids.start

    def _uncounted(self) -> int:
        """Returns how many items writers have completed that the reader has not counted.

        The reader puts its counts before ``seen``, so that what is read in between is counted
        twice rather than not at all.
        """
        seen, steps = self._numbers.seen, self._numbers.steps
        ended = [np.maximum(0, (n - 1 - self._length) // self._period + 1) for n in (steps, seen)]
        return int((ended[0] - ended[1]).sum())

    def timed_out(self, obstacle: str) -> ReplayTimeoutError:
        """Returns the error of a writer that waited for too long."""
        rule = {
            "full": "an environment's items must be fewer than max_size_per_env",
            "queue": f"the items waiting must be fewer than max_size ({self._cfg.max_size})",
            "ahead": "inserts must not be ahead of samples by more than samples_per_insert allows",
        }[obstacle]
        return ReplayTimeoutError(
            f"{self._where}.add: {rule}, for a step to be added; nothing was sampled in time. Is "
            "the learner alive, and fast enough? Raise timeout_seconds, or that limit."
        )
