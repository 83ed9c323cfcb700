"""Playing a game by rules: who chooses among what, chance, and whole episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlstack.entity.environment import (
    Action,
    ActionMask,
    CategoricalAction,
    EntityID,
    Environment,
    GlobalCategoricalMask,
    Observation,
    SelectEntityAction,
    SelectEntityMask,
)
from rlstack.entity.spaces import GLOBAL, ObsSpace, SelectEntity

Choices = Mapping[str, Sequence[Any]]
"""By action type, for each actor in turn: the position of its choice, or its actee."""

Rule = Callable[[Observation], Choices]
"""A policy that is written by hand."""


class Episode(NamedTuple):
    """What one episode came to."""

    total: float  # undiscounted
    length: int
    truncated: bool


def play(environment: Environment, rule: Rule) -> Episode:
    """Plays one episode; one that is over at its beginning has length 0."""
    observation = environment.reset()
    total, length = observation.reward, 0
    while not observation.done:
        observation = environment.act(as_actions(environment, observation, rule(observation)))
        total += observation.reward
        length += 1
    return Episode(total, length, observation.truncated)


def as_actions(
    environment: Environment, observation: Observation, choices: Choices
) -> dict[str, Action]:
    """Returns what `Environment.act` takes; action types without actors are added."""
    actions: dict[str, Action] = {}
    for name, kind in environment.action_space.items():
        mask = observation.actions.get(name)
        actors = _actors(environment.obs_space, observation, mask) if mask is not None else []
        chosen = choices.get(name, ()) if actors else ()
        if len(chosen) != len(actors):
            raise ValueError(
                f"as_actions: {name!r} needs a choice for each of its {len(actors)} actors; "
                f"got {len(chosen)}."
            )
        if isinstance(kind, SelectEntity):
            actions[name] = SelectEntityAction(actors, list(chosen))
        else:
            labels = [kind.choices[i] for i in chosen]
            actions[name] = CategoricalAction(actors, np.array(chosen, np.int64), labels)
    return actions


class RandomRule:
    """Chooses uniformly among what is legal, each actor by itself."""

    def __init__(self, environment: Environment, seed: int = 0):
        self._environment = environment
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: Observation) -> Choices:
        """Draws a choice for every actor."""
        return {
            name: [
                legal[int(self._rng.random() * len(legal))]
                for legal in legal_choices(self._environment, observation, name)
            ]
            for name in observation.actions
        }


def legal_choices(
    environment: Environment, observation: Observation, name: str
) -> list[Sequence[Any]]:
    """Returns, for each actor of an action type in turn, what it may choose."""
    space, kind = environment.obs_space, environment.action_space[name]
    mask = observation.actions.get(name)
    if mask is None:
        return []
    count = len(_actors(space, observation, mask))
    if isinstance(mask, SelectEntityMask):
        options: Sequence[Any] = _named(space, observation, mask.actee_ids, mask.actee_types)
    else:
        assert not isinstance(kind, SelectEntity)
        options = range(len(kind.choices))
    if mask.mask is None:
        return [options] * count
    rows = [mask.mask] if isinstance(mask, GlobalCategoricalMask) else mask.mask
    return [[option for option, ok in zip(options, row, strict=True) if ok] for row in rows]


def _actors(space: ObsSpace, observation: Observation, mask: ActionMask) -> list[EntityID]:
    if isinstance(mask, GlobalCategoricalMask):
        return [GLOBAL]
    return _named(space, observation, mask.actor_ids, mask.actor_types)


def _named(
    space: ObsSpace,
    observation: Observation,
    ids: Sequence[EntityID] | None,
    types: Sequence[str] | None,
) -> list[EntityID]:
    """The entities that a mask refers to."""
    if ids is not None:
        return list(ids)
    found: list[EntityID] = []
    for kind in space.entities if types is None else types:
        named = observation.ids.get(kind)
        if named is None:
            rows = observation.features.get(kind, 0)
            found += [(kind, row) for row in range(rows if isinstance(rows, int) else len(rows))]
        else:
            found += named
    return found
