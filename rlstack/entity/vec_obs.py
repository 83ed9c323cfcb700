"""Converts padded entity observations to ragged records, and ragged actions to padded ones.

A pool's rows are padded to the capacities of the space. A `VecObs` holds only the entities that
exist, one after the other. An entity's *index* is its number within its environment: types in the
order of the space, `GLOBAL` last. This module uses numpy over the whole batch, without Python loops
over environments or entities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlstack.entity.spaces import GLOBAL, ActionSpace, ObsSpace, SelectEntity, Slots
from rlstack.networks.ragged.packing import PackedIndex, ladder, pack, packed_index

if TYPE_CHECKING:
    from rlstack.types import TimeStep

PaddedBatch = Mapping[str, Mapping[str, np.ndarray]]
"""Padded observations, ``[B, ...]``: by entry, then by entity type or action type."""

_LAST = 2  # rlstack.types.StepType.LAST


class Ragged(NamedTuple):
    """N values of B rows of different lengths, row after row; padding may follow."""

    values: np.ndarray  # [N, ...]
    row_ids: np.ndarray  # [N] int32, the row of each value; B at padding
    lengths: np.ndarray  # [B] int32, the number of values of each row

    def with_capacity(self, capacity: int | None = None) -> Ragged:
        """Returns the same rows followed by zeros, so that N is ``capacity``.

        By default N is the next size of `rlstack.networks.ragged.packing.ladder`. A jitted function
        of the result then compiles once for each of a few sizes, not once for each N.

        Raises:
          ValueError: there are more values than ``capacity``.
        """
        size = len(self.values)
        capacity = ladder(size) if capacity is None else capacity
        if size > capacity:
            raise ValueError(f"with_capacity: capacity must be at least {size}; got {capacity}.")
        values = np.zeros((capacity, *self.values.shape[1:]), self.values.dtype)
        values[:size] = self.values
        row_ids = np.full(capacity, len(self.lengths), np.int32)
        row_ids[:size] = self.row_ids
        return Ragged(values, row_ids, self.lengths)


class VecActionMask(NamedTuple):
    """The actors of an action type in each environment, and their legal choices."""

    actors: Ragged  # [N] int32, indices
    mask: Ragged | None
    # For a (global) categorical action: bool [N, choices]. For a select-entity action: bool, the
    # pairs of actor and actee of each environment, actor by actor. None: every choice is legal.
    actees: Ragged | None = None  # [M] int32, indices, ascending; select-entity actions only


class VecObs(NamedTuple):
    """The observations of B environments."""

    features: dict[str, Ragged]  # features by entity type, and GLOBAL: float32 [N, features]
    visible: dict[str, Ragged]  # visibility by entity type: bool [N]
    action_masks: dict[str, VecActionMask]  # actors and legal choices by action type
    reward: np.ndarray  # [B] float32
    done: np.ndarray  # [B] bool, whether the episode ended, for any reason
    lengths: np.ndarray  # [B] int32, the number of entities, GLOBAL included

    def flat_actors(self, action: str) -> np.ndarray:
        """Returns the positions of an action's actors among all entities of the batch, [N] int32.

        Entities are counted environment by environment, and by index within each.
        """
        first = (np.cumsum(self.lengths) - self.lengths).astype(np.int32)
        actors = self.action_masks[action].actors
        size = int(actors.lengths.sum())
        return actors.values[:size] + first[actors.row_ids[:size]]

    def packing(self, width: int | None = None) -> PackedIndex:
        """Returns the packing of the batch's entities into rows of ``width`` for attention.

        The entities of one environment are adjacent in one row. By default rows are as wide as the
        environment with the most entities.
        """
        widest = int(self.lengths.max(initial=0)) if width is None else width
        return packed_index(pack(self.lengths, widest), self.lengths, widest)


class BatchView:
    """Converts a pool's padded batches to ragged records and back.

    Attributes:
      slots: the slots of an environment's entities.
    """

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace):
        """Prepares the conversion for environments with these spaces."""
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
                    features[name] = _select(observation["features"][name], here)
                continue
            rows = observation["features"].get(name)
            empty = (*here.shape, 0)
            features[name] = _select(np.zeros(empty, np.float32) if rows is None else rows, here)
            visible[name] = _select(observation["visible"][name], here)
        masks = {name: self._mask(name, observation, index) for name in self._actions}
        done = np.asarray(timestep.step_type) == _LAST
        lengths = np.count_nonzero(present, axis=1).astype(np.int32)
        return VecObs(features, visible, masks, np.asarray(timestep.reward), done, lengths)

    def present(self, observation: PaddedBatch) -> np.ndarray:
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
        self, observation: PaddedBatch, action: Mapping[str, np.ndarray]
    ) -> dict[str, Ragged]:
        """Returns the choice of each actor: a position among the choices, or an actee's index.

        Args:
          observation: observations of a pool, ``[B, ...]``.
          action: the padded actions after it, int32 ``[B, capacity]`` by action type.
        """
        index = slot_to_index(self.present(observation))
        chosen = {}
        for name, kind in self._actions.items():
            acting = observation["actors"][name] >= 0
            values = np.asarray(action[name])
            if isinstance(kind, SelectEntity):
                values = np.take_along_axis(index, np.where(acting, values, 0), axis=1)
            chosen[name] = _select(values, acting)
        return chosen

    def padded_actions(
        self, observation: PaddedBatch, action: Mapping[str, Ragged]
    ) -> dict[str, np.ndarray]:
        """Returns the padded actions of ragged ones; the inverse of `ragged_actions`."""
        slot = index_to_slot(self.present(observation))
        padded = {}
        for name, kind in self._actions.items():
            chosen = action[name]
            if isinstance(kind, SelectEntity):
                size = int(chosen.lengths.sum())
                values = slot[chosen.row_ids[:size], chosen.values[:size]]
                chosen = Ragged(values, chosen.row_ids[:size], chosen.lengths)
            padded[name] = _to_padded(name, chosen, kind.capacity)
        return padded

    def _mask(self, name: str, observation: PaddedBatch, index: np.ndarray) -> VecActionMask:
        slots = observation["actors"][name]
        acting = slots >= 0
        actors = _select(np.take_along_axis(index, np.where(acting, slots, 0), axis=1), acting)
        legal = observation["action_mask"][name].reshape(*slots.shape, -1)
        if not isinstance(self._actions[name], SelectEntity):
            mask = _select(legal, acting)
            return VecActionMask(actors, None if mask.values.all() else mask)
        legal = legal & acting[:, :, None]
        chosen = legal.any(axis=1)
        pairs = (acting[:, :, None] & chosen[:, None, :]).reshape(len(slots), -1)
        mask = _select(legal.reshape(len(slots), -1), pairs)
        return VecActionMask(actors, None if mask.values.all() else mask, _select(index, chosen))


def slot_to_index(present: np.ndarray) -> np.ndarray:
    """Returns each slot's entity index, int32 ``[B, slots]``; -1 where there is no entity.

    Args:
      present: bool [B, slots], which slots hold an entity.
    """
    return np.where(present, np.cumsum(present, axis=1, dtype=np.int32) - 1, -1).astype(np.int32)


def index_to_slot(present: np.ndarray) -> np.ndarray:
    """Returns each entity's slot by index, int32 ``[B, slots]``; -1 after the last entity.

    Args:
      present: bool [B, slots], which slots hold an entity.
    """
    rows, slots = np.nonzero(present)
    found = np.full(present.shape, -1, np.int32)
    found[rows, slot_to_index(present)[rows, slots]] = slots
    return found


def _select(array: np.ndarray, chosen: np.ndarray) -> Ragged:
    """Returns the values of ``array`` ([B, C, ...]) that are ``chosen`` ([B, C] bool)."""
    places = np.flatnonzero(chosen)
    values = array.reshape(chosen.size, *array.shape[2:]).take(places, axis=0)
    lengths = np.count_nonzero(chosen, axis=1).astype(np.int32)
    row_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return Ragged(values, row_ids, lengths)


def _to_padded(name: str, ragged: Ragged, capacity: int) -> np.ndarray:
    """Returns int32 ``[B, capacity]``, zeros after each row's values."""
    longest = int(ragged.lengths.max(initial=0))
    if longest > capacity:
        raise ValueError(
            f"padded_actions: {name!r} must have at most {capacity} actors, its capacity; "
            f"got {longest}."
        )
    size = int(ragged.lengths.sum())
    first = np.cumsum(ragged.lengths) - ragged.lengths
    rows = ragged.row_ids[:size]
    padded = np.zeros((len(ragged.lengths), capacity), np.int32)
    padded[rows, np.arange(size) - first[rows]] = ragged.values[:size]
    return padded
