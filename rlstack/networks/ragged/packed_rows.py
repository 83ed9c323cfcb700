"""Packs several environments into one row of attention.

The host assigns environments to rows by their number of entities, because the number of rows
determines the compiled shapes. The number of rows and their width are rounded up to the sizes of a
ladder, so that few shapes are compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.configs.entities import PackingMode
from rlstack.networks.ragged.blocks import TokenRows
from rlstack.networks.ragged.entity_layout import GLOBAL, EntityLayout, leading_shape, lengths
from rlstack.networks.ragged.packing import ladder, pack
from rlstack.types import PyTree

PACKING = "packing"  # the entry of an observation that holds its packing
# Packing costs gathers, and a compilation whenever the number of rows changes. It is faster if the
# rows take at most this fraction of a table with at least this number of slots.
_MAX_SHARE, _MIN_SLOTS = 0.7, 4096


def with_packing(layout: EntityLayout, mode: PackingMode, observation: PyTree) -> PyTree:
    """Adds a packing to an observation ``[B, ...]`` if ``mode`` asks for one; runs on the host.

    The packing is a dict of ``source``, int32 ``[R, L]``, the entity at each place of each row, as
    its index in the flat table ``[B * E]`` (B * E at padding), and of ``place``, int32 ``[B, E]``,
    the index of each entity in the flat rows ``[R * L]`` (0 where there is no entity).
    """
    (size,), capacity = leading_shape(observation), layout.num_tokens
    if mode == "never" or (mode == "auto" and size * capacity < _MIN_SLOTS):
        return observation
    counts = lengths(layout, observation)
    # The cost of attention grows with the width, so the longest environment determines it.
    width = min(ladder(int(counts.max(initial=1))), capacity)
    assigned = pack(counts, width)
    num_rows = ladder(max(assigned.num_rows, 1), 8)
    if mode == "auto" and num_rows * width > _MAX_SHARE * size * capacity:
        return observation
    place, present = _places(layout, observation, assigned.row * width + assigned.column)
    source = np.full(num_rows * width, size * capacity, np.int32)
    source[place[present]] = np.flatnonzero(present)
    return {
        **observation,
        PACKING: {"source": source.reshape((num_rows, width)), "place": place},
    }


def _places(
    layout: EntityLayout, observation: PyTree, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of each entity, ``[B, E]``, and whether the slot holds an entity.

    Args:
      layout: the layout of the observation.
      observation: ``[B, ...]``.
      first: int ``[B]``, the place of each environment's first entity.
    """
    present = np.concatenate(
        [
            np.ones((len(first), 1), bool)
            if kind.name == GLOBAL
            else np.arange(kind.capacity) < np.asarray(observation["count"][kind.name])[:, None]
            for kind in layout.types
        ],
        axis=1,
    )
    place = np.where(present, first[:, None] + np.cumsum(present, axis=1) - 1, 0)
    return place.astype(np.int32), present


def in_rows(
    function: Callable[[Array, TokenRows, PyTree], Array],
    table: Array,
    rows: TokenRows,
    extra: PyTree,
    packing: dict[str, Array] | None,
) -> Array:
    """Applies a function of rows to a table of tokens ``[B, E, D]``; returns ``[B, E, D]``.

    Args:
      function: ``(x [R, L, D], rows [R, L], extra [R, L, ...]) -> [R, L, D]``.
      table: tokens by environment and slot.
      rows: the rows of the table, where each row is one environment, ``[B, E]``.
      extra: pytree of other arrays per token, ``[B, E, ...]``.
      packing: made by `with_packing`; None applies the function to the rows of the table.
    """
    if packing is None:
        return function(table, rows, extra)
    source, place = packing["source"], packing["place"]
    num_tokens = table.shape[0] * table.shape[1]

    def gathered(x: Array) -> Array:
        return _read(x.reshape((num_tokens, *x.shape[2:])), source)

    visible, extra = jax.tree.map(gathered, (rows.visible, extra))
    # An index that is out of range marks an empty place of a row or an empty slot of the table.
    target = jnp.where(rows.environment >= 0, place, source.size)
    x = _permuted(table.reshape((num_tokens, -1)), source, target)
    environment = jnp.where(source < num_tokens, source // table.shape[1], -1)
    result = function(x, TokenRows(environment, visible), extra)
    return _permuted(result.reshape((source.size, -1)), target, source)


def _read(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="clip")


@jax.custom_vjp
def _permuted(x: Array, index: Array, inverse: Array) -> Array:
    """Returns the rows of ``x`` ``[N, D]`` at ``index``; undefined where it is out of range.

    The gradient is read at ``inverse``. JAX's own gradient would be a scatter, which is slow on the
    CPU and makes XLA's older CPU runtime abort.
    """
    del inverse
    return _read(x, index)


def _permuted_forward(
    x: Array, index: Array, inverse: Array
) -> tuple[Array, tuple[tuple[int, ...], int, Array]]:
    return _read(x, index), (x.shape, index.size, inverse)


def _permuted_backward(
    residuals: tuple[tuple[int, ...], int, Array], gradient: Array
) -> tuple[Array, None, None]:
    shape, size, inverse = residuals
    flat = gradient.reshape((size, -1))
    back = jnp.where((inverse < size)[..., None], _read(flat, inverse), 0.0)
    return back.reshape(shape), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)
