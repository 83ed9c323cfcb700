"""Sampling in proportion to mass, in arrays; see `rlstack.replay.prioritized.SumTree`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstack.types import Array, PRNGKey

_FAN = 16  # children of a node
_TOP = 2048  # largest top level; a draw computes its cumulative sum
_TINY = 1e-28  # a smaller sum has no masses, or the factor 2^30 / sum would be infinite


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
        return self.find(levels, jax.random.bits(rng_key, (len(levels), count), jnp.uint32))

    def find(self, levels: tuple[Array, ...], bits: Array) -> Array:
        """Returns the leaves that random bits choose, ``[n]`` int32.

        Each level chooses by bits of its own. One point in ``[0, total)`` for all levels would have
        the 24 bits of float32: of a million equal leaves, some would be drawn 7 % too often.

        Args:
          levels: the levels of the tree, leaves first.
          bits: ``[levels, n]`` uint32, for the top level first.
        """
        ends = jnp.cumsum(_parts(levels[-1]))
        nodes = jnp.searchsorted(ends, _below(bits[0], ends[-1]), side="right")
        for level, own_bits in zip(reversed(levels[:-1]), bits[1:], strict=True):
            parts = _parts(level.reshape(-1, _FAN)[nodes])
            nodes = nodes * _FAN + _interval(parts, _below(own_bits, parts.sum(axis=1)))
        return nodes.astype(jnp.int32)


def _interval(parts: Array, points: Array) -> Array:
    """Returns which of the intervals of these lengths ``[n, k]`` each point is in, ``[n]``.

    XLA's cumulative sum would take three times as long on a CPU.
    """
    end, found = jnp.zeros_like(points), jnp.zeros_like(points)
    for i in range(parts.shape[1] - 1):
        end = end + parts[:, i]
        found = found + (end <= points)
    return found


def _parts(masses: Array) -> Array:
    """Returns masses ``[..., n]`` in units of 2^-30 of their sum, int32.

    Sums of integers have no rounding errors. What is lost is a share of less than 2^-30.
    """
    total = jnp.maximum(masses.sum(axis=-1, keepdims=True), _TINY)
    return (masses * (2.0**30 / total)).astype(jnp.int32)  # not uint32: processors take longer


def _below(bits: Array, end: Array) -> Array:
    return scaled(bits, end.astype(jnp.uint32)).astype(jnp.int32)


def scaled(bits: Array, end: Array, more_bits: Array | None = None) -> Array:
    """Returns integers in ``[0, end)``, as random as the bits: ``bits * end / 2^32``.

    A value has up to ``bits * end / 2^32 + 1`` of the bit patterns, so the probabilities of ``n``
    values differ by a factor of at most ``1 + n / 2^32``, or with more bits ``1 + n / 2^64``.

    Args:
      bits: uint32.
      end: uint32, broadcast to the shape of the bits.
      more_bits: uint32, those after ``bits``.
    """
    high, low = _product(bits, end)
    if more_bits is None:
        return high
    carry = low + _product(more_bits, end)[0] < low  # the sum is taken modulo 2^32
    return high + carry.astype(jnp.uint32)


def _product(x: Array, y: Array) -> tuple[Array, Array]:
    """Returns the upper and the lower 32 bits of the products of uint32; JAX has no uint64."""
    half = jnp.uint32(16)
    mask = jnp.uint32(0xFFFF)
    x_high, x_low, y_high, y_low = x >> half, x & mask, y >> half, y & mask
    cross, other = x_high * y_low, x_low * y_high
    carry = ((x_low * y_low) >> half) + (cross & mask) + (other & mask)
    high = x_high * y_high + (cross >> half) + (other >> half) + (carry >> half)
    return high, x * y
