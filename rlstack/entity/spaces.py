"""What an entity environment shows and takes: entity types with features, actions with actors.

Vocabulary of entity-gym: an observation is a list of *entities* of several types, each with its
type's features. An *action type* is taken by some of the entities, its *actors*; a categorical one
has labelled choices, a select-entity one points at another entity, the *actee*. The `GLOBAL` entity
is of no type: its features are the global ones, and it is the one actor of global actions.

Entities have positions in two orders. An entity's *index* counts what is there: types in the order
of the space, `GLOBAL` last. Its *slot* is its place in the padded table that travels through pools,
replay and networks, where every type has room for ``capacity`` entities.
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
    """Names of its features; may be none."""
    capacity: int = 1
    """The most entities of this type that one observation may hold."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "capacity")
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"EntityType: features must differ in name; got {self.features}.")


@dataclasses.dataclass(frozen=True)
class ObsSpace:
    """What an environment shows."""

    entities: Mapping[str, EntityType] = dataclasses.field(default_factory=dict)
    """Entity types by name; their order is the order of indices and slots."""
    global_features: tuple[str, ...] = ()
    """Names of the features that belong to no entity."""

    def __post_init__(self) -> None:
        if GLOBAL in self.entities:
            raise ValueError(f"ObsSpace: {GLOBAL} is no type of entity. Use global_features.")
        if len(set(self.global_features)) < len(self.global_features):
            raise ValueError(
                f"ObsSpace: global_features must differ in name; got {self.global_features}."
            )


@dataclasses.dataclass(frozen=True)
class Categorical(Checked):
    """Each actor makes one of the same choices."""

    choices: tuple[str, ...]
    """Labels of the choices."""
    capacity: int = 1
    """The most actors that one observation may hold."""

    def __post_init__(self) -> None:
        _require_choices(self.choices)
        self.require_at_least(1, "capacity")


@dataclasses.dataclass(frozen=True)
class GlobalCategorical:
    """The `GLOBAL` entity makes one choice, at every step at which the action is offered."""

    choices: tuple[str, ...]
    """Labels of the choices."""

    def __post_init__(self) -> None:
        _require_choices(self.choices)

    @property
    def capacity(self) -> int:
        """Actors: the one."""
        return 1


@dataclasses.dataclass(frozen=True)
class SelectEntity(Checked):
    """Each actor points at one entity."""

    capacity: int = 1
    """The most actors that one observation may hold."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "capacity")


ActionType = Categorical | GlobalCategorical | SelectEntity
ActionSpace = Mapping[str, ActionType]


class Slots:
    """Where everything stands in the padded table of one environment's entities."""

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace):
        """Lays out the types one after the other, `GLOBAL` last where there is one."""
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
        """Yields each type's name and slots, `GLOBAL` included."""
        for name, offset in self.offsets.items():
            room = 1 if name == GLOBAL else self._obs_space.entities[name].capacity
            yield name, range(offset, offset + room)


def _require_choices(choices: tuple[str, ...]) -> None:
    if not choices or len(set(choices)) < len(choices):
        raise ValueError(f"choices must be one or more different labels; got {choices}.")
