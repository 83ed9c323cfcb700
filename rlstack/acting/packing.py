"""Packs several small arrays into one, so that they reach or leave the device together.

Each argument and each result of a jitted call costs microseconds of its own, in the runtime and in
the conversion from or to numpy, and on an accelerator a transfer. For a small network this is a
large part of acting. `OnHost` copies params from an accelerator to actors on the CPU like this, in
one transfer per version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import Array, Params, PyTree

# Bytes of the largest argument that is packed: to copy a larger one takes longer than a transfer.
_LARGEST = 2**16


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


class ArgumentLayout(NamedTuple):
    """The layout of packed arguments. It is hashable: a static argument of `jax.jit`."""

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[tuple[np.dtype, tuple[int, ...]], ...]

    def unpack(self, packed: Sequence[Array]) -> PyTree:
        """Returns the tree that was packed, in a function that JAX traces."""
        arrays, leaves, end = list(packed), [], 0
        sizes = [math.prod(shape) if _is_packed(x, shape) else 0 for x, shape in self.leaves]
        words = arrays.pop(0) if any(sizes) else None
        for (dtype, shape), size in zip(self.leaves, sizes, strict=True):
            if words is None or not size:
                leaves.append(arrays.pop(0))
            else:
                leaves.append(words[end : end + size].view(dtype).reshape(shape))
                end += size
        return self.structure.unflatten(leaves)


def pack_arguments(tree: PyTree) -> tuple[ArgumentLayout, list[np.ndarray]]:
    """Packs the arguments of a jitted function on the host; no bit changes.

    Leaves of 32 bits become one array of words. Large ones and others, such as images in bytes,
    stay as they are.

    Args:
      tree: numpy arrays.

    Returns:
      What unpacks them, and the arrays that stand for them.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    words, others, layout = [], [], []
    for x in leaves:
        if _is_packed(x.dtype, x.shape):
            words.append(x.reshape(-1).view(np.uint32))
        else:
            others.append(x)
        layout.append((x.dtype, x.shape))
    arrays = [np.concatenate(words), *others] if words else others
    return ArgumentLayout(structure, tuple(layout)), arrays


class OnHost:
    """Copies params to the host in one array, instead of one for each layer.

    Each transfer from an accelerator waits tens of microseconds, however small it is, and an
    actor-critic has a dozen arrays. Params on a CPU stay where they are: numpy reads their memory.
    One thread at a time may call it.

    Attributes:
      transfers: number of arrays copied so far.
      transferred_bytes: number of bytes of these arrays.
    """

    def __init__(self, *, from_cpu: bool = False) -> None:
        """Prepares to copy params.

        Args:
          from_cpu: whether to copy params that are on a CPU, too. It shows on a CPU what happens
            with an accelerator.
        """
        self._from_cpu = from_cpu
        self._packing = Packing()
        self._pack = jax.jit(lambda params: self._packing.pack(0, params))
        self.transfers = self.transferred_bytes = 0

    def __call__(self, params: Params) -> Params:
        """Returns the params as numpy arrays or, if they are on a CPU, as they are."""
        if not (self._from_cpu or any(map(_is_remote, jax.tree.leaves(params)))):
            return params
        packed = self._pack(params)
        arrays: list[np.ndarray] = jax.device_get(packed)  # starts all copies, then waits
        self.transfers += len(arrays)
        self.transferred_bytes += sum(array.nbytes for array in arrays)
        return self._packing.unpack(0, arrays)


def _is_packed(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    return dtype.itemsize == 4 and 0 < 4 * math.prod(shape) <= _LARGEST


def _is_remote(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and any(d.platform != "cpu" for d in leaf.devices())
