"""The fifo and uniform samplers, which choose the next items; see also ``prioritized``.

An item is identified by its key, ``(start // period) * num_envs + env_id``, which is never reused.
It is stored in cell ``key % cells``. So an environment's new item replaces its oldest one, and the
key in a cell shows whether an item is still held.
"""

from __future__ import annotations

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.types import PyTree

Cells = slice | np.ndarray


class Sampler:
    """Base of the samplers: holds the items."""

    def __init__(self, cfg: ReplayConfig, cells: int, seed: int):
        self._cfg = cfg
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self._limit = cfg.times_limit
        self.key_at = np.full(cells, -1, np.int64)  # key of the item in each cell, -1 for none
        self._times = np.zeros(cells if self._limit else 0, np.int32)
        self._high = 0  # cells from here on have never been used
        # The keys of the items inserted last, of which `newest_share` takes some.
        self._newest = np.full(round(cfg.newest_share * cfg.batch_size), -1, np.int64)
        self.size = 0
        self.dropped = 0  # items removed from a full fifo before they were sampled
        self.stale = 0  # items removed from a fifo because they were too old

    def insert(self, cells: Cells, keys: np.ndarray, valid: np.ndarray | None) -> int:
        """Puts items into their cells and replaces older ones.

        Args:
          cells: ``keys % len(key_at)``, as a slice if they are consecutive.
          keys: [n] int64.
          valid: [n] bool, the items to insert; the cells of the others become empty. None for all.

        Returns:
          The number of items inserted.
        """
        count, high = len(keys), self._high
        if isinstance(cells, slice):
            stop = cells.stop
            full = stop <= high and self.size == high  # all used cells hold an item
        else:
            stop, full = int(cells.max()) + 1, False
        lost = count if full else int(np.count_nonzero(self.key_at[cells] >= 0))
        if stop > high:
            self._high = stop
        added = count if valid is None else int(np.count_nonzero(valid))
        if valid is None or added == count:
            self.key_at[cells] = keys
        else:
            self.key_at[cells] = np.where(valid, keys, -1)
        if self._limit:
            self._times[cells] = 0
        self.size += added - lost
        if count := len(self._newest):
            later = keys if valid is None else keys[valid]
            self._newest = np.concatenate([self._newest, later])[-count:]
        return added

    def held(self, keys: np.ndarray) -> np.ndarray:
        """Returns whether the table still holds each of these items, [n] bool."""
        return self.key_at[keys % len(self.key_at)] == keys

    def remove(self, cells: np.ndarray) -> None:
        """Empties distinct, filled cells."""
        self.key_at[cells] = -1
        self.size -= len(cells)

    def ready(self, batch_size: int) -> bool:
        """Whether there are enough items for a batch."""
        raise NotImplementedError

    def draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Chooses items; call it only when ``ready``.

        Returns:
          Keys [B] int64, and N * P(i), the probability of each relative to uniform sampling, [B].
        """
        raise NotImplementedError

    def draw_batches(self, batch_size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the items of several batches, each as `draw` does.

        Returns:
          Keys and relative probabilities, [count, B].
        """
        drawn = [self.draw(batch_size) for _ in range(count)]
        return np.stack([keys for keys, _ in drawn]), np.stack([probs for _, probs in drawn])

    def weigh(self, relative_probs: np.ndarray) -> np.ndarray:
        """Returns the importance weights [B] float32 of a batch, from its N * P(i) [B]."""
        return relative_probs

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities; only prioritized sampling uses them."""

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        numbers = np.array([self._high, self.size, self.dropped, self.stale], np.int64)
        tree = {
            "key_at": self.key_at.copy(),
            "times": self._times.copy(),
            "numbers": numbers,
            "rng": _rng_words(self.rng),
        }
        return tree | ({"newest": self._newest.copy()} if len(self._newest) else {})

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        if tree["key_at"].shape != self.key_at.shape or tree["times"].shape != self._times.shape:
            raise ValueError(
                f"ReplayBuffer.load: this config has {len(self.key_at)} cells for items; got a "
                f"saved {len(tree['key_at'])}. Load into an equal config."
            )
        self.key_at, self._times = np.array(tree["key_at"]), np.array(tree["times"])
        self._high, self.size, self.dropped, self.stale = (int(n) for n in tree["numbers"])
        _set_rng(self.rng, tree["rng"])
        if len(self._newest):
            self._newest = np.array(tree["newest"])


class Fifo(Sampler):
    """Samples items in order of completion, each in ``max_times_sampled`` batches."""

    def __init__(self, cfg: ReplayConfig, cells: int, seed: int):
        super().__init__(cfg, cells, seed)
        self._queue = np.zeros(2 * cells, np.int64)  # keys; some items may have been removed
        self._head = self._tail = 0

    def insert(self, cells: Cells, keys: np.ndarray, valid: np.ndarray | None) -> int:
        """Appends items to the queue; drops the oldest ones beyond max_size."""
        before = self.size
        added = super().insert(cells, keys, valid)
        self.dropped += before + added - self.size
        keys = keys if valid is None else keys[valid]
        if self._tail + len(keys) > len(self._queue):
            queued = self.queued()
            self._head, self._tail = 0, len(queued)
            self._queue[: self._tail] = queued
        self._queue[self._tail : self._tail + len(keys)] = keys
        self._tail += len(keys)
        excess = self.size - self._cfg.max_size
        if excess > 0:
            self.remove(self.queued()[:excess] % len(self.key_at))
            self.dropped += excess
        return added

    def queued(self) -> np.ndarray:
        """Returns the keys of the items held, oldest first."""
        keys = self._queue[self._head : self._tail]
        if len(keys) != self.size:
            keys = keys[self.held(keys)]
            self._tail = self._head + len(keys)
            self._queue[self._head : self._tail] = keys
            keys = self._queue[self._head : self._tail]
        return keys

    def ready(self, batch_size: int) -> bool:
        """Whether a batch of items is queued."""
        return self.size >= batch_size

    def draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Takes the oldest items."""
        keys = self.queued()[:batch_size].copy()
        if self.take(keys):
            self._head += batch_size
        return keys, np.ones(batch_size, np.float32)

    def take(self, keys: np.ndarray) -> bool:
        """Counts one sample of each of these queued items; returns whether all were removed."""
        cells = keys % len(self.key_at)
        self._times[cells] += 1
        gone = self._times[cells] >= self._limit
        all_gone = bool(gone.all())
        self.remove(cells if all_gone else cells[gone])
        return all_gone

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        return super().save() | {"waiting": self.queued().copy()}

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        super().load(tree)
        self._head, self._tail = 0, len(tree["waiting"])
        self._queue[: self._tail] = tree["waiting"]


