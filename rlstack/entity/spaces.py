"""The observation space and action space of an entity environment.

The terms are those of entity-gym. An observation is a list of *entities* of several types; the
entities of a type have the same features. Some of the entities, the *actors*, take an *action
type*. In a categorical action each actor chooses one of several labels; in a select-entity action
it chooses another entity, the *actee*. The `GLOBAL` entity has no type: its features are the global
features, and it is the only actor of global actions.

An entity has two positions. Its *index* counts the entities that exist at a step, types in the
order of the space, `GLOBAL` last. Its *slot* is its row in the padded arrays that pools, replay and
networks work with, where every type has ``capacity`` rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlstack.checks import Checked

GLOBAL = "__global__"


@dataclasses.dataclass(frozen=True)
class EntityType(Checked):
    """One type of entity."""

    features: tuple[str, ...] = ()
    """Names of its features; may be empty."""
    capacity: int = 1
    """Maximum number of entities of this type in one observation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "capacity")
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"EntityType: feature names must be unique; got {self.features}.")


@dataclasses.dataclass(frozen=True)
class ObsSpace:
    """The entities and features that observations contain."""

    entities: Mapping[str, EntityType] = dataclasses.field(default_factory=dict)
    """Entity types by name. Indices and slots follow their order."""
    global_features: tuple[str, ...] = ()
    """Names of the features that do not belong to a single entity."""

    def __post_init__(self) -> None:
        if GLOBAL in self.entities:
            raise ValueError(
                f"ObsSpace: {GLOBAL!r} is reserved and must not be an entity type. Declare "
                "global_features instead."
            )
        if len(set(self.global_features)) < len(self.global_features):
            raise ValueError(
                f"ObsSpace: names of global_features must be unique; got {self.global_features}."
            )


@dataclasses.dataclass(frozen=True)
class Categorical(Checked):
    """Each actor chooses one of several labels."""

    choices: tuple[str, ...]
    """Labels of the choices."""
    capacity: int = 1
    """Maximum number of actors in one observation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_choices(self.choices)
        self.require_at_least(1, "capacity")


@dataclasses.dataclass(frozen=True)
class GlobalCategorical:
    """The `GLOBAL` entity chooses one of several labels.

    It does so at steps where the observation has a `GlobalCategoricalMask` for the action.
    """

    choices: tuple[str, ...]
    """Labels of the choices."""

    def __post_init__(self) -> None:
        _require_choices(self.choices)

    @property
    def capacity(self) -> int:
        """Maximum number of actors: the `GLOBAL` entity."""
        return 1


@dataclasses.dataclass(frozen=True)
class SelectEntity(Checked):
    """Each actor chooses one entity, its actee."""

    capacity: int = 1
    """Maximum number of actors in one observation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "capacity")


ActionType = Categorical | GlobalCategorical | SelectEntity
ActionSpace = Mapping[str, ActionType]


class Slots:
    """The slots of one environment's entities in the padded arrays.

    Attributes:
      offsets: the first slot of each entity type, including `GLOBAL` if it has a slot.
      has_global: True if `GLOBAL` has a slot, because of global features or a global action.
      total: the number of slots.
    """

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace):
        """Assigns slots to the types in the order of the space, `GLOBAL` last."""
        self.offsets: dict[str, int] = {}
        end = 0
        for name, kind in obs_space.entities.items():
            self.offsets[name] = end
            end += kind.capacity
        has_global_action = any(
            isinstance(kind, GlobalCategorical) for kind in action_space.values()
        )
        self.has_global = bool(obs_space.global_features) or has_global_action
        if self.has_global:
            self.offsets[GLOBAL] = end
            end += 1
        self.total = end
        self._obs_space = obs_space

    def ranges(self) -> Iterator[tuple[str, range]]:
        """Yields each type's name and slots, including `GLOBAL`."""
        for name, offset in self.offsets.items():
            capacity = 1 if name == GLOBAL else self._obs_space.entities[name].capacity
            yield name, range(offset, offset + capacity)


def _require_choices(choices: tuple[str, ...]) -> None:
    if not choices or len(set(choices)) < len(choices):
        raise ValueError(f"choices must be one or more unique labels; got {choices}.")
