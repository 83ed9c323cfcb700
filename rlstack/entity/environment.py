"""The records and the protocol that a game's author writes against."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlstack.entity.spaces import ActionSpace, ObsSpace

EntityID = Hashable


@dataclasses.dataclass(frozen=True)
class CategoricalMask:
    """Who takes a categorical action, and which choices are legal.

    Actors are named by ids or by types, not both; by neither, all entities are. An action type that
    an observation does not mention has no actors at that step.
    """

    actor_ids: Sequence[EntityID] | None = None
    actor_types: Sequence[str] | None = None
    mask: Any = None  # bool [actors, choices], True = legal; None: all are


@dataclasses.dataclass(frozen=True)
class GlobalCategoricalMask:
    """That the global action is taken at this step, and which choices are legal."""

    mask: Any = None  # bool [choices]; None: all are


@dataclasses.dataclass(frozen=True)
class SelectEntityMask:
    """Who points at whom; actors and actees each by ids or by types, by neither for all."""

    actor_ids: Sequence[EntityID] | None = None
    actor_types: Sequence[str] | None = None
    actee_ids: Sequence[EntityID] | None = None
    actee_types: Sequence[str] | None = None
    mask: Any = None  # bool [actors, actees], True = legal; None: all are


ActionMask = CategoricalMask | GlobalCategoricalMask | SelectEntityMask


@dataclasses.dataclass(frozen=True)
class Observation:
    """What one environment shows at one step."""

    features: Mapping[str, Any]
    """Features by entity type, ``[count, features]``; a type that is absent has no entities. A type
    without features gives ``[count, 0]``, or the number of entities as an int."""
    actions: Mapping[str, ActionMask] = dataclasses.field(default_factory=dict)
    """Who may act, by action type."""
    global_features: Any = ()
    """``[global features]``."""
    ids: Mapping[str, Sequence[EntityID]] = dataclasses.field(default_factory=dict)
    """Names of entities by type, unique over all types; a type without names cannot be referred to
    by id, its entities are known as (type, row)."""
    visible: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """bool ``[count]`` by type: whether the policy sees the entity; the value function always does.
    A type that is absent is visible."""
    reward: float = 0.0
    """Answers the previous actions."""
    done: bool = False
    """Whether the episode has ended."""
    truncated: bool = False
    """Whether it ended by a limit of steps alone, so that its value goes on."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers to log."""


class CategoricalAction(NamedTuple):
    """What the actors of a (global) categorical action chose."""

    actors: Sequence[EntityID]
    indices: np.ndarray  # int [actors], positions among the choices
    labels: Sequence[str]


class SelectEntityAction(NamedTuple):
    """Whom the actors of a select-entity action chose."""

    actors: Sequence[EntityID]
    actees: Sequence[EntityID]


Action = CategoricalAction | SelectEntityAction


class Environment(Protocol):
    """One game. `rlstack.entity.as_dm_env` makes of it what pools and actors take."""

    @property
    def obs_space(self) -> ObsSpace:
        """What it shows."""

    @property
    def action_space(self) -> ActionSpace:
        """What it takes."""

    def reset(self) -> Observation:
        """Begins an episode; may be over at once, then another is begun."""

    def act(self, actions: Mapping[str, Action]) -> Observation:
        """Plays one step. Every action type is present, perhaps with no actors."""