class Uniform(Sampler):
    """Samples items with replacement, all with equal probability."""

    def ready(self, batch_size: int) -> bool:
        """Whether there is an item and, with max_times_sampled, enough draws remain."""
        if not self._limit or not self.size:
            return self.size > 0
        left = (self._limit - self._times[: self._high])[self.key_at[: self._high] >= 0]
        return int(left.sum()) >= batch_size

    def draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws with replacement; an item is removed at its last allowed draw."""
        if not self._limit:
            cells = self._choose(batch_size)
            if len(self._newest):
                last = self._newest[::-1][: round(self._cfg.newest_share * batch_size)]
                last = last[(last >= 0) & self.held(last)]
                cells[: len(last)] = last % len(self.key_at)
            return self.key_at[cells], self._relative_probs(cells)
        # Drawing many items together and rejecting draws of removed items has the same distribution
        # as drawing one by one and removing items in between.
        keys, relative_probs, missing = [], [], batch_size
        while missing:
            cells = self._choose(missing)
            cells = cells[_occurrence(cells) < self._limit - self._times[cells]]
            keys.append(self.key_at[cells])
            relative_probs.append(self._relative_probs(cells))
            np.add.at(self._times, cells, 1)
            self.remove(np.unique(cells[self._times[cells] >= self._limit]))
            missing -= len(cells)
        return np.concatenate(keys), np.concatenate(relative_probs)

    def draw_batches(self, batch_size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws several batches at once, if draws are independent."""
        if len(self._newest):
            return super().draw_batches(batch_size, count)
        keys, relative_probs = self.draw(count * batch_size)
        return keys.reshape(count, -1), relative_probs.reshape(count, -1)

    def _choose(self, count: int) -> np.ndarray:
        """Draws cells that hold an item, [count]."""
        if self.size * 8 < self._high:  # rejection sampling would take long
            filled = np.flatnonzero(self.key_at[: self._high] >= 0)
            return filled[self.rng.integers(0, len(filled), count)]
        cells = self.rng.integers(0, self._high, count)
        if self.size < self._high:
            empty = np.flatnonzero(self.key_at[cells] < 0)
            while empty.size:
                cells[empty] = self.rng.integers(0, self._high, empty.size)
                empty = empty[self.key_at[cells[empty]] < 0]
        return cells

    def _relative_probs(self, cells: np.ndarray) -> np.ndarray:
        """Returns N * P(i), the probability of each cell relative to uniform sampling, [B]."""
        return np.ones(len(cells), np.float32)


def _occurrence(values: np.ndarray) -> np.ndarray:
    """Returns the number of equal values before each value."""
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    new_run = np.r_[True, sorted_values[1:] != sorted_values[:-1]]
    positions = np.arange(len(values))
    counts = np.empty(len(values), np.int64)
    counts[order] = positions - np.maximum.accumulate(np.where(new_run, positions, 0))
    return counts


_MASK = (1 << 64) - 1


def _rng_words(rng: np.random.Generator) -> np.ndarray:
    """Returns a PCG64 generator's state as words, [6] uint64."""
    outer = rng.bit_generator.state
    state, inc = outer["state"]["state"], outer["state"]["inc"]
    words = [state >> 64, state & _MASK, inc >> 64, inc & _MASK]
    return np.array([*words, outer["has_uint32"], outer["uinteger"]], np.uint64)


def _set_rng(rng: np.random.Generator, words: np.ndarray) -> None:
    """Restores what ``_rng_words`` returned."""
    high, low, inc_high, inc_low, has, value = (int(word) for word in words)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": has,
        "uinteger": value,
    }
