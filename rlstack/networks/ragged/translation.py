"""Translation of positions to the frame of one entity, and standardisation of features.

Features are translated first; the running statistics are computed from translated features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from rlstack.configs.entities import RaggedTransformerConfig, TranslationConfig
from rlstack.math.running_statistics import RunningStatistics, initial_statistics, update_statistics
from rlstack.networks.base import Standardiser, dummy_timestep
from rlstack.networks.ragged.entity_layout import (
    GLOBAL,
    EntityLayout,
    EntityType,
    features_of,
    leading_shape,
    present_of,
)
from rlstack.networks.ragged.geometry import columns, direction, poses, rotated
from rlstack.types import PyTree

POSES = "poses"  # the entry of a translated observation that holds the original poses


def translated(layout: EntityLayout, cfg: RaggedTransformerConfig, observation: PyTree) -> PyTree:
    """Returns an observation with translated features, and with poses if attention uses them.

    A translated observation is returned unchanged.
    """
    if POSES in observation:
        return observation
    original: PyTree = ()
    relative = cfg.relative_positions
    if relative.kind != "none" or relative.project_keys or relative.project_values:
        original = poses(
            layout,
            observation,
            relative.position_features,
            relative.angle_feature,
            relative.vector_features,
        )
    features = dict(observation["features"])
    if cfg.translation.reference:
        features = _translated_features(layout, cfg.translation, observation)
    return {**observation, "features": features, POSES: original}


def _translated_features(
    layout: EntityLayout, cfg: TranslationConfig, observation: PyTree
) -> dict[str, Array]:
    reference = _reference(layout, cfg)
    features = dict(observation["features"])
    own = features_of(reference, observation)[..., :1, :]  # [..., 1, F]
    found = columns(reference, cfg.position_features)
    present = observation["count"][reference.name][..., None, None] > 0
    origin = jnp.where(present, own[..., jnp.array(found)], 0.0)
    forward = direction(reference, own, cfg.angle_feature, cfg.vector_features)
    forward = jnp.where(present, forward, jnp.array([1.0, 0.0]))
    for kind in layout.types:
        at = columns(kind, cfg.position_features)
        if at is None or kind.name == GLOBAL:
            continue
        rows = features_of(kind, observation)
        if kind.name == reference.name:
            features[kind.name] = rows if cfg.keep_reference else _without_pose(kind, cfg, rows)
            continue
        offset = rotated(rows[..., jnp.array(at)] - origin, forward)
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
        f"{cfg.position_features}; got {cfg.reference!r}. The types are "
        f"{[k.name for k in layout.types]}."
    )


def _without_pose(kind: EntityType, cfg: TranslationConfig, rows: Array) -> Array:
    names = (*cfg.position_features, cfg.angle_feature, *cfg.vector_features)
    is_pose = jnp.array([name in names for name in kind.features])
    return jnp.where(is_pose, 0.0, rows)


def standardiser(
    layout: EntityLayout, cfg: RaggedTransformerConfig, obs_spec: PyTree
) -> Standardiser:
    """Returns the standardiser of entity observations, by type and feature.

    Statistics include only entities that are present. A feature that never varies is only centred.
    The poses that attention compares are not standardised.
    """

    def initial() -> dict[str, RunningStatistics]:
        dummy = dummy_timestep(obs_spec).observation
        shapes = jax.eval_shape(lambda x: translated(layout, cfg, x)["features"], dummy)
        return {
            kind: initial_statistics(jax.ShapeDtypeStruct(x.shape[-1:], x.dtype))
            for kind, x in shapes.items()
        }

    def update(stats: dict[str, RunningStatistics], observation: PyTree, steps: Array) -> PyTree:
        observation = translated(layout, cfg, observation)
        return {
            kind: update_statistics(
                stats[kind],
                features,
                _mask(layout, kind, features, observation) & steps[..., None],
            )
            for kind, features in observation["features"].items()
        }

    def apply(stats: dict[str, RunningStatistics], observation: PyTree, clip: float) -> PyTree:
        observation = translated(layout, cfg, observation)
        features = {
            kind: jnp.clip((x - stats[kind].mean[0]) * _scale(stats[kind].variance[0]), -clip, clip)
            for kind, x in observation["features"].items()
        }
        return {**observation, "features": features}

    return Standardiser(initial, update, apply)


def _mask(layout: EntityLayout, name: str, features: Array, observation: PyTree) -> Array:
    if name == GLOBAL:
        return jnp.ones((*leading_shape(observation), 1), bool)
    (kind,) = (kind for kind in layout.types if kind.name == name)
    return present_of(kind, observation)


def _scale(variance: Array) -> Array:
    return jnp.where(variance > 1e-12, jax.lax.rsqrt(jnp.maximum(variance, 1e-12)), 1.0)
