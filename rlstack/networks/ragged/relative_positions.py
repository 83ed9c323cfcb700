"""Codes of where entities stand as seen from each other, for attention.

After the relative positional encoding of RogueNet (Winter 2023,
https://clemenswinter.com/2023/04/14/entity-based-reinforcement-learning/), itself after Shaw et al.
(2018), arXiv:1803.02155. Unlike there, grid cells are rounded along each axis before the axes are
combined, so positions need not be whole numbers; types without a position may be present; and
where two directions meet, interpolation goes round the circle.
"""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.networks.ragged.config import RelativePositionsConfig
from rlstack.networks.ragged.geometry import Poses, turned

_FEW = 64  # codes up to which a product with one-hot rows is quicker than reading them


class Buckets(NamedTuple):
    """Which codes a displacement takes, and how much of each; K is 1, or 2 or 4 interpolated."""

    code: Array  # [..., K] int32
    weight: Array  # [..., K] float32


class PairCodes(NamedTuple):
    """What joins attention, per pair of attending and attended entity; None for nothing."""

    key: Array | None  # [R, L, L, D] whose product with the query joins the logits
    value: Array | None  # [R, L, L, D] joins the result, weighted by attention


def displacements(cfg: RelativePositionsConfig, places: Poses) -> Array:
    """Returns displacements of attended from attending entities, ``[R, L, L, 2]``, in scales."""
    position, forward = places.position, places.direction
    difference = (position[:, :, None] - position[:, None, :]) / cfg.scale
    return turned(difference, forward[:, :, None]) if cfg.kind != "grid" else difference


def buckets(cfg: RelativePositionsConfig, displacement: Array) -> Buckets:
    """Returns the buckets of displacements ``[..., 2]``, in scales."""
    if cfg.kind == "grid":
        cell = jnp.floor(displacement + 0.5)  # along each axis, before they are combined
        extent = jnp.array(cfg.extent)
        cell = jnp.clip(cell, -extent, extent).astype(jnp.int32) + extent
        index = cell[..., 0] * (2 * cfg.extent[1] + 1) + cell[..., 1]
        return Buckets(index[..., None], jnp.ones((*index.shape, 1)))
    sector, ring = _sectors(cfg, displacement), _rings(cfg, displacement)
    if cfg.kind == "radial":
        return sector
    if cfg.kind == "distance":
        return ring
    index = sector.code[..., :, None] * cfg.rings + ring.code[..., None, :]
    weight = sector.weight[..., :, None] * ring.weight[..., None, :]
    shape = (*displacement.shape[:-1], -1)
    return Buckets(index.reshape(shape), weight.reshape(shape))


def _sectors(cfg: RelativePositionsConfig, displacement: Array) -> Buckets:
    """Directions, counterclockwise; the middle of the first is straight ahead."""
    angle = jnp.arctan2(displacement[..., 1], displacement[..., 0])
    return _along(angle * (cfg.sectors / (2 * np.pi)), cfg.interpolate, lambda i: i % cfg.sectors)


def _rings(cfg: RelativePositionsConfig, displacement: Array) -> Buckets:
    """Distances; the first ring is at 0 and the last at 1."""
    last = cfg.rings - 1
    place = jnp.clip(jnp.sqrt((displacement**2).sum(-1)), 0.0, 1.0) * last
    return _along(place, cfg.interpolate, lambda i: jnp.clip(i, 0, last))


def _along(place: Array, interpolate: bool, bound: object) -> Buckets:
    """Buckets at whole numbers of a line: the nearest, or the two that ``place`` lies between."""
    if not interpolate:
        index = bound(jnp.floor(place + 0.5).astype(jnp.int32))  # type: ignore[operator]
        return Buckets(index[..., None], jnp.ones((*index.shape, 1)))
    below = jnp.floor(place)
    share = place - below
    index = jnp.stack([below, below + 1], axis=-1).astype(jnp.int32)
    return Buckets(bound(index), jnp.stack([1 - share, share], axis=-1))  # type: ignore[operator]


def _sum(parts: list[Array]) -> Array | None:
    return sum(parts[1:], start=parts[0]) if parts else None


class RelativePositions(hk.Module):
    """Makes the codes of all pairs, once for all layers and heads."""

    def __init__(self, cfg: RelativePositionsConfig, size: int, num_types: int) -> None:
        """Makes codes of ``size``, the width of one head."""
        super().__init__(name="relative_positions")
        self._cfg, self._size, self._num_types = cfg, size, num_types

    def __call__(self, places: Poses, kinds: Array, embedding: Array) -> PairCodes:
        """Returns the codes.

        Args:
          places: of the entities of each row, ``[R, L, ...]``.
          kinds: int ``[R, L]``, the number of each entity's type.
          embedding: ``[R, L, D]``, for the gate.
        """
        cfg = self._cfg
        displacement = displacements(cfg, places)
        both = places.has_position[:, :, None] & places.has_position[:, None, :]
        keys: list[Array] = []
        values: list[Array] = []
        if cfg.kind != "none":
            found = buckets(cfg, displacement)
            found = found._replace(weight=found.weight * both[..., None])
            keys.append(self._looked_up("key_codes", found, cfg.num_buckets, 0.05))
            number = cfg.num_buckets
            if cfg.per_type_values:
                first = kinds[:, None, :, None] * cfg.num_buckets
                found = found._replace(code=found.code + first)
                number *= self._num_types
            values.append(self._looked_up("value_codes", found, number, 0.2))
        if cfg.project_keys or cfg.project_values:
            distance = jnp.sqrt((displacement**2).sum(-1, keepdims=True))
            shown = jnp.concatenate([displacement, distance], axis=-1) * both[..., None]
            for wanted, name, codes in (
                (cfg.project_keys, "key_projection", keys),
                (cfg.project_values, "value_projection", values),
            ):
                if wanted:
                    codes.append(hk.Linear(self._size, with_bias=False, name=name)(shown))
        value = _sum(values)
        if value is not None and cfg.value_gate != "none":
            gate = hk.Linear(self._size, name="value_gate")(embedding)
            function = {"linear": lambda x: x}.get(cfg.value_gate) or getattr(
                jax.nn, cfg.value_gate
            )
            value = value * function(gate)[:, None]
        return PairCodes(_sum(keys), value)

    def _looked_up(self, name: str, found: Buckets, number: int, deviation: float) -> Array:
        init = hk.initializers.RandomNormal(deviation)
        codes = hk.get_parameter(name, (number, self._size), init=init)
        if number <= _FEW:
            one_hot = found.code[..., None] == jnp.arange(number)
            return (one_hot * found.weight[..., None]).sum(-2) @ codes
        return (codes[found.code] * found.weight[..., None]).sum(-2)
