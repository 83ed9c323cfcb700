"""Hand-written and random policies for games, and a loop that plays an episode with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
    num_entities,
)
from rlstack.entity.spaces import GLOBAL, ObsSpace, SelectEntity

Choices = Mapping[str, Sequence[EntityID]]
"""By action type, one entry per actor in order: the position of its choice (an int), or the id of
its actee."""

Policy = Callable[[Observation], Choices]
"""A function of the observation alone."""


class Episode(NamedTuple):
    """The result of one episode."""

    total: float  # undiscounted return
    length: int
    truncated: bool


def play(environment: Environment, policy: Policy) -> Episode:
    """Plays one episode. An episode that is over at its first observation has length 0."""
    observation = environment.reset()
    total, length = observation.reward, 0
    while not observation.over:
        observation = environment.act(as_actions(environment, observation, policy(observation)))
        total += observation.reward
        length += 1
    return Episode(total, length, observation.cut)


def as_actions(
    environment: Environment, observation: Observation, choices: Choices
) -> dict[str, Action]:
    """Returns choices as `Environment.act` takes them, with the action types that have no actors.

    Raises:
      ValueError: an action type does not have one choice for each actor.
    """
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
            indices = np.array(chosen, np.int64)
            labels = [kind.choices[i] for i in indices.tolist()]
            actions[name] = CategoricalAction(actors, indices, labels)
    return actions


class RandomPolicy:
    """Each actor chooses uniformly among its legal choices."""

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
) -> list[Sequence[EntityID]]:
    """Returns the legal choices of each actor of an action type, in the order of the actors."""
    space, kind = environment.obs_space, environment.action_space[name]
    mask = observation.actions.get(name)
    if mask is None:
        return []
    count = len(_actors(space, observation, mask))
    if isinstance(mask, SelectEntityMask):
        options: Sequence[EntityID] = _named(space, observation, mask.actee_ids, mask.actee_types)
    else:
        assert not isinstance(kind, SelectEntity)
        options = range(len(kind.choices))
    if mask.mask is None:
        return [options] * count
    legal = np.asarray(mask.mask, np.bool_).reshape(count, len(options)).tolist()
    return [[option for option, ok in zip(options, row, strict=True) if ok] for row in legal]


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
    """Returns the ids of the entities that a mask refers to."""
    if ids is not None:
        return list(ids)
    found: list[EntityID] = []
    for kind in space.entities if types is None else types:
        named = observation.ids.get(kind)
        if named is None:
            count = num_entities(observation.features.get(kind))
            found += [(kind, row) for row in range(count)]
        else:
            found += named
    return found
