"""Sampling in proportion to priority (Schaul et al. 2016, https://arxiv.org/abs/1511.05952)."""

from __future__ import annotations

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.samplers import Cells, Uniform
from rlstack.types import PyTree

PRIORITY_FLOOR = 1e-6  # items with error 0 can still be sampled (Schaul et al. 2016, section 3.3)

_FAN = 16  # children of a node; together they fill two cache lines
_TOP = 4096  # largest top level; a draw computes its cumulative sum


def importance_weights(cfg: ReplayConfig, relative_probs: np.ndarray, drawn: int) -> np.ndarray:
    """Returns ``(N P(i))^-beta``, divided by the largest of the batch, [B] float32.

    Args:
      cfg: the rules of the table, which include beta.
      relative_probs: N * P(i), the probability of each item relative to uniform sampling, [B].
      drawn: number of items drawn before these, for the annealing of beta.
    """
    beta, until = cfg.importance_exponent, cfg.importance_anneal_samples
    if until:
        beta += min(1.0, drawn / until) * (cfg.importance_exponent_final - beta)
    weights = relative_probs**-beta
    return (weights / weights.max()).astype(np.float32)


class SumTree:
    """Non-negative masses; changes many at a time, and samples many in proportion to mass.

    Sums are always recomputed from the children and never adjusted by differences, so that rounding
    errors do not accumulate.
    """

    def __init__(self, size: int):
        self._levels = []  # masses, padded to a multiple of `_FAN`; then sums of children
        while True:
            self._levels.append(np.zeros(-(-size // _FAN) * _FAN))
            if size <= _TOP:
                break
            size = -(-size // _FAN)
        self.leaves = self._levels[0]  # write here, then call `update`

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._levels[-1].sum())

    def update(self, changed: np.ndarray | None) -> None:
        """Recomputes the sums after leaves ``changed`` (None: all) were written."""
        nodes = changed
        for below, level in zip(self._levels, self._levels[1:]):  # noqa: B905
            children = below.reshape(-1, _FAN)
            if nodes is None:
                level[: len(children)] = children.sum(1)
            else:
                nodes = np.unique(nodes // _FAN)
                level[nodes] = children[nodes].sum(1)

    def find(self, points: np.ndarray) -> np.ndarray:
        """Returns, for each point in ``[0, total)``, the leaf with the interval around it, [n]."""
        ends = self._levels[-1].cumsum()
        points = np.minimum(points, np.nextafter(ends[-1], 0))
        nodes = ends.searchsorted(points, side="right")
        points = points - np.where(nodes > 0, ends[nodes - 1], 0)
        rows = np.arange(len(points))
        for level in reversed(self._levels[:-1]):
            sums = level.reshape(-1, _FAN)[nodes].cumsum(1)
            # Rounding may move a point just beyond the end; it belongs to the last non-zero mass.
            points = np.minimum(points, np.nextafter(sums[:, -1], 0))
            child = (sums <= points[:, None]).sum(1)
            points = points - np.where(child > 0, sums[rows, child - 1], 0)
            nodes = nodes * _FAN + child
        return nodes


class Prioritized(Uniform):
    """Samples items with replacement, with probability ``p_i^alpha / sum_j p_j^alpha``.

    A new item gets the largest priority set so far. Importance weights are
    ``(N P(i))^-beta``, divided by the largest of the batch (equation 1 and algorithm 1).
    """

    def __init__(self, cfg: ReplayConfig, cells: int, seed: int):
        super().__init__(cfg, cells, seed)
        self._tree = SumTree(cells)
        self._largest = 1.0
        self._drawn = 0
        self._changed: list[np.ndarray] = []  # leaves written since the last `update` of the tree
        self._num_changed = 0

    def insert(self, cells: Cells, keys: np.ndarray, valid: np.ndarray | None) -> int:
        """Puts items into their cells with the largest priority so far."""
        added = super().insert(cells, keys, valid)
        mass = self._largest**self._cfg.priority_exponent
        where = np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells
        self._set(where, np.full(len(keys), mass) if valid is None else valid * mass)
        return added

    def remove(self, cells: np.ndarray) -> None:
        """Empties distinct, filled cells."""
        super().remove(cells)
        self._set(cells, np.zeros(len(cells)))

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of items still held; for equal keys, the last one counts."""
        held = self.held(keys)
        keys, priorities = keys[held], np.maximum(priorities[held], PRIORITY_FLOOR)
        if keys.size:
            self._largest = max(self._largest, float(priorities.max()))
            self._set(keys % len(self.key_at), priorities**self._cfg.priority_exponent)

    def _set(self, cells: np.ndarray, masses: np.ndarray) -> None:
        self._tree.leaves[cells] = masses
        self._changed.append(cells)
        self._num_changed += len(cells)
        if self._num_changed > len(self.key_at):  # many writes without a draw: recompute everything
            self._tree.update(None)
            self._changed, self._num_changed = [], 0

    def _choose(self, count: int) -> np.ndarray:
        if self._changed:
            self._tree.update(np.concatenate(self._changed))
            self._changed, self._num_changed = [], 0
        return self._tree.find(self.rng.random(count) * self._tree.total)

    def _relative_probs(self, cells: np.ndarray) -> np.ndarray:
        return self._tree.leaves[cells] * (self.size / self._tree.total)

    def weigh(self, relative_probs: np.ndarray) -> np.ndarray:
        """Returns importance weights, and counts the items for the annealing of beta."""
        weights = importance_weights(self._cfg, relative_probs, self._drawn)
        self._drawn += len(relative_probs)
        return weights

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        numbers = np.array([self._largest, self._drawn])
        masses = self._tree.leaves[: len(self.key_at)].copy()
        return super().save() | {"masses": masses, "prioritized": numbers}

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        super().load(tree)
        self._tree.leaves[: len(self.key_at)] = tree["masses"]
        self._tree.update(None)
        self._changed, self._num_changed = [], 0
        self._largest, self._drawn = float(tree["prioritized"][0]), int(tree["prioritized"][1])
