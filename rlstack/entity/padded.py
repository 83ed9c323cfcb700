"""Conversion between a game's observations and actions and padded arrays of fixed shapes.

Pools, replay and networks carry an observation as these arrays::

    features     {type: float32 [capacity, features]}, types that have features;
                 GLOBAL: [1, global features]
    count        {type: int32 []}, the number of entities; their rows come first, the others are 0
    visible      {type: bool [capacity]}, whether the policy sees the entity; False without one
    actors       {action: int32 [capacity]}, the slot of each actor, -1 where there is none
    action_mask  {action: bool [capacity * n]}, over n choices, or n slots of a select-entity
                 action; without an actor only choice 0 is legal, so nothing is left to decide

The names of the specs contain, after a colon, the information that shapes lack: the features of a
type, separated by commas, in ``features``; the first slot of a type in ``visible``; the kind of an
action in the action spec. `rlstack.networks.ragged` reads these names.

The conversion runs at every step of every environment, so everything that depends only on the
spaces is computed once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.entity.environment import (
    Action,
    CategoricalAction,
    EntityID,
    Observation,
    SelectEntityAction,
    num_entities,
)
from rlstack.entity.errors import refuse, refuse_too_many
from rlstack.entity.spaces import (
    GLOBAL,
    ActionSpace,
    ActionType,
    Categorical,
    GlobalCategorical,
    ObsSpace,
    SelectEntity,
    Slots,
)

Padded = dict[str, dict[str, np.ndarray]]
"""The arrays of one observation: by entry, then by entity type or action type."""

_KINDS = {
    Categorical: "categorical",
    GlobalCategorical: "global_categorical",
    SelectEntity: "select_entity",
}


class ActionContext(NamedTuple):
    """The parts of an observation that are needed to decode the action that follows it."""

    ids: Mapping[str, Sequence[EntityID]]  # entity ids by entity type, for types with ids
    counts: Mapping[str, int]  # number of entities by entity type
    actors: Mapping[str, list[int]]  # slots of the actors by action type
    action_mask: Mapping[str, np.ndarray]  # legal choices by action type: bool [capacity * n]


class _TypeRows(NamedTuple):
    name: str
    first: int  # first slot of the type
    capacity: int
    width: int  # number of features


class _ActionRows(NamedTuple):
    name: str
    kind: ActionType
    mask: np.ndarray  # bool [capacity, n], the mask without any actors


class PaddedCodec:
    """Encodes observations of one environment as padded arrays and decodes its actions.

    Attributes:
      name: name of the environment in errors.
      slots: the slots of its entities.
      num_global: number of global features.
      observation_spec: nested ``dm_env.specs`` of the arrays that `encode` returns.
      action_spec: the specs of the actions that `decode` takes, by action type int32 [capacity]:
          the position of the choice, or the slot of the actee.
    """

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace, name: str):
        """Computes the layout of the arrays.

        Raises:
          ValueError: there are no action types, or there is one that no entity can take.
        """
        self.name = name
        self.slots = Slots(obs_space, action_space)
        _require_actions(obs_space, action_space, name)
        self._types = [
            _TypeRows(t, self.slots.offsets[t], kind.capacity, len(kind.features))
            for t, kind in obs_space.entities.items()
        ]
        self._by_name = {t.name: t for t in self._types}
        self.num_global = len(obs_space.global_features)
        self._actions = []
        for action, kind in action_space.items():
            mask = np.zeros((kind.capacity, num_choices(kind, self.slots)), np.bool_)
            mask[:, 0] = True
            self._actions.append(_ActionRows(action, kind, mask))
        self._no_actors = {a.name: np.full(a.kind.capacity, -1, np.int32) for a in self._actions}
        self._type_and_row = [(t.name, row) for t in self._types for row in range(t.capacity)]
        self._type_and_row += [(GLOBAL, 0)] * self.slots.has_global
        self.observation_spec = _observation_spec(obs_space, action_space, self.slots)
        self.action_spec = action_spec(action_space, self.slots)

    def encode(self, observation: Observation) -> tuple[Padded, ActionContext]:
        """Returns the padded arrays, newly allocated, and the context that `decode` needs.

        Assumes that `Validator` accepts ``observation``; checks only capacities and ids.

        Raises:
          EnvError: more entities or actors than the capacity, or an unknown id.
        """
        features, visible, count = {}, {}, {}
        given, shown = observation.features, observation.visible
        for name, _, capacity, width in self._types:
            rows = given.get(name)
            number = count[name] = num_entities(rows)
            if number > capacity:
                refuse_too_many(self.name, f"entity type {name!r}", "entities", capacity, number)
            if width:
                array = features[name] = np.zeros((capacity, width), np.float32)
                if number:
                    array[:number] = rows
            seen = visible[name] = np.zeros(capacity, np.bool_)
            seen[:number] = shown.get(name, True) if shown else True
        if self.num_global:
            features[GLOBAL] = np.array(observation.global_features, np.float32)[None]
        actors, mask, acting = self._encode_actions(observation, count)
        padded: Padded = {
            "features": features,
            "count": {name: np.array(number, np.int32) for name, number in count.items()},
            "visible": visible,
            "actors": actors,
            "action_mask": mask,
        }
        return padded, ActionContext(observation.ids, count, acting, mask)

    def decode(self, context: ActionContext, action: Mapping[str, np.ndarray]) -> dict[str, Action]:
        """Converts choices to actions with ids and labels.

        Args:
          context: the context that `encode` returned for the observation before these choices.
          action: the choices by action type: int32 [capacity].
        """
        actions: dict[str, Action] = {}
        for name, kind, _ in self._actions:
            slots = context.actors[name]
            chosen = np.array(action[name][: len(slots)])
            actors = [self.entity_id(context, slot) for slot in slots]
            if isinstance(kind, SelectEntity):
                actees = [self.entity_id(context, slot) for slot in chosen.tolist()]
                actions[name] = SelectEntityAction(actors, actees)
            else:
                labels = [kind.choices[i] for i in chosen.tolist()]
                actions[name] = CategoricalAction(actors, chosen, labels)
        return actions

    def check_choices(self, context: ActionContext, action: Mapping[str, np.ndarray]) -> None:
        """Checks that choices are legal.

        Raises:
          EnvError: an action type is missing, or an actor's choice is not legal.
        """
        for name, kind, blank in self._actions:
            slots = context.actors[name]
            if not slots:
                continue
            if name not in action:
                what, fix = f"action {name!r}", "Give every action type of the action_spec."
                refuse(self.name, what, "must be given", "nothing for it", fix)
            chosen = np.asarray(action[name])[: len(slots)]
            legal = context.action_mask[name].reshape(blank.shape)
            for row, choice in enumerate(chosen.tolist()):
                if 0 <= choice < blank.shape[1] and legal[row, choice]:
                    continue
                allowed = np.flatnonzero(legal[row]).tolist()
                what = "actee slots" if isinstance(kind, SelectEntity) else "choices"
                raise EnvError(
                    f"{self.name}: action {name!r}, actor "
                    f"{self.entity_id(context, slots[row])!r}: must take one of its legal {what} "
                    f"{allowed}; got {choice}. Apply the observation's 'action_mask'."
                )

    def entity_id(self, context: ActionContext, slot: int) -> EntityID:
        """Returns the id of the entity at ``slot``, or (type, row) if its type has no ids."""
        type_and_row = self._type_and_row[slot]
        ids = context.ids.get(type_and_row[0])
        if ids is not None:
            return ids[type_and_row[1]]
        return GLOBAL if type_and_row[0] == GLOBAL else type_and_row

    def _encode_actions(
        self, observation: Observation, count: dict[str, int]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, list[int]]]:
        """Returns the padded actors, the padded masks and the actors' slots, by action type."""
        actors, masks = {}, {}
        acting: dict[str, list[int]] = {}
        slot_of = functools.partial(self._slot_of, observation, count, [])
        for name, kind, blank in self._actions:
            row = actors[name] = self._no_actors[name].copy()
            mask = blank.copy()
            masks[name] = mask.reshape(-1)
            given: Any = observation.actions.get(name)  # the mask class that belongs to `kind`
            if given is None:
                acting[name] = []
                continue
            legal = True if given.mask is None else given.mask
            if isinstance(kind, GlobalCategorical):
                slots = [self.slots.total - 1]
            else:
                slots = self._slots_of(given.actor_ids, given.actor_types, count, slot_of)
            number = len(slots)
            if number > kind.capacity:
                refuse_too_many(self.name, f"action {name!r}", "actors", kind.capacity, number)
            acting[name] = slots
            if not number:
                continue
            row[:number] = slots
            if isinstance(kind, SelectEntity):
                mask[:number] = False
                actees = self._slots_of(given.actee_ids, given.actee_types, count, slot_of)
                mask[:number, actees] = legal
            else:
                mask[:number] = legal
        return actors, masks, acting

    def _slots_of(
        self,
        ids: Sequence[EntityID] | None,
        types: Sequence[str] | None,
        count: dict[str, int],
        slot_of: Callable[[EntityID], int],
    ) -> list[int]:
        """Returns the slots of entities with these ids, or of these types, or of all entities."""
        if ids is not None:
            return [slot_of(entity) for entity in ids]
        slots: list[int] = []
        for name in self._by_name if types is None else types:
            first = self._by_name[name].first
            slots += range(first, first + count[name])
        return slots

    def _slot_of(
        self,
        observation: Observation,
        count: dict[str, int],
        cache: list[dict[EntityID, int]],
        entity: EntityID,
    ) -> int:
        if not cache:  # built only when needed: most observations never refer to an id
            cache.append({})
            for name, ids in observation.ids.items():
                first = self._by_name[name].first
                cache[0].update(zip(ids, range(first, first + count[name]), strict=False))
        try:
            return cache[0][entity]
        except KeyError:
            raise EnvError(
                f"{self.name}: actor or actee {entity!r}: must be among the ids of the observation;"
                f" got ids {list(cache[0])!s:.200}. List it in Observation.ids under its type."
            ) from None


