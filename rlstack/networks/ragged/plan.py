"""Rows of attention that several environments share.

A plan is made on the host, from how many entities each environment has: how many rows there are
decides the shapes of what is compiled. Rows and their width are rungs of a ladder, so that there
are few shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.networks.packing import ladder, pack
from rlstack.networks.ragged.config import Packing
from rlstack.networks.ragged.layout import GLOBAL, Layout, leading_shape, lengths
from rlstack.networks.ragged.trunk import Rows
from rlstack.types import PyTree

PACKING = "packing"  # the entry of an observation that holds its plan
# Rows must shrink to this share of a table of at least so many slots for a plan to pay for its
# gathers and for what is compiled anew when the number of rows changes.
_WORTH, _LEAST = 0.7, 4096


def laid_out(layout: Layout, packing: Packing, observation: PyTree) -> PyTree:
    """Returns the observation with a plan, where there is to be one; on the host.

    The plan is ``{"source", "place"}``: int32 ``[R, L]``, the entity at each place of each row, as
    its place in the flat table ``[B * E]``, B * E at padding; and int32 ``[B, E]``, the place of
    each entity in the flat rows, 0 where there is none.
    """
    (size,), capacity = leading_shape(observation), layout.num_tokens
    if packing == "never" or (packing == "auto" and size * capacity < _LEAST):
        return observation
    counts = lengths(layout, observation)
    # Attention's cost goes with the width, so the longest sets it.
    width = min(ladder(int(counts.max(initial=1))), capacity)
    packed = pack(counts, width)
    num_rows = ladder(max(packed.num_rows, 1), 8)
    if packing == "auto" and num_rows * width > _WORTH * size * capacity:
        return observation
    place, there = _places(layout, observation, packed.row * width + packed.column)
    source = np.full(num_rows * width, size * capacity, np.int32)
    source[place[there]] = np.flatnonzero(there)
    return {
        **observation,
        PACKING: {"source": source.reshape((num_rows, width)), "place": place},
    }


def _places(layout: Layout, observation: PyTree, first: np.ndarray) -> tuple[np.ndarray, ...]:
    """The place of each entity, ``[B, E]``, and whether there is one; ``first`` is ``[B]``."""
    there = np.concatenate(
        [
            np.ones((len(first), 1), bool)
            if kind.name == GLOBAL
            else np.arange(kind.capacity) < np.asarray(observation["count"][kind.name])[:, None]
            for kind in layout.types
        ],
        axis=1,
    )
    place = np.where(there, first[:, None] + np.cumsum(there, axis=1) - 1, 0)
    return place.astype(np.int32), there


def in_rows(
    function: Callable[[Array, Rows, PyTree], Array],
    table: Array,
    rows: Rows,
    more: PyTree,
    plan: Any,
) -> Array:
    """Applies a function of rows to a table of tokens ``[B, E, D]``.

    Args:
      function: ``(x [R, L, D], rows [R, L], more [R, L, ...]) -> [R, L, D]``.
      table: tokens by environment and slot.
      rows: the same, each row an environment.
      more: what else belongs to each token, ``[B, E, ...]``.
      plan: as `laid_out` makes it, or None to take the table's rows.
    """
    if plan is None:
        return function(table, rows, more)
    source, place = plan["source"], plan["place"]
    num_tokens = table.shape[0] * table.shape[1]

    def gathered(x: Array) -> Array:
        return _moved(x.reshape((num_tokens, *x.shape[2:])), source)

    visible, more = jax.tree.map(gathered, (rows.visible, more))
    # Where a place or a slot is empty, the other's number is out of range.
    there = jnp.where(rows.environment >= 0, place, source.size)
    x = _permuted(table.reshape((num_tokens, -1)), source, there)
    environment = jnp.where(source < num_tokens, source // table.shape[1], -1)
    result = function(x, Rows(environment, visible), more)
    return _permuted(result.reshape((source.size, -1)), there, source)


def _moved(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="clip")


@jax.custom_vjp
def _permuted(x: Array, index: Array, inverse: Array) -> Array:
    """Returns rows ``[N, D]`` at ``index``; those out of range hold what nobody may use.

    The gradient is read at ``inverse`` where JAX would scatter it, which is slow on the CPU, and
    which XLA's older runtime for it aborts on.
    """
    del inverse
    return _moved(x, index)


def _permuted_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, tuple]:
    return _moved(x, index), (x.shape, index.size, inverse)


def _permuted_backward(kept: tuple, gradient: Array) -> tuple:
    shape, size, inverse = kept
    flat = gradient.reshape((size, -1))
    back = jnp.where((inverse < size)[..., None], _moved(flat, inverse), 0.0)
    return back.reshape(shape), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)
