"""Stores the steps of all environments in few arrays.

A compiled loop writes a step and reads a batch of them in each iteration. On the CPU every array
that it touches costs microseconds, so the small parts of a step are one array of words.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.types import Array, PyTree

# Of a part that is packed. To copy a larger one costs more than an array of its own.
_MOST_WORDS = 32


class _Part(NamedTuple):
    """The place of one leaf of a step: words of the first array, or an array of its own."""

    words: tuple[int, int] | None  # (start, stop) in the first array
    dtype: Any
    shape: tuple[int, ...]  # shape for one environment


class _Layout(NamedTuple):
    """The layout of a packed step."""

    structure: jax.tree_util.PyTreeDef
    parts: tuple[_Part, ...]


@jax.tree_util.register_pytree_node_class
class PackedSteps:
    """Steps ``[rows, B, ...]``; a pytree of its arrays, which have these two axes as well."""

    def __init__(self, arrays: tuple[jax.Array, ...], layout: _Layout) -> None:
        """Use `zeros`."""
        self._arrays, self._layout = arrays, layout

    @classmethod
    def zeros(cls, rows: int, step: PyTree) -> PackedSteps:
        """Returns ``rows`` steps of zeros.

        Args:
          rows: number of steps.
          step: shapes and dtypes of one step, ``[B, ...]``.
        """
        layout = _layout(step)
        packed = jax.eval_shape(lambda step: _packed(layout, step), step)
        return cls(tuple(jnp.zeros((rows, *x.shape), x.dtype) for x in packed), layout)

    @classmethod
    def of(cls, steps: PyTree) -> PackedSteps:
        """Returns steps ``[rows, B, ...]`` packed."""
        layout = _layout(jax.tree.map(lambda x: x[0], steps))
        arrays: Any = jax.vmap(lambda row: _packed(layout, row))(steps)
        return cls(tuple(arrays), layout)

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], _Layout]:
        """Returns the arrays, and the layout."""
        return self._arrays, self._layout

    @classmethod
    def tree_unflatten(cls, layout: _Layout, arrays: Any) -> PackedSteps:
        """Returns the steps with other arrays."""
        return cls(tuple(arrays), layout)

    def with_row(self, row: Array, step: PyTree) -> PackedSteps:
        """Returns the steps with another one, ``[B, ...]``, in a row."""
        packed = _packed(self._layout, step)
        pairs = zip(self._arrays, packed, strict=True)
        return PackedSteps(tuple(old.at[row].set(new) for old, new in pairs), self._layout)

    def replaced(self, index: tuple[Array, Array], leaves: list[Array | None]) -> PackedSteps:
        """Returns the steps with some leaves replaced at an index of both axes.

        Args:
          index: rows and columns, ``[n, k]``; those outside are left out.
          leaves: the leaves of a step in their order, ``[n, k, ...]``, None for those that stay.
        """
        arrays, number = list(self._arrays), int(any(part.words for part in self._layout.parts))
        where: Any
        for part, leaf in zip(self._layout.parts, leaves, strict=True):
            at = 0 if part.words else number
            number += part.words is None
            if leaf is None:
                continue
            new, where = jnp.asarray(leaf, part.dtype), index
            if part.words:
                words = jax.lax.bitcast_convert_type(new, jnp.uint32)
                new, where = words.reshape(*words.shape[:2], -1), (*index, slice(*part.words))
            arrays[at] = arrays[at].at[where].set(new, mode="drop")
        return PackedSteps(tuple(arrays), self._layout)

    def __getitem__(self, index: Any) -> Any:
        """Returns the steps at an index of the first axis, or of both axes of all arrays."""
        arrays = iter([array[index] for array in self._arrays])
        all_words = next(arrays) if any(part.words for part in self._layout.parts) else None
        leaves = []
        for words, dtype, shape in self._layout.parts:
            if words is None or all_words is None:
                leaves.append(next(arrays))
                continue
            leaf = all_words[..., slice(*words)].reshape(*all_words.shape[:-1], *shape)
            leaves.append(jax.lax.bitcast_convert_type(leaf, dtype))
        return self._layout.structure.unflatten(leaves)


def _layout(step: PyTree) -> _Layout:
    """Returns the layout of steps with the shapes and dtypes of one step, ``[B, ...]``."""
    leaves, structure = jax.tree.flatten(step)
    parts, end = [], 0
    for leaf in leaves:
        size, words = math.prod(leaf.shape[1:]), None
        if leaf.dtype.itemsize == 4 and size <= _MOST_WORDS:
            words = end, end + size
            end += size
        parts.append(_Part(words, leaf.dtype, leaf.shape[1:]))
    return _Layout(structure, tuple(parts))


def _packed(layout: _Layout, step: PyTree) -> list[Array]:
    words, others = [], []
    for leaf, part in zip(jax.tree.leaves(step), layout.parts, strict=True):
        if part.words is None:
            others.append(leaf)
        else:
            bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
            words.append(bits.reshape(len(leaf), -1))
    return [jnp.concatenate(words, -1), *others] if words else others
