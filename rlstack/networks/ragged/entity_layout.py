"""The layout of entity observations: their types, features, slots and actions, read from specs.

An observation is ``{"features", "count", "visible", "actors", "action_mask"}``, each a dict by
entity type or action; `rlstack.entity` documents them. The names of the specs contain the rest,
after a colon: the name of ``features[type]`` lists the features, comma-separated; the name of
``visible[type]`` is the type's first slot; the name of an action's spec is the kind of action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs
from jax import Array

from rlstack.types import PyTree

GLOBAL = "__global__"  # the type of the one entity that carries the global features
CATEGORICAL, GLOBAL_CATEGORICAL, SELECT_ENTITY = (
    "categorical",
    "global_categorical",
    "select_entity",
)
_KINDS = (CATEGORICAL, GLOBAL_CATEGORICAL, SELECT_ENTITY)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENTRIES = {"features", "count", "visible", "actors", "action_mask"}


class EntityType(NamedTuple):
    """One type of entity, or `GLOBAL`."""

    name: str
    features: tuple[str, ...]
    capacity: int
    offset: int  # index of the type's first slot


class EntityAction(NamedTuple):
    """One action."""

    name: str
    kind: str  # CATEGORICAL, GLOBAL_CATEGORICAL or SELECT_ENTITY
    capacity: int  # the largest number of actors
    num_choices: int


class EntityLayout(NamedTuple):
    """The entity types and actions of an environment."""

    types: tuple[EntityType, ...]  # types with entities that become tokens, by slot
    actions: tuple[EntityAction, ...]  # ordered like jax.tree.leaves
    num_slots: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens: all slots, except the slot of a `GLOBAL` that never acts."""
        return sum(kind.capacity for kind in self.types)


def is_entity_spec(obs_spec: PyTree) -> bool:
    """Returns whether a spec describes an observation of entities."""
    return isinstance(obs_spec, Mapping) and set(obs_spec) >= _ENTRIES


def read_layout(obs_spec: PyTree, action_spec: PyTree) -> EntityLayout:
    """Reads the layout from the specs of one observation and one action.

    Raises:
      ValueError: the specs are not those of an entity environment.
    """
    if not is_entity_spec(obs_spec) or not isinstance(action_spec, Mapping):
        raise ValueError(
            "ragged_transformer: the observation must be of entities and the action a dict; got "
            f"{obs_spec} and {action_spec}. Adapt a game with rlstack.entity.as_dm_env."
        )
    names = {kind: _features(spec) for kind, spec in obs_spec["features"].items()}
    types = sorted(
        (
            EntityType(kind, names.get(kind, ()), spec.shape[0], _offset(kind, spec))
            for kind, spec in obs_spec["visible"].items()
            if kind != GLOBAL
        ),
        key=lambda kind: kind.offset,
    )
    num_slots = sum(kind.capacity for kind in types)
    actions = tuple(_action(name, action_spec[name]) for name in sorted(action_spec))
    acts = any(action.kind == GLOBAL_CATEGORICAL for action in actions)
    if acts:
        types.append(EntityType(GLOBAL, names.get(GLOBAL, ()), 1, num_slots))
    num_slots += acts or GLOBAL in names
    return EntityLayout(tuple(types), actions, num_slots)


def present(layout: EntityLayout, observation: PyTree) -> Array:
    """Returns which slots hold an entity, bool ``[..., E]``."""
    return _joined(layout, observation, lambda kind: present_of(kind, observation))


def visible(layout: EntityLayout, observation: PyTree) -> Array:
    """Returns which tokens the policy may see, bool ``[..., E]``."""
    return _joined(layout, observation, lambda kind: observation["visible"][kind.name])


def present_of(kind: EntityType, observation: PyTree) -> Array:
    """Returns which slots of a type hold an entity, bool ``[..., capacity]``."""
    return jnp.arange(kind.capacity) < observation["count"][kind.name][..., None]


def leading_shape(observation: PyTree) -> tuple[int, ...]:
    """Returns the leading axes of an observation, such as ``(B,)``."""
    if observation["count"]:
        return next(iter(observation["count"].values())).shape
    return next(iter(observation["actors"].values())).shape[:-1]


def lengths(layout: EntityLayout, observation: PyTree) -> np.ndarray:
    """Returns the number of tokens of each environment, int64 ``[B]``; runs on the host."""
    total = np.zeros(leading_shape(observation), np.int64)
    for kind in layout.types:
        total += 1 if kind.name == GLOBAL else np.asarray(observation["count"][kind.name])
    return total


def _joined(
    layout: EntityLayout, observation: PyTree, mask_of: Callable[[EntityType], Array]
) -> Array:
    """Joins the types' masks, ``[..., capacity]``, into one, ``[..., E]``; `GLOBAL` is True."""
    shape = leading_shape(observation)
    parts = [
        jnp.ones((*shape, 1), bool) if kind.name == GLOBAL else mask_of(kind)
        for kind in layout.types
    ]
    return jnp.concatenate([part.astype(bool) for part in parts], axis=-1)


def _after_colon(spec: specs.Array) -> str:
    """Returns the part of a spec's name after the path and the colon."""
    return str(spec.name or "").rpartition(": ")[2]


def _features(spec: specs.Array) -> tuple[str, ...]:
    names = tuple(_after_colon(spec).split(","))
    if len(names) != spec.shape[-1]:
        raise ValueError(
            "ragged_transformer: the name of a spec of features must list them, comma-separated; "
            f"got {spec}."
        )
    return names


def _offset(kind: str, spec: specs.Array) -> int:
    name = _after_colon(spec)
    if not name.isdigit():
        raise ValueError(
            f"ragged_transformer: the name of the spec of visible[{kind!r}] must be the number of "
            f"the type's first slot; got {name!r}."
        )
    return int(name)


def _action(name: str, spec: specs.BoundedArray) -> EntityAction:
    kind = _after_colon(spec)
    if kind not in _KINDS:
        raise ValueError(
            f"ragged_transformer: the name of the spec of action {name!r} must be its kind, one of "
            f"{', '.join(_KINDS)}; got {kind!r}."
        )
    (capacity,) = spec.shape
    num_choices = int(np.max(spec.maximum)) + 1
    return EntityAction(name, kind, capacity, num_choices)


def module_names(names: Sequence[str]) -> dict[str, str]:
    """Returns a distinct Haiku module name for each name of a type or action.

    Identifiers stay as they are; "Orbital Cannon" becomes Orbital_Cannon.
    """
    found = {name: name for name in names if _IDENTIFIER.fullmatch(name)}
    for name in names:
        if name not in found:
            legal = "_" * (not name or name[0].isdigit()) + re.sub(r"[^A-Za-z0-9_]", "_", name)
            while legal in found.values():
                legal += "_"
            found[name] = legal
    return found


def token_types(layout: EntityLayout) -> np.ndarray:
    """Returns the index of each token's type in ``layout.types``, int ``[E]``."""
    return np.repeat(np.arange(len(layout.types)), [kind.capacity for kind in layout.types])


def features_of(kind: EntityType, observation: PyTree) -> Array:
    """Returns the features of a type, float32 ``[..., capacity, F]``."""
    return jax.lax.convert_element_type(observation["features"][kind.name], jnp.float32)
