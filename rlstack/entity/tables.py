"""From one game's observation to padded arrays, and from arrays of choices to its actions.

Padded arrays have fixed shapes, so everything that carries observations carries these::

    features     {type: float32 [capacity, features]}, types that have any; GLOBAL: [1, features]
    count        {type: int32 []}, rows 0 to count - 1 are real, the others are 0
    visible      {type: bool [capacity]}, of real rows those that the policy sees
    actors       {action: int32 [capacity]}, the slot of each actor, -1 where there is none
    action_mask  {action: bool [capacity * n]}, n choices, or slots for a select-entity action;
                 where there is no actor exactly choice 0 is legal, so it decides nothing

The specs' names tell networks the rest, after a colon: of features their names, of ``visible`` the
slot where the type begins, of an action its kind.

This runs once a step of one environment, so what can be laid out beforehand is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlstack.entity.environment import (
    Action,
    CategoricalAction,
    EntityID,
    Observation,
    SelectEntityAction,
)
from rlstack.entity.errors import no_room, refuse
from rlstack.entity.spaces import GLOBAL, ActionSpace, Categorical, ObsSpace, SelectEntity, Slots
from rlstack.entity.table_specs import action_spec, num_choices, observation_spec, require_use
from rlstack.envs.adapters import EnvError


class Roster(NamedTuple):
    """Who was there and who acts, which names the choices that answer an observation."""

    ids: Mapping[str, Sequence[EntityID]]  # by type, those that have names
    counts: Mapping[str, int]  # by type
    actors: Mapping[str, list[int]]  # by action, slots
    action_mask: Mapping[str, np.ndarray]  # by action, bool [capacity * n]


class _Type(NamedTuple):
    name: str
    first: int  # its first slot
    capacity: int
    width: int


class _Act(NamedTuple):
    name: str
    kind: Any
    mask: np.ndarray  # bool [capacity, n], as it is without actors


class Table:
    """Lays out one environment's entities in padded arrays.

    Attributes:
      name: how messages call the environment.
      slots: where everything stands.
      num_global: how many global features there are.
      observation_spec: nest of ``dm_env.specs`` that ``observe`` follows.
      action_spec: the same for what ``act`` takes, int32 [capacity] by action: the choice's
        position among the choices, or the actee's slot.
    """

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace, name: str):
        """Plans the layout.

        Raises:
          ValueError: there are no actions, or nobody who could take one.
        """
        self.name = name
        self.slots = Slots(obs_space, action_space)
        require_use(obs_space, action_space, name)
        self._types = [
            _Type(t, self.slots.offsets[t], kind.capacity, len(kind.features))
            for t, kind in obs_space.entities.items()
        ]
        self._by_name = {t.name: t for t in self._types}
        self.num_global = len(obs_space.global_features)
        self._acts = []
        for action, kind in action_space.items():
            mask = np.zeros((kind.capacity, num_choices(kind, self.slots)), np.bool_)
            mask[:, 0] = True
            self._acts.append(_Act(action, kind, mask))
        self._vacant = {a.name: np.full(a.kind.capacity, -1, np.int32) for a in self._acts}
        self._home = [(t.name, row) for t in self._types for row in range(t.capacity)]
        self._home += [(GLOBAL, 0)] * self.slots.has_global
        self.observation_spec = observation_spec(obs_space, action_space, self.slots)
        self.action_spec = action_spec(action_space, self.slots)

    def observe(self, observation: Observation) -> tuple[dict[str, Any], Roster]:
        """Returns the padded arrays, fresh ones, and the roster that ``act`` needs.

        It trusts ``observation`` (see ``Validator``), except for room and for ids.

        Raises:
          EnvError: more entities or actors than there is room for, or an unknown id.
        """
        features, visible, count = {}, {}, {}
        given, shown = observation.features, observation.visible
        for name, _, capacity, width in self._types:
            rows = given.get(name)
            number = count[name] = _count(rows)
            if number > capacity:
                no_room(self.name, f"entity type {name!r}", "entities", capacity, number)
            if width:
                table = features[name] = np.zeros((capacity, width), np.float32)
                if number:
                    table[:number] = rows
            seen = visible[name] = np.zeros(capacity, np.bool_)
            seen[:number] = shown.get(name, True) if shown else True
        if self.num_global:
            features[GLOBAL] = np.array(observation.global_features, np.float32)[None]
        actors, mask, acting = self._actions(observation, count)
        padded = {
            "features": features,
            "count": {name: np.array(number, np.int32) for name, number in count.items()},
            "visible": visible,
            "actors": actors,
            "action_mask": mask,
        }
        return padded, Roster(observation.ids, count, acting, mask)

    def act(self, roster: Roster, action: Mapping[str, Any]) -> dict[str, Action]:
        """Returns the actions that choices, ``{action: int32 [capacity]}``, mean to ``roster``."""
        actions: dict[str, Action] = {}
        for name, kind, _ in self._acts:
            slots = roster.actors[name]
            chosen = np.array(action[name][: len(slots)])
            actors = [self.name_of(roster, slot) for slot in slots]
            if type(kind) is SelectEntity:
                actees = [self.name_of(roster, slot) for slot in chosen.tolist()]
                actions[name] = SelectEntityAction(actors, actees)
            else:
                labels = [kind.choices[i] for i in chosen.tolist()]
                actions[name] = CategoricalAction(actors, chosen, labels)
        return actions

    def check_choices(self, roster: Roster, action: Mapping[str, Any]) -> None:
        """Refuses choices that are not legal.

        Raises:
          EnvError: some actor chose what its mask forbids; the message names it.
        """
        for name, kind, blank in self._acts:
            slots = roster.actors[name]
            if not slots:
                continue
            if name not in action:
                what = f"action {name!r}"
                came, way = "none of it", "Give all actions of the action_spec."
                refuse(self.name, what, "must be given", came, way)
            chosen = np.asarray(action[name])[: len(slots)]
            legal = roster.action_mask[name].reshape(blank.shape)
            for row, choice in enumerate(chosen.tolist()):
                if 0 <= choice < blank.shape[1] and legal[row, choice]:
                    continue
                allowed = np.flatnonzero(legal[row]).tolist()
                what = "actee slots" if type(kind) is SelectEntity else "choices"
                raise EnvError(
                    f"{self.name}: action {name!r}, actor {self.name_of(roster, slots[row])!r}: "
                    f"must take one of its legal {what} {allowed}; got {choice}. Choose by the "
                    f"observation's 'action_mask'."
                )

    def name_of(self, roster: Roster, slot: int) -> EntityID:
        """Returns the id of the entity at ``slot``; (type, row) where it has no name."""
        home = self._home[slot]
        ids = roster.ids.get(home[0])
        if ids is not None:
            return ids[home[1]]
        return GLOBAL if home[0] == GLOBAL else home

    def _actions(self, observation: Observation, count: dict[str, int]) -> tuple[dict, dict, dict]:
        """Returns the padded actors and masks and the acting slots, all by action."""
        actors, masks = {}, {}
        acting: dict[str, list[int]] = {}
        slot_of = functools.partial(self._slot_of, observation, count, [])
        for name, kind, blank in self._acts:
            row = actors[name] = self._vacant[name].copy()
            mask = blank.copy()
            masks[name] = mask.reshape(-1)
            offer: Any = observation.actions.get(name)
            if offer is None:
                acting[name] = []
                continue
            legal = True if offer.mask is None else offer.mask
            if type(kind) is SelectEntity or type(kind) is Categorical:
                slots = self._who(offer.actor_ids, offer.actor_types, count, slot_of)
            else:
                slots = [self.slots.total - 1]
            number = len(slots)
            if number > kind.capacity:
                no_room(self.name, f"action {name!r}", "actors", kind.capacity, number)
            acting[name] = slots
            if not number:
                continue
            row[:number] = slots
            if type(kind) is SelectEntity:
                mask[:number] = False
                actees = self._who(offer.actee_ids, offer.actee_types, count, slot_of)
                mask[:number, actees] = legal
            else:
                mask[:number] = legal
        return actors, masks, acting

    def _who(
        self,
        ids: Sequence[EntityID] | None,
        types: Sequence[str] | None,
        count: dict[str, int],
        slot_of: Callable[[EntityID], int],
    ) -> list[int]:
        """Returns the slots of the entities meant: those of ids, else of types, else all."""
        if ids is not None:
            return [slot_of(entity) for entity in ids]
        slots: list[int] = []
        for name in self._by_name if types is None else types:
            first = self._by_name[name].first
            slots += range(first, first + count[name])
        return slots

    def _slot_of(
        self, observation: Observation, count: dict[str, int], known: list[dict], entity: EntityID
    ) -> int:
        if not known:  # made when an id is asked for first
            known.append({})
            for name, ids in observation.ids.items():
                first = self._by_name[name].first
                known[0].update(zip(ids, range(first, first + count[name]), strict=False))
        try:
            return known[0][entity]
        except KeyError:
            raise EnvError(
                f"{self.name}: actor or actee {entity!r}: must be among the ids of the observation;"
                f" got ids {list(known[0])!s:.200}. List it in Observation.ids under its type."
            ) from None


def _count(rows: Any) -> int:
    if rows is None:
        return 0
    return int(rows) if isinstance(rows, int | np.integer) else len(rows)
