"""The names of the choices of an agent, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from dm_env import specs

from rlstack.entity.adapter import EntityEnv
from rlstack.entity.spaces import GLOBAL, SelectEntity
from rlstack.envs.values import own_spec
from rlstack.types import PyTree

ACTION = "action"  # the only action type of an environment that names none


class Chooser(NamedTuple):
    """A row of an action type or an entity that makes one choice."""

    action_type: str
    row: int  # row of the action type
    title: str  # the chooser's name; empty if it is the only chooser
    least: int = 0  # the action that is choice 0 of this chooser


class Labels(Protocol):
    """Names the choices of a policy."""

    def choosers(self, observation: PyTree, rows: Mapping[str, int]) -> list[Chooser]:
        """Returns who chooses at a step; ``rows`` are the numbers of rows by action type."""

    def choice(self, name: str, choice: int, row: int = 0) -> str:
        """Returns the label of a choice of an action type, in one of its rows."""


class Numbers:
    """Names choices by the numbers that they have in the environment."""

    def __init__(self, action_spec: PyTree) -> None:
        """Makes labels from the spec of one action: an array, or a dict of arrays."""
        named = action_spec if isinstance(action_spec, Mapping) else {ACTION: action_spec}
        discrete = {name: spec for name, spec in named.items() if is_discrete(spec)}
        self._least = {name: _by_row(spec) for name, spec in discrete.items()}
        self._own = {name: _by_row(own_spec(spec)) for name, spec in discrete.items()}

    def choosers(self, observation: PyTree, rows: Mapping[str, int]) -> list[Chooser]:
        """Returns every row of every action type."""
        del observation
        found = [(name, row) for name, count in rows.items() for row in range(count)]
        several = len(found) > 1
        return [
            Chooser(name, row, f"{name} {row}" if several else "", _at(self._least, name, row))
            for name, row in found
        ]

    def choice(self, name: str, choice: int, row: int = 0) -> str:
        """Returns the number."""
        return str(choice + _at(self._own, name, row))


class Names(Numbers):
    """Names the actions of an environment that has a name for each."""

    def __init__(self, action_spec: PyTree, names: Sequence[str]) -> None:
        """Makes labels from the spec of one action, and the names in the order of the actions."""
        super().__init__(action_spec)
        self._names = names

    def choice(self, name: str, choice: int, row: int = 0) -> str:
        """Returns the name."""
        del name, row
        return self._names[choice]


class GameLabels:
    """Names the choices and the entities of a game."""

    def __init__(self, env: EntityEnv) -> None:
        """Makes labels for a game; entity ids are read from its newest observation."""
        self._env = env

    def choosers(self, observation: PyTree, rows: Mapping[str, int]) -> list[Chooser]:
        """Returns the entities that act."""
        found = []
        for name in rows:
            slots = np.asarray(observation["actors"][name]).tolist()
            for row, slot in enumerate(slots):
                if slot >= 0:
                    found.append(Chooser(name, row, f"{name} of {self.entity(slot)}"))
        return found

    def choice(self, name: str, choice: int, row: int = 0) -> str:
        """Returns the label of a choice, or the name of the chosen entity."""
        del row
        kind = self._env.game.action_space[name]
        return self.entity(choice) if isinstance(kind, SelectEntity) else kind.choices[choice]

    def entity(self, slot: int) -> str:
        """Returns an entity's name: its id if it has one, else its type and row."""
        for kind, slots in self._env.codec.slots.ranges():
            if slot in slots:
                if kind == GLOBAL:
                    return "global"
                seen = self._env.last_observation
                ids = () if seen is None else seen.ids.get(kind, ())
                row = slot - slots[0]
                return str(ids[row]) if row < len(ids) else f"{kind} {row}"
        raise AssertionError(slot)


def is_discrete(spec: Any) -> bool:
    """Returns whether a spec describes discrete choices."""
    return isinstance(spec, specs.BoundedArray) and spec.dtype.kind in "iu"


def _by_row(spec: specs.Array) -> list[int]:
    """Returns the first choice of each row of an action type."""
    assert isinstance(spec, specs.BoundedArray)
    return [int(least) for least in np.broadcast_to(spec.minimum, spec.shape).ravel()]


def _at(least: Mapping[str, Sequence[int]], name: str, row: int) -> int:
    return least[name][row] if name in least else 0
