"""Positions and directions of entities, read from features by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rlstack.networks.ragged.entity_layout import (
    EntityLayout,
    EntityType,
    features_of,
    leading_shape,
)
from rlstack.types import PyTree


class Poses(NamedTuple):
    """The position and direction of each entity."""

    position: Array  # [..., E, 2] float32
    has_position: Array  # [..., E] bool
    direction: Array  # [..., E, 2] float32, unit vectors; (1, 0) for entities without one


def columns(kind: EntityType, names: Sequence[str]) -> list[int] | None:
    """Returns the indices of these features in a type, or None if it lacks one of them."""
    if not set(names) <= set(kind.features):
        return None
    return [kind.features.index(name) for name in names]


def direction(kind: EntityType, features: Array, angle: str, vector: Sequence[str]) -> Array:
    """Returns the direction of entities as unit vectors, ``[..., 2]``; (1, 0) if they have none.

    Args:
      kind: the type of the entities.
      features: ``[..., F]``.
      angle: the name of a feature, an angle in radians, or "".
      vector: the names of two features, a vector, or an empty sequence.
    """
    forward = jnp.zeros((*features.shape[:-1], 2)).at[..., 0].set(1.0)
    names = (angle,) if angle else tuple(vector)
    found = columns(kind, names) if names else None
    if found is None:
        return forward
    if angle:
        value = features[..., found[0]]
        return jnp.stack([jnp.cos(value), jnp.sin(value)], axis=-1)
    pair = features[..., jnp.array(found)]
    length = jnp.sqrt((pair**2).sum(-1, keepdims=True))
    return jnp.where(length > 0, pair / jnp.maximum(length, 1e-12), forward)


def rotated(displacement: Array, forward: Array) -> Array:
    """Rotates displacements ``[..., 2]`` so that the unit vectors ``forward`` become (1, 0)."""
    x, y = displacement[..., 0], displacement[..., 1]
    cos, sin = forward[..., 0], forward[..., 1]
    return jnp.stack([cos * x + sin * y, cos * y - sin * x], axis=-1)


def poses(
    layout: EntityLayout,
    observation: PyTree,
    position_features: Sequence[str],
    angle: str,
    vector: Sequence[str],
) -> Poses:
    """Reads the poses of all tokens from the features of their types.

    Args:
      layout: the layout of the observation.
      observation: an observation with any leading axes.
      position_features: the names of two features.
      angle: the name of a feature, an angle in radians, or "".
      vector: the names of two features, a vector, or an empty sequence.

    Raises:
      ValueError: no type has the position features.
    """
    if not any(columns(kind, position_features) for kind in layout.types):
        raise ValueError(
            f"RelativePositionsConfig: at least one type must have the features "
            f"{position_features}; got "
            f"{ {kind.name: kind.features for kind in layout.types} }."
        )
    leading = leading_shape(observation)
    parts = []
    for kind in layout.types:
        shape = (*leading, kind.capacity)
        found = columns(kind, position_features)
        features = features_of(kind, observation) if kind.features else jnp.zeros((*shape, 0))
        parts.append(
            Poses(
                jnp.zeros((*shape, 2)) if found is None else features[..., jnp.array(found)],
                jnp.full(shape, found is not None),
                direction(kind, features, angle, vector),
            )
        )
    return Poses(
        jnp.concatenate([part.position for part in parts], axis=-2),
        jnp.concatenate([part.has_position for part in parts], axis=-1),
        jnp.concatenate([part.direction for part in parts], axis=-2),
    )
