"""Ragged records and their packing by a Python loop over environments: the unvectorised reference.

It makes the same records as `BatchView.vec_obs` and `VecObs.packing` of `rlstack.entity`, and uses
numpy only inside each environment. Actions must be categorical, as those of MultiSnake are.
"""

from __future__ import annotations

import numpy as np

from rlstack.entity import GLOBAL, Slots
from rlstack.entity.vec_obs import Ragged, VecActionMask, VecObs
from rlstack.networks.ragged.packing import PackedIndex
from rlstack.types import PyTree, TimeStep


def vec_obs(slots: Slots, timestep: TimeStep) -> VecObs:
    """Returns the ragged records of a pool's rows, ``[B, ...]``."""
    observation: PyTree = timestep.observation
    places = list(slots.ranges())
    features: dict[str, list] = {name: [] for name, _ in places}
    visible: dict[str, list] = {name: [] for name, _ in places if name != GLOBAL}
    actors: dict[str, list] = {name: [] for name in observation["actors"]}
    masks: dict[str, list] = {name: [] for name in observation["actors"]}
    lengths = []
    for i in range(len(timestep.reward)):
        length = 0
        index = np.full(slots.total, -1, np.int32)
        for name, where in places:
            count = 1 if name == GLOBAL else int(observation["count"][name][i])
            features[name].append(observation["features"][name][i, :count])
            if name != GLOBAL:
                visible[name].append(observation["visible"][name][i, :count])
            index[where.start : where.start + count] = np.arange(length, length + count)
            length += count
        lengths.append(length)
        for name, rows in observation["actors"].items():
            acting = rows[i][rows[i] >= 0]
            actors[name].append(index[acting])
            legal = observation["action_mask"][name][i].reshape(rows.shape[1], -1)
            masks[name].append(legal[: len(acting)])
    return VecObs(
        {name: _joined(parts) for name, parts in features.items()},
        {name: _joined(parts) for name, parts in visible.items()},
        {
            name: VecActionMask(
                _joined(actors[name]),
                None if all(mask.all() for mask in masks[name]) else _joined(masks[name]),
            )
            for name in actors
        },
        np.asarray(timestep.reward),
        np.asarray(timestep.step_type) == 2,
        np.array(lengths, np.int32),
    )


def packing(observed: VecObs) -> PackedIndex:
    """Returns how entities are packed into rows of the longest length, best fit decreasing."""
    lengths = observed.lengths.tolist()
    width = max(lengths)
    with_room: list[list[int]] = [[] for _ in range(width + 1)]
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = next((r for r in range(lengths[i], width + 1) if with_room[r]), None)
        if room is None:
            rows.append([i])
            with_room[width - lengths[i]].append(len(rows) - 1)
        else:
            row = with_room[room].pop()
            rows[row].append(i)
            with_room[room - lengths[i]].append(row)
    first = [0]
    for length in lengths:
        first.append(first[-1] + length)
    entities = np.zeros((len(rows), width), np.int32)
    batch = np.full((len(rows), width), -1, np.int32)
    inverse = np.zeros(first[-1], np.int32)
    for row, members in enumerate(rows):
        column = 0
        for i in members:
            here = slice(column, column + lengths[i])
            numbers = np.arange(first[i], first[i + 1])
            entities[row, here], batch[row, here] = numbers, i
            inverse[numbers] = np.arange(row * width + column, row * width + here.stop)
            column += lengths[i]
    return PackedIndex(entities, batch, inverse)


def _joined(parts: list[np.ndarray]) -> Ragged:
    lengths = np.array([len(part) for part in parts], np.int32)
    return Ragged(
        np.concatenate(parts), np.repeat(np.arange(len(parts), dtype=np.int32), lengths), lengths
    )
