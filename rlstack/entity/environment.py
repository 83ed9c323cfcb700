"""The interface of a game: an `Environment` that returns an `Observation` at each step.

A game is a class with two spaces and two methods (`rlstack.entity.games.count` is a short one)::

    class Count:
        obs_space = ObsSpace({"Player": EntityType(), "Bean": EntityType(capacity=9)})
        action_space = {"count": Categorical(("0", "1", "2"))}

        def reset(self) -> Observation: ...
        def act(self, actions: Actions) -> Observation: ...

`grid` is for the ``__str__`` of games that are played on a board.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from rlstack.entity.spaces import ActionSpace, ObsSpace

EntityID = Hashable


@dataclasses.dataclass(frozen=True)
class CategoricalMask:
    """The actors of a categorical action at this step, and their legal choices.

    Name the actors by ids or by entity types, not by both. Without either, every entity is an
    actor. An action type that is missing from ``Observation.actions`` has no actors at this step.
    """

    actor_ids: Sequence[EntityID] | None = None
    actor_types: Sequence[str] | None = None
    mask: ArrayLike | None = None  # bool [actors, choices], True = legal; None: every choice is


@dataclasses.dataclass(frozen=True)
class GlobalCategoricalMask:
    """The global action is taken at this step, and these choices are legal."""

    mask: ArrayLike | None = None  # bool [choices], True = legal; None: every choice is


@dataclasses.dataclass(frozen=True)
class SelectEntityMask:
    """The actors and actees of a select-entity action, and which pairs are legal.

    Name the actors by ids or by entity types, and the actees in the same way. Without either, every
    entity is an actor or an actee.
    """

    actor_ids: Sequence[EntityID] | None = None
    actor_types: Sequence[str] | None = None
    actee_ids: Sequence[EntityID] | None = None
    actee_types: Sequence[str] | None = None
    mask: ArrayLike | None = None  # bool [actors, actees], True = legal; None: every pair is


ActionMask = CategoricalMask | GlobalCategoricalMask | SelectEntityMask


@dataclasses.dataclass(frozen=True)
class Observation:
    """The observation of one environment at one step."""

    features: Mapping[str, ArrayLike]
    """Features by entity type, ``[count, features]``. A type that is missing has no entities. For a
    type without features, give ``[count, 0]`` or only the count, an int."""
    actions: Mapping[str, ActionMask] = dataclasses.field(default_factory=dict)
    """The actors and their legal choices, by action type."""
    global_features: ArrayLike = ()
    """Features that belong to no entity, ``[global features]``."""
    ids: Mapping[str, Sequence[EntityID]] = dataclasses.field(default_factory=dict)
    """Ids of the entities by type, unique over all types. An entity of a type without ids has the
    id (type, row), and masks can refer to it only by type."""
    visible: Mapping[str, ArrayLike] = dataclasses.field(default_factory=dict)
    """Whether the policy sees each entity, bool ``[count]`` by type. The value function sees all
    entities. All entities of a missing type are visible."""
    reward: float = 0.0
    """Reward of the previous actions."""
    done: bool = False
    """Whether the game has ended by itself, so that no reward can follow."""
    truncated: bool = False
    """Whether a step limit ends the episode. Learners then bootstrap from this observation, unless
    ``done`` is set too: an end of the game counts as such, also in the step of the limit."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers to log, by name."""

    @property
    def over(self) -> bool:
        """Whether the episode has ended, for any reason."""
        return self.done or self.truncated

    @property
    def cut(self) -> bool:
        """Whether only a step limit ended the episode."""
        return self.truncated and not self.done


class CategoricalAction(NamedTuple):
    """The choices of the actors of a categorical or global categorical action."""

    actors: Sequence[EntityID]
    indices: np.ndarray  # int [actors], positions among the choices
    labels: Sequence[str]  # the labels of these choices


class SelectEntityAction(NamedTuple):
    """The entities that the actors of a select-entity action chose."""

    actors: Sequence[EntityID]
    actees: Sequence[EntityID]


Action = CategoricalAction | SelectEntityAction

Actions = Mapping[str, Any]
"""An `Action` by action type. The action space determines which of the two kinds each action is.
The values have the type ``Any``, so that a game can read ``actions["move"].indices`` without a
cast."""


class Environment(Protocol):
    """One game. `rlstack.entity.as_dm_env` adapts it for pools and actors.

    Optional methods: ``__str__``, the text that ``rlstack play`` shows; ``close()``; and
    ``reset_with_index(index)``, which begins episode ``index`` in an evaluation by index.
    """

    @property
    def obs_space(self) -> ObsSpace:
        """The entity types and features that observations contain."""

    @property
    def action_space(self) -> ActionSpace:
        """The action types that `act` takes."""

    def reset(self) -> Observation:
        """Begins an episode. If its first observation is done, the caller calls `reset` again."""

    def act(self, actions: Actions) -> Observation:
        """Plays one step. ``actions`` has every action type, also those without actors."""


def num_entities(rows: ArrayLike | None) -> int:
    """Returns the number of entities in one type's entry of ``Observation.features``."""
    if rows is None:
        return 0
    if isinstance(rows, int | np.integer):
        return int(rows)
    return len(rows)  # type: ignore[arg-type]  # everything else array-like has a length here


def grid(width: int, height: int, marks: Mapping[tuple[int, int], str], empty: str = ".") -> str:
    """Returns a board as text, y upwards, with ``marks`` by (x, y); marks outside are left out."""
    rows = (
        " ".join(marks.get((x, y), empty) for x in range(width)) for y in reversed(range(height))
    )
    return "\n".join(rows)
