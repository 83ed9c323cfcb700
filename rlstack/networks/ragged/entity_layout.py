"""Where everything stands in an entity observation, read off its specs.

An observation is ``{"features", "count", "visible", "actors", "action_mask"}``, each a dict by
entity type or action (`rlstack.entity` says more). Its specs say the rest by their names, after a
colon: that of ``features[type]`` lists the features, comma-separated; that of ``visible[type]`` is
the slot at which the type begins; an action's is its kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.types import PyTree

GLOBAL = "__global__"  # the entity of no type, whose features are the global ones
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
    offset: int  # its first slot


class EntityAction(NamedTuple):
    """One action."""

    name: str
    kind: str
    capacity: int  # actors
    num_choices: int


class EntityLayout(NamedTuple):
    """What an environment shows and takes."""

    types: tuple[EntityType, ...]  # those that are tokens, by slot
    actions: tuple[EntityAction, ...]  # in the order of jax.tree.leaves
    global_features: tuple[str, ...]
    num_slots: int

    @property
    def num_tokens(self) -> int:
        """Slots of which the network makes tokens: all but that of a `GLOBAL` that never acts."""
        return sum(kind.capacity for kind in self.types)


def is_entity_spec(obs_spec: PyTree) -> bool:
    """Whether a spec describes an observation of entities."""
    return isinstance(obs_spec, Mapping) and set(obs_spec) >= _ENTRIES


def read_layout(obs_spec: PyTree, action_spec: PyTree) -> EntityLayout:
    """Reads the layout off the specs of one observation and one action.

    Raises:
      ValueError: they are not those of an entity environment.
    """
    if not is_entity_spec(obs_spec) or not isinstance(action_spec, Mapping):
        raise ValueError(
            "ragged_transformer: the observation must hold entities, and the action be a dict; got "
            f"{obs_spec} and {action_spec}. Adapt a game by rlstack.entity.as_dm_env."
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
    return EntityLayout(tuple(types), actions, names.get(GLOBAL, ()), num_slots)


def real(layout: EntityLayout, observation: PyTree) -> Array:
    """Returns which tokens there are, bool ``[..., E]``."""
    return _joined(layout, observation, lambda kind: observation_rows(kind, observation))


def visible(layout: EntityLayout, observation: PyTree) -> Array:
    """Returns which tokens the policy sees, bool ``[..., E]``."""
    return _joined(layout, observation, lambda kind: observation["visible"][kind.name])


def observation_rows(kind: EntityType, observation: PyTree) -> Array:
    """Returns which rows of a type are entities, bool ``[..., capacity]``."""
    return jnp.arange(kind.capacity) < observation["count"][kind.name][..., None]


def leading_shape(observation: PyTree) -> tuple[int, ...]:
    """Returns the axes before an observation's own."""
    if observation["count"]:
        return next(iter(observation["count"].values())).shape
    return next(iter(observation["actors"].values())).shape[:-1]


def lengths(layout: EntityLayout, observation: PyTree) -> np.ndarray:
    """Returns how many tokens each environment has, int64 ``[B]``; on the host."""
    total = np.zeros(leading_shape(observation), np.int64)
    for kind in layout.types:
        total += 1 if kind.name == GLOBAL else np.asarray(observation["count"][kind.name])
    return total


def _joined(layout: EntityLayout, observation: PyTree, of: object) -> Array:
    shape = leading_shape(observation)
    parts = [
        jnp.ones((*shape, 1), bool) if kind.name == GLOBAL else of(kind)  # type: ignore[operator]
        for kind in layout.types
    ]
    return jnp.concatenate([part.astype(bool) for part in parts], axis=-1)


def _told(spec: object) -> str:
    """What a spec's name says after its path."""
    return str(getattr(spec, "name", None) or "").rpartition(": ")[2]


def _features(spec: object) -> tuple[str, ...]:
    names = tuple(_told(spec).split(","))
    if len(names) != spec.shape[-1]:  # type: ignore[attr-defined]
        raise ValueError(
            "ragged_transformer: the name of a spec of features must list them, comma-separated; "
            f"got {spec}."
        )
    return names


def _offset(kind: str, spec: object) -> int:
    name = _told(spec)
    if not name.isdigit():
        raise ValueError(
            f"ragged_transformer: the name of the spec of visible[{kind!r}] must be the slot that "
            f"the type begins at; got {name!r}."
        )
    return int(name)


def _action(name: str, spec: object) -> EntityAction:
    kind = _told(spec)
    if kind not in _KINDS:
        raise ValueError(
            f"ragged_transformer: the name of action {name!r}'s spec must be its kind, one of "
            f"{', '.join(_KINDS)}; got {kind!r}."
        )
    (capacity,) = spec.shape  # type: ignore[attr-defined]
    num_choices = int(np.max(spec.maximum)) + 1  # type: ignore[attr-defined]
    return EntityAction(name, kind, capacity, num_choices)


def module_names(names: Sequence[str]) -> dict[str, str]:
    """Returns names that Haiku takes for modules, by types' or actions' own, no two alike.

    What is an identifier stays as it is; "Orbital Cannon" becomes Orbital_Cannon.
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
    """Returns the number of the type of each token, int ``[E]``."""
    return np.repeat(np.arange(len(layout.types)), [kind.capacity for kind in layout.types])


def take(layout: EntityLayout, observation: PyTree, kind: EntityType) -> Array:
    """Returns a type's features, ``[..., capacity, F]``."""
    features = observation["features"][kind.name]
    return jax.lax.convert_element_type(features, jnp.float32)
