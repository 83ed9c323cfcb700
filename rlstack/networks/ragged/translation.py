"""What the network sees of an observation: positions as seen from one entity.

And what is known of how its features are spread, by which they are standardised afterwards.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rlstack.math.running_statistics import RunningStatistics, initial_statistics, update_statistics
from rlstack.networks.base import Standardiser, dummy_timestep
from rlstack.networks.ragged.config import RaggedTransformerConfig, TranslationConfig
from rlstack.networks.ragged.entity_layout import (
    GLOBAL,
    EntityLayout,
    EntityType,
    leading_shape,
    observation_rows,
    take,
)
from rlstack.networks.ragged.geometry import columns, direction, places, turned
from rlstack.types import PyTree

PLACES = "places"  # the entry of a seen observation that holds untouched positions


def seen(layout: EntityLayout, cfg: RaggedTransformerConfig, observation: PyTree) -> PyTree:
    """Returns an observation with translated features, and places where attention asks for them.

    One that has been seen already comes back as it is.
    """
    if PLACES in observation:
        return observation
    asked: Any = ()
    relative = cfg.relative_positions
    if relative.kind != "none" or relative.project_keys or relative.project_values:
        asked = places(
            layout,
            observation,
            relative.position_features,
            relative.angle_feature,
            relative.vector_features,
        )
    features = dict(observation["features"])
    if cfg.translation.reference:
        features = _translated(layout, cfg.translation, observation)
    return {**observation, "features": features, PLACES: asked}


def _translated(
    layout: EntityLayout, cfg: TranslationConfig, observation: PyTree
) -> dict[str, Array]:
    reference = _reference(layout, cfg)
    features = dict(observation["features"])
    own = take(layout, observation, reference)[..., :1, :]  # [..., 1, F]
    found = columns(reference, cfg.position_features)
    there = observation["count"][reference.name][..., None, None] > 0
    origin = jnp.where(there, own[..., jnp.array(found)], 0.0)
    forward = direction(reference, own, cfg.angle_feature, cfg.vector_features)
    forward = jnp.where(there, forward, jnp.array([1.0, 0.0]))
    for kind in layout.types:
        at = columns(kind, cfg.position_features)
        if at is None or kind.name == GLOBAL:
            continue
        rows = take(layout, observation, kind)
        if kind.name == reference.name:
            features[kind.name] = rows if cfg.keep_reference else _hidden(kind, cfg, rows)
            continue
        offset = turned(rows[..., jnp.array(at)] - origin, forward)
        rows = rows.at[..., jnp.array(at)].set(offset)
        if cfg.distance_feature:
            distance = jnp.sqrt((offset**2).sum(-1, keepdims=True))
            rows = jnp.concatenate([rows, distance], axis=-1)
        features[kind.name] = rows
    return features


def _reference(layout: EntityLayout, cfg: TranslationConfig) -> EntityType:
    for kind in layout.types:
        placed = columns(kind, cfg.position_features) is not None
        if kind.name == cfg.reference and placed and kind.name != GLOBAL and kind.capacity == 1:
            return kind
    raise ValueError(
        f"TranslationConfig: reference must be a type of capacity 1 with the features "
        f"{cfg.position_features}; got {cfg.reference!r}, of {[k.name for k in layout.types]}."
    )


def _hidden(kind: EntityType, cfg: TranslationConfig, rows: Array) -> Array:
    names = (*cfg.position_features, cfg.angle_feature, *cfg.vector_features)
    hidden = jnp.array([name in names for name in kind.features])
    return jnp.where(hidden, 0.0, rows)


def standardiser(
    layout: EntityLayout, cfg: RaggedTransformerConfig, obs_spec: PyTree
) -> Standardiser:
    """Returns how entity observations are standardised: by type and feature, over real entities.

    A feature that never varies is only shifted. Positions that attention compares stay untouched.
    """

    def initial() -> dict[str, RunningStatistics]:
        dummy = dummy_timestep(obs_spec).observation
        shapes = jax.eval_shape(lambda x: seen(layout, cfg, x)["features"], dummy)
        return {
            kind: initial_statistics(jax.ShapeDtypeStruct(x.shape[-1:], x.dtype))
            for kind, x in shapes.items()
        }

    def update(stats: dict[str, RunningStatistics], observation: PyTree) -> PyTree:
        observation = seen(layout, cfg, observation)
        return {
            kind: update_statistics(
                stats[kind], features, _counted(layout, kind, features, observation)
            )
            for kind, features in observation["features"].items()
        }

    def apply(stats: dict[str, RunningStatistics], observation: PyTree, clip: float) -> PyTree:
        observation = seen(layout, cfg, observation)
        features = {
            kind: jnp.clip((x - stats[kind].mean[0]) * _scale(stats[kind].variance[0]), -clip, clip)
            for kind, x in observation["features"].items()
        }
        return {**observation, "features": features}

    return Standardiser(initial, update, apply)


def _counted(layout: EntityLayout, name: str, features: Array, observation: PyTree) -> Array:
    if name == GLOBAL:
        return jnp.ones((*leading_shape(observation), 1), bool)
    (kind,) = (kind for kind in layout.types if kind.name == name)
    return observation_rows(kind, observation)


def _scale(variance: Array) -> Array:
    return jnp.where(variance > 1e-12, jax.lax.rsqrt(jnp.maximum(variance, 1e-12)), 1.0)
