"""The names of the choices of an agent, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rlstack.entity.adapter import EntityEnv
from rlstack.entity.spaces import GLOBAL, SelectEntity
from rlstack.types import PyTree


class Chooser(NamedTuple):
    """Who makes one choice."""

    action_type: str
    row: int  # of the action type
    title: str  # empty if it is the only one


class Labels(Protocol):
    """Names what a policy chooses among."""

    def choosers(self, observation: PyTree, rows: Mapping[str, int]) -> list[Chooser]:
        """Returns who chooses at a step; ``rows`` are the numbers of rows by action type."""

    def choice(self, name: str, choice: int) -> str:
        """Returns the label of a choice of an action type."""


class Numbers:
    """Names choices by their numbers."""

    def choosers(self, observation: PyTree, rows: Mapping[str, int]) -> list[Chooser]:
        """Returns every row of every action type."""
        del observation
        found = [(name, row) for name, count in rows.items() for row in range(count)]
        several = len(found) > 1
        return [Chooser(name, row, f"{name} {row}" if several else "") for name, row in found]

    def choice(self, name: str, choice: int) -> str:
        """Returns the number."""
        del name
        return str(choice)


class Names(Numbers):
    """Names the actions of an environment that has a name for each."""

    def __init__(self, names: Sequence[str]) -> None:
        """Takes the names, in the order of the actions."""
        self._names = names

    def choice(self, name: str, choice: int) -> str:
        """Returns the name."""
        del name
        return self._names[choice]


class GameLabels:
    """Names the choices and the entities of a game."""

    def __init__(self, env: EntityEnv) -> None:
        """Takes the game, whose newest observation has the ids of entities."""
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

    def choice(self, name: str, choice: int) -> str:
        """Returns the label of a choice, or the name of the chosen entity."""
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