def num_choices(kind: ActionType, slots: Slots) -> int:
    """Returns the size n of one actor's mask: the number of choices, or of slots."""
    return slots.total if isinstance(kind, SelectEntity) else len(kind.choices)


def action_spec(action_space: ActionSpace, slots: Slots) -> dict[str, specs.BoundedArray]:
    """Returns the specs of the choices that `PaddedCodec.decode` takes."""
    return {
        a: specs.BoundedArray(
            (kind.capacity,),
            np.int32,
            0,
            num_choices(kind, slots) - 1,
            f"actions.{a}: {_KINDS[type(kind)]}",
        )
        for a, kind in action_space.items()
    }


def _observation_spec(
    obs_space: ObsSpace, action_space: ActionSpace, slots: Slots
) -> dict[str, dict[str, specs.Array]]:
    kinds = obs_space.entities
    features = {t: (k.capacity, k.features) for t, k in kinds.items() if k.features}
    if obs_space.global_features:
        features[GLOBAL] = (1, obs_space.global_features)
    return {
        "features": {
            t: specs.Array((rows, len(names)), np.float32, f"features.{t}: {','.join(names)}")
            for t, (rows, names) in features.items()
        },
        "count": {
            t: specs.BoundedArray((), np.int32, 0, kind.capacity, f"count.{t}")
            for t, kind in kinds.items()
        },
        "visible": {
            t: specs.Array((kind.capacity,), np.bool_, f"visible.{t}: {slots.offsets[t]}")
            for t, kind in kinds.items()
        },
        "actors": {
            a: specs.BoundedArray((kind.capacity,), np.int32, -1, slots.total - 1, f"actors.{a}")
            for a, kind in action_space.items()
        },
        "action_mask": {
            a: specs.Array(
                (kind.capacity * num_choices(kind, slots),), np.bool_, f"action_mask.{a}"
            )
            for a, kind in action_space.items()
        },
    }


def _require_actions(obs_space: ObsSpace, action_space: ActionSpace, name: str) -> None:
    """Checks that every action type can have an actor."""
    if not action_space:
        raise ValueError(f"{name}: action_space: must have an action type; got none. Add one.")
    for action, kind in action_space.items():
        if isinstance(kind, SelectEntity | Categorical) and not obs_space.entities:
            raise ValueError(
                f"{name}: action {action!r}: needs entity types whose entities can act; got an "
                "obs_space without any. Declare entity types, or make it a GlobalCategorical."
            )
