"""Packs several small arrays into one, so that they leave the device together.

Each result of a jitted call costs microseconds of its own, in the runtime and in the conversion to
numpy. For a small network this is a large part of acting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import Array, PyTree


class _Leaf(NamedTuple):
    """The place of a leaf: a part of the array of words, or an array of its own."""

    words: slice | None
    dtype: np.dtype
    shape: tuple[int, ...]


class Packing:
    """Packs the results of one jitted function, and unpacks them on the host; no bit changes.

    Leaves of 32 bits become one array of words, and others stay as they are.
    """

    def __init__(self) -> None:
        self._layouts: dict[int, tuple[jax.tree_util.PyTreeDef, list[_Leaf], bool]] = {}

    def pack(self, batch_size: int, tree: PyTree) -> list[jax.Array]:
        """Returns the arrays that stand for ``tree``; called while the function is traced.

        Args:
          batch_size: a number by which `unpack` finds the shapes of the leaves again.
          tree: arrays.
        """
        leaves, structure = jax.tree_util.tree_flatten(tree)
        layout, parts, others, end = [], [], [], 0
        for leaf in map(jnp.asarray, leaves):
            words = None
            if leaf.dtype.itemsize == 4:
                words = slice(end, end + leaf.size)
                end = words.stop
                parts.append(jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1))
            else:
                others.append(leaf)
            layout.append(_Leaf(words, np.dtype(leaf.dtype), leaf.shape))
        self._layouts[batch_size] = structure, layout, bool(parts)
        return [jnp.concatenate(parts), *others] if parts else others

    def unpack(self, batch_size: int, packed: Sequence[Array]) -> PyTree:
        """Returns the tree as read-only numpy arrays, views of one array where possible."""
        structure, layout, has_words = self._layouts[batch_size]
        arrays = iter([np.asarray(array) for array in packed])
        all_words = next(arrays) if has_words else None
        leaves = []
        for words, dtype, shape in layout:
            if words is None or all_words is None:
                leaves.append(next(arrays))
            else:
                leaf = all_words[words].view(dtype)
                leaves.append(leaf if leaf.shape == shape else leaf.reshape(shape))
        return structure.unflatten(leaves)
