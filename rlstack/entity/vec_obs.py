"""Batches of entity observations as ragged records, and actions back.

A pool's rows are padded. Here they become what there is and no more: entities are numbered within
their environment by *index* (types in the order of the space, `GLOBAL` last), actors and actees are
such indices. All of it is numpy over the whole batch, without a loop over environments or entities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlstack.entity.ragged import (
    PackedIndex,
    Ragged,
    pack,
    packed_index,
    select,
    to_padded,
)
from rlstack.entity.spaces import GLOBAL, ActionSpace, ObsSpace, SelectEntity, Slots

if TYPE_CHECKING:
    from rlstack.types import TimeStep

_LAST = 2  # rlstack.types.StepType.LAST


class VecActionMask(NamedTuple):
    """Who takes an action in each environment, and what they may choose."""

    actors: Ragged  # [N] int32, indices
    mask: Ragged | None
    # A (global) categorical action: bool [N, choices]. A select-entity action: bool, for each
    # environment its actors times its actees, actor by actor. None: everything is legal.
    actees: Ragged | None = None  # [M] int32, indices, ascending; select-entity actions only


class VecObs(NamedTuple):
    """What B environments show."""

    features: dict[str, Ragged]  # by type, and GLOBAL: float32 [N, features]
    visible: dict[str, Ragged]  # by type: bool [N]
    action_masks: dict[str, VecActionMask]  # by action
    reward: np.ndarray  # [B] float32
    done: np.ndarray  # [B] bool, whether the episode ended, for whatever reason
    lengths: np.ndarray  # [B] int32, the number of entities, GLOBAL included


class BatchView:
    """Sees a pool's padded batches as ragged records.

    Attributes:
      slots: the padded layout.
    """

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace):
        """Prepares for batches of environments with these spaces."""
        self.slots = Slots(obs_space, action_space)
        self._obs_space = obs_space
        self._actions = dict(action_space)

    def vec_obs(self, timestep: TimeStep) -> VecObs:
        """Returns the ragged records of a pool's rows, ``[B, ...]``."""
        observation = timestep.observation
        present = self.present(observation)
        index = slot_to_index(present)
        features, visible = {}, {}
        for name, places in self.slots.ranges():
            here = present[:, places.start : places.stop]
            if name == GLOBAL:
                if self._obs_space.global_features:
                    features[name] = select(observation["features"][name], here)
                continue
            table = observation["features"].get(name)
            empty = (*here.shape, 0)
            features[name] = select(np.zeros(empty, np.float32) if table is None else table, here)
            visible[name] = select(observation["visible"][name], here)
        masks = {name: self._mask(name, observation, index) for name in self._actions}
        done = np.asarray(timestep.step_type) == _LAST
        lengths = np.count_nonzero(present, axis=1).astype(np.int32)
        return VecObs(features, visible, masks, np.asarray(timestep.reward), done, lengths)

    def present(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Returns which slots hold an entity, bool ``[B, slots]``."""
        rows = len(next(iter(observation["actors"].values())))
        columns = [
            np.ones((rows, 1), np.bool_)
            if name == GLOBAL
            else np.arange(len(places)) < observation["count"][name][:, None]
            for name, places in self.slots.ranges()
        ]
        return np.concatenate(columns, axis=1)

    def ragged_actions(
        self, observation: Mapping[str, Any], action: Mapping[str, np.ndarray]
    ) -> dict[str, Ragged]:
        """Returns what each actor chose: a choice, or the index of an actee.

        Args:
          observation: a pool's, ``[B, ...]``.
          action: the padded actions that answer it, int32 ``[B, capacity]`` by name.
        """
        index = slot_to_index(self.present(observation))
        chosen = {}
        for name, kind in self._actions.items():
            acting = observation["actors"][name] >= 0
            values = np.asarray(action[name])
            if isinstance(kind, SelectEntity):
                values = np.take_along_axis(index, np.where(acting, values, 0), axis=1)
            chosen[name] = select(values, acting)
        return chosen

    def padded_actions(
        self, observation: Mapping[str, Any], action: Mapping[str, Ragged]
    ) -> dict[str, np.ndarray]:
        """Returns the padded actions that say what ``ragged_actions`` does; its inverse."""
        slot = index_to_slot(self.present(observation))
        padded = {}
        for name, kind in self._actions.items():
            chosen = action[name]
            if isinstance(kind, SelectEntity):
                size = int(chosen.lengths.sum())
                values = slot[chosen.row_ids[:size], chosen.values[:size]]
                chosen = Ragged(values, chosen.row_ids[:size], chosen.lengths)
            padded[name] = to_padded(chosen, kind.capacity).astype(np.int32)
        return padded

    def _mask(self, name: str, observation: Mapping[str, Any], index: np.ndarray) -> VecActionMask:
        slots = observation["actors"][name]
        acting = slots >= 0
        actors = select(np.take_along_axis(index, np.where(acting, slots, 0), axis=1), acting)
        legal = observation["action_mask"][name].reshape(*slots.shape, -1)
        if not isinstance(self._actions[name], SelectEntity):
            mask = select(legal, acting)
            return VecActionMask(actors, None if mask.values.all() else mask)
        legal = legal & acting[:, :, None]
        chosen = legal.any(axis=1)
        pairs = (acting[:, :, None] & chosen[:, None, :]).reshape(len(slots), -1)
        mask = select(legal.reshape(len(slots), -1), pairs)
        return VecActionMask(actors, None if mask.values.all() else mask, select(index, chosen))


def slot_to_index(present: np.ndarray) -> np.ndarray:
    """Returns each slot's entity index, int32 ``[B, slots]``; -1 where there is no entity.

    Args:
      present: bool [B, slots], which slots hold an entity.
    """
    return np.where(present, np.cumsum(present, axis=1, dtype=np.int32) - 1, -1).astype(np.int32)


def index_to_slot(present: np.ndarray) -> np.ndarray:
    """Returns each entity's slot by index, int32 ``[B, slots]``; -1 behind the last entity.

    Args:
      present: bool [B, slots], which slots hold an entity.
    """
    rows, slots = np.nonzero(present)
    found = np.full(present.shape, -1, np.int32)
    found[rows, slot_to_index(present)[rows, slots]] = slots
    return found


def flat_actors(observed: VecObs, action: str) -> np.ndarray:
    """Returns the actors' numbers among the entities of the whole batch, [N] int32.

    Those are counted environment by environment, within each by index.
    """
    first = (np.cumsum(observed.lengths) - observed.lengths).astype(np.int32)
    actors = observed.action_masks[action].actors
    size = int(actors.lengths.sum())
    return actors.values[:size] + first[actors.row_ids[:size]]


def packing(observed: VecObs, width: int | None = None) -> PackedIndex:
    """Returns how the entities of a batch are packed into rows, by default of the longest length.

    An environment's entities stand side by side in one row, so attention needs to look no further.
    """
    widest = int(observed.lengths.max(initial=0)) if width is None else width
    return packed_index(pack(observed.lengths, widest), observed.lengths, widest)
