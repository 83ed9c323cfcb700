"""Codes of relative positions, for attention.

After the relative positional encoding of RogueNet (Winter 2023,
https://clemenswinter.com/2023/04/14/entity-based-reinforcement-learning/), itself after Shaw et al.
(2018), arXiv:1803.02155. Differences from RogueNet: grid cells are rounded along each axis before
the axes are combined, so positions need not be whole numbers; types without a position are allowed;
and interpolation between directions wraps around the circle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.configs.entities import RelativePositionsConfig
from rlstack.networks.layers.linear import Linear
from rlstack.networks.ragged.geometry import Poses, rotated

_MAX_ONE_HOT = 64  # at most: a product with one-hot rows is then faster than an indexed read


class Buckets(NamedTuple):
    """The codes of a displacement and their weights; K is 1, or 2 or 4 with interpolation."""

    code: Array  # [..., K] int32
    weight: Array  # [..., K] float32


class PairCodes(NamedTuple):
    """Codes for each pair of attending and attended entity; None if codes are disabled."""

    key: Array | None  # [R, L, L, D], its product with the query is added to the logits
    value: Array | None  # [R, L, L, D], added to the values


def displacements(cfg: RelativePositionsConfig, poses: Poses) -> Array:
    """Returns attending minus attended position, in units of ``scale``, ``[R, L, L, 2]``.

    Except for a grid, displacements are in the frame of the attending entity.
    """
    position, forward = poses.position, poses.direction
    difference = (position[:, :, None] - position[:, None, :]) / cfg.scale
    return rotated(difference, forward[:, :, None]) if cfg.kind != "grid" else difference


def buckets(cfg: RelativePositionsConfig, displacement: Array) -> Buckets:
    """Returns the buckets of displacements ``[..., 2]``, which are in units of ``scale``."""
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
    """Returns buckets of direction, counterclockwise; the first is centred straight ahead."""
    angle = jnp.arctan2(displacement[..., 1], displacement[..., 0])
    return _nearest(angle * (cfg.sectors / (2 * np.pi)), cfg.interpolate, lambda i: i % cfg.sectors)


def _rings(cfg: RelativePositionsConfig, displacement: Array) -> Buckets:
    """Returns buckets of distance; the first ring is at 0 and the last at 1."""
    last = cfg.rings - 1
    coordinate = jnp.clip(jnp.sqrt((displacement**2).sum(-1)), 0.0, 1.0) * last
    return _nearest(coordinate, cfg.interpolate, lambda i: jnp.clip(i, 0, last))


def _nearest(coordinate: Array, interpolate: bool, bound: Callable[[Array], Array]) -> Buckets:
    """Returns the nearest integer as the bucket, or the two nearest, weighted, if interpolated."""
    if not interpolate:
        index = bound(jnp.floor(coordinate + 0.5).astype(jnp.int32))
        return Buckets(index[..., None], jnp.ones((*index.shape, 1)))
    below = jnp.floor(coordinate)
    share = coordinate - below
    index = jnp.stack([below, below + 1], axis=-1).astype(jnp.int32)
    return Buckets(bound(index), jnp.stack([1 - share, share], axis=-1))


def _sum(parts: list[Array]) -> Array | None:
    return sum(parts[1:], start=parts[0]) if parts else None


class RelativePositions(hk.Module):
    """Makes the codes of all pairs; all layers and heads share them."""

    def __init__(self, cfg: RelativePositionsConfig, size: int, num_types: int) -> None:
        """Makes the module; ``size`` is the width of one head."""
        super().__init__(name="relative_positions")
        self._cfg, self._size, self._num_types = cfg, size, num_types

    def __call__(self, poses: Poses, types: Array, embedding: Array) -> PairCodes:
        """Returns the codes.

        Args:
          poses: the poses of the entities of each row, ``[R, L, ...]``.
          types: int ``[R, L]``, the index of each entity's type.
          embedding: ``[R, L, D]``, the input of the gate.
        """
        cfg = self._cfg
        displacement = displacements(cfg, poses)
        both = poses.has_position[:, :, None] & poses.has_position[:, None, :]
        keys: list[Array] = []
        values: list[Array] = []
        if cfg.kind != "none":
            found = buckets(cfg, displacement)
            found = found._replace(weight=found.weight * both[..., None])
            keys.append(self._looked_up("key_codes", found, cfg.num_buckets, 0.05))
            number = cfg.num_buckets
            if cfg.per_type_values:
                first = types[:, None, :, None] * cfg.num_buckets
                found = found._replace(code=found.code + first)
                number *= self._num_types
            values.append(self._looked_up("value_codes", found, number, 0.2))
        if cfg.project_keys or cfg.project_values:
            distance = jnp.sqrt((displacement**2).sum(-1, keepdims=True))
            inputs = jnp.concatenate([displacement, distance], axis=-1) * both[..., None]
            for wanted, name, codes in (
                (cfg.project_keys, "key_projection", keys),
                (cfg.project_values, "value_projection", values),
            ):
                if wanted:
                    codes.append(Linear(self._size, name=name, with_bias=False)(inputs))
        value = _sum(values)
        if value is not None and cfg.value_gate != "none":
            gate = Linear(self._size, name="value_gate")(embedding)
            function = {"linear": lambda x: x}.get(cfg.value_gate) or getattr(
                jax.nn, cfg.value_gate
            )
            value = value * function(gate)[:, None]
        return PairCodes(_sum(keys), value)

    def _looked_up(self, name: str, found: Buckets, number: int, deviation: float) -> Array:
        init = hk.initializers.RandomNormal(deviation)
        codes = hk.get_parameter(name, (number, self._size), init=init)
        if number <= _MAX_ONE_HOT:
            one_hot = found.code[..., None] == jnp.arange(number)
            return (one_hot * found.weight[..., None]).sum(-2) @ codes
        return (codes[found.code] * found.weight[..., None]).sum(-2)
