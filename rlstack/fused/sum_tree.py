"""Sampling in proportion to mass, in arrays; see `rlstack.replay.prioritized.SumTree`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstack.types import Array, PRNGKey

_FAN = 16  # children of a node
_TOP = 2048  # largest top level; a draw computes its cumulative sum


class SumTree:
    """Non-negative masses; the methods are pure, and take the levels of the tree.

    Sums are recomputed from the children and never adjusted by differences, so rounding errors do
    not accumulate.
    """

    def __init__(self, size: int) -> None:
        """Stores the shape of a tree with ``size`` leaves."""
        self._sizes = []
        while True:
            self._sizes.append(-(-size // _FAN) * _FAN)
            if size <= _TOP:
                break
            size = -(-size // _FAN)

    def empty(self) -> tuple[Array, ...]:
        """Returns the levels of a tree without masses, the leaves first."""
        return tuple(jnp.zeros(size) for size in self._sizes)

    def total(self, levels: tuple[Array, ...]) -> Array:
        """Returns the sum of all masses, [] float32."""
        return levels[-1].sum()

    def leaves(self, levels: tuple[Array, ...], cells: Array) -> Array:
        """Returns the masses of some leaves."""
        return levels[0][cells]

    def write(self, levels: tuple[Array, ...], cells: Array, masses: Array) -> tuple[Array, ...]:
        """Returns the levels after these leaves ``[n]`` got these masses ``[n]``."""
        changed, nodes = [jnp.asarray(levels[0]).at[cells].set(masses)], cells
        for level in levels[1:]:
            nodes = nodes // _FAN
            children = changed[-1].reshape(-1, _FAN)
            changed.append(jnp.asarray(level).at[nodes].set(children[nodes].sum(axis=1)))
        return tuple(changed)

    def draw(self, levels: tuple[Array, ...], rng_key: PRNGKey, count: int) -> Array:
        """Returns leaves, drawn with replacement, ``[count]`` int32."""
        ends = jnp.cumsum(levels[-1])
        points = jax.random.uniform(rng_key, (count,)) * ends[-1]
        points = jnp.minimum(points, jnp.nextafter(ends[-1], jnp.zeros(())))
        nodes = jnp.searchsorted(ends, points, side="right")
        points = points - jnp.where(nodes > 0, ends[nodes - 1], 0.0)
        for level in reversed(levels[:-1]):
            sums = jnp.cumsum(level.reshape(-1, _FAN)[nodes], axis=1)
            child = _interval(sums, points)
            before = jnp.take_along_axis(sums, jnp.maximum(child - 1, 0)[:, None], axis=1)[:, 0]
            points = points - jnp.where(child > 0, before, 0.0)
            nodes = nodes * _FAN + child
        return nodes.astype(jnp.int32)


def _interval(ends: Array, points: Array) -> Array:
    """Returns the interval ``[n]`` that each point is in.

    Args:
      ends: ``[n, k]``, the ends of the intervals, which may be empty.
      points: ``[n]``. Rounding may have moved one beyond the last end; it then belongs to the last
        interval that is not empty.
    """
    points = jnp.minimum(points, jnp.nextafter(ends[:, -1], jnp.zeros(())))
    return (ends <= points[:, None]).sum(axis=1)
