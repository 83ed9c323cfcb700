"""Packs the arrays of a batch into at most two, so that they reach devices together.

Each array that moves costs tens of microseconds of its own, and each collective more, however small
it is. So a share of a batch is packed on the host into an array of words (leaves of 32 bits) and
one of bytes (all others), and unpacked where it is computed with. No bit changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import Array, PyTree


class _Leaf(NamedTuple):
    """One leaf of a share."""

    shape: tuple[int, ...]
    dtype: np.dtype
    rows: int  # the axis along which the shares of all devices are joined

    @property
    def is_words(self) -> bool:
        return self.dtype.itemsize == 4

    @property
    def size(self) -> int:
        """The length in words or in bytes."""
        return math.prod(self.shape) * (1 if self.is_words else self.dtype.itemsize)


class Layout(NamedTuple):
    """The layout of a packed share. It is hashable, so it can be a static argument of `jax.jit`."""

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[_Leaf, ...]

    @classmethod
    def of(cls, tree: PyTree, rows: PyTree) -> Layout:
        """Returns the layout of a share.

        Args:
          tree: arrays.
          rows: the axis of the rows of each leaf.
        """
        leaves, structure = jax.tree.flatten(tree)
        dtypes = [np.dtype(jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves]
        axes = jax.tree.leaves(rows)
        described = zip(leaves, dtypes, axes, strict=True)
        return cls(structure, tuple(_Leaf(x.shape, dtype, axis) for x, dtype, axis in described))

    @property
    def nbytes(self) -> int:
        """The size of a share in bytes."""
        return sum(leaf.size * (4 if leaf.is_words else 1) for leaf in self.leaves)

    def pack(self, tree: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """Returns new arrays of words ``[1, n]`` and bytes ``[1, m]`` with a share's values."""
        words, octets = self.empty(1)
        leaves = self.structure.flatten_up_to(tree)
        for target, x in zip(self.views(words[0], octets[0]), leaves, strict=True):
            target[...] = x
        return words, octets

    def empty(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns arrays for the words ``[count, n]`` and bytes ``[count, m]`` of some shares."""
        sizes = {words: sum(x.size for x in self.leaves if x.is_words == words) for words in (1, 0)}
        return np.empty((count, sizes[1]), np.uint32), np.empty((count, sizes[0]), np.uint8)

    def views(self, words: np.ndarray, octets: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of a share as views of its words ``[n]`` and bytes ``[m]``."""
        ends, found = {True: 0, False: 0}, []
        for leaf in self.leaves:
            begin = ends[leaf.is_words]
            ends[leaf.is_words] = end = begin + leaf.size
            part = (words if leaf.is_words else octets)[begin:end]
            found.append(part.view(leaf.dtype).reshape(leaf.shape))
        return found

    def unpack(self, words: Array, octets: Array) -> PyTree:
        """Returns the joined shares, in a function that JAX traces.

        Args:
          words: the words of each share, ``[N, n]`` uint32.
          octets: the bytes of each share, ``[N, m]`` uint8.
        """
        ends, found = {True: 0, False: 0}, []
        for leaf in self.leaves:
            begin = ends[leaf.is_words]
            ends[leaf.is_words] = end = begin + leaf.size
            packed = (words if leaf.is_words else octets)[:, begin:end]
            found.append(_joined(leaf, packed))
        return self.structure.unflatten(found)


def _joined(leaf: _Leaf, packed: Array) -> jax.Array:
    """Returns a leaf of all shares, side by side along its axis of rows."""
    count = packed.shape[0]
    if leaf.dtype == np.bool_:
        x = packed != 0
    elif leaf.is_words or leaf.dtype.itemsize == 1:
        x = jax.lax.bitcast_convert_type(packed, leaf.dtype)
    else:
        x = packed.reshape((count, -1, leaf.dtype.itemsize))
        x = jax.lax.bitcast_convert_type(x, leaf.dtype)
    x = jnp.moveaxis(x.reshape((count, *leaf.shape)), 0, leaf.rows)
    before, after = leaf.shape[: leaf.rows], leaf.shape[leaf.rows + 1 :]
    return x.reshape((*before, count * leaf.shape[leaf.rows], *after))


def columns(tree: PyTree, rows: PyTree, parts: int) -> Sequence[PyTree]:
    """Divides a tree of numpy arrays into equal parts, without copies.

    Args:
      tree: arrays.
      rows: the axis along which each leaf is divided, a tree.
      parts: number of parts.
    """
    if parts == 1:
        return [tree]
    divided = jax.tree.map(lambda x, axis: np.split(np.asarray(x), parts, axis), tree, rows)
    return [
        jax.tree.map(lambda x, i=i: x[i], divided, is_leaf=lambda x: isinstance(x, list))
        for i in range(parts)
    ]
