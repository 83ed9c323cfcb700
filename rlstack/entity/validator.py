"""Checks of what a game shows, with errors that say who is wrong, by which rule, and the way out.

A wrong observation otherwise shows up late and elsewhere: as NaN in the loss, or as an actor whose
choices act on somebody else. The checks cost about as much as the padding itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from rlstack.entity.environment import Observation
from rlstack.entity.errors import no_room, refuse
from rlstack.entity.offers import OfferCheck, is_hashable
from rlstack.entity.spaces import GLOBAL, ActionSpace, ObsSpace

_FEW = 64  # below this many values Python's own loop beats numpy's fixed cost of a reduction
_MOST = float(np.finfo(np.float32).max)
_FINITE = "features must be finite float32"


class Validator:
    """Checks observations of one environment against its spaces."""

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace, name: str):
        """Prepares to check; messages call the environment ``name``."""
        self._name = name
        self._types = dict(obs_space.entities)
        self._global = obs_space.global_features
        self._offers = OfferCheck(action_space, name)

    def check(self, observation: Observation) -> None:
        """Checks everything that ``observation`` says.

        Raises:
          EnvError: a ValueError that names the environment, the type or action and the entity.
        """
        if not isinstance(observation, Observation):
            rule = "reset and act must return an Observation"
            self._refuse("observation", rule, type(observation).__name__, "Return one.")
        count = self._check_entities(observation)
        self._check_ids(observation, count)
        for name, rows in observation.visible.items():
            self._check_visible(name, rows, count)
        self._check_global(observation.global_features)
        for name, offer in observation.actions.items():
            self._offers.check(name, offer, observation, count)
        self._check_outcome(observation)

    def _refuse(self, what: str, rule: str, came: Any, way: str) -> NoReturn:
        refuse(self._name, what, rule, came, way)

    # Entities.

    def _check_entities(self, observation: Observation) -> dict[str, int]:
        """Checks features by type and returns how many entities there are of each."""
        count = dict.fromkeys(self._types, 0)
        for name, rows in observation.features.items():
            kind = self._types.get(name)
            what = f"entity type {name!r}"
            if kind is None:
                way = "Declare it in obs_space, or for GLOBAL give global_features."
                self._refuse(what, f"must be one of {list(self._types)}", name, way)
            width = len(kind.features)
            if isinstance(rows, int | np.integer) and not isinstance(rows, bool):
                if width or rows < 0:
                    rule = f"must give features [count, {width}], or a count if it has none"
                    self._refuse(what, rule, rows, "Give a row of features for each entity.")
                number = int(rows)
            else:
                number = self._check_features(what, kind.features, rows, observation.ids.get(name))
            if number > kind.capacity:
                no_room(self._name, what, "entities", kind.capacity, number)
            count[name] = number
        return count

    def _check_features(self, what: str, names: Sequence[str], rows: Any, ids: Any) -> int:
        """Checks one type's features and returns how many rows there are."""
        array = self._array(what, rows)
        if array.ndim == 1 and not len(array):
            return 0
        if array.ndim != 2 or array.shape[1] != len(names):
            rule = f"features must be [count, {len(names)}], {', '.join(names) or 'none of them'}"
            came = f"shape {array.shape}"
            self._refuse(what, rule, came, "Give one row per entity in the order of the space.")
        if not _finite(array):
            row, column = np.argwhere(~(np.abs(array) <= _MOST))[0].tolist()
            entity = ids[row] if ids is not None and row < len(ids) else f"row {row}"
            came = f"{names[column]} = {array[row, column]}"
            way = "Find where it is computed, or clip it."
            self._refuse(f"{what}, entity {entity!r}", _FINITE, came, way)
        return len(array)

    def _array(self, what: str, rows: Any) -> np.ndarray:
        try:
            array = np.asarray(rows)
        except ValueError:  # rows of different lengths
            array = np.empty((), object)
        if array.dtype.kind not in "fiub":
            came = f"{type(rows).__name__} of dtype {array.dtype}"
            rule = "features must be numbers, in rows of one length"
            self._refuse(what, rule, came, "Encode categories one-hot (rlstack.entity.derive).")
        return array

    def _check_ids(self, observation: Observation, count: dict[str, int]) -> None:
        every: list[Any] = []
        for name, ids in observation.ids.items():
            what = f"ids of entity type {name!r}"
            if name not in count:
                way = "Declare the type in obs_space, or drop its ids."
                self._refuse(what, f"the type must be one of {list(count)}", name, way)
            if len(ids) != count[name]:
                rule = f"there must be one for each of its {count[name]} entities"
                self._refuse(what, rule, f"{len(ids)}, {ids}", "Give all of them names, or none.")
            every += ids
        if not every:
            return
        try:
            distinct = set(every)
        except TypeError:
            bad = next(entity for entity in every if not is_hashable(entity))
            way = "Use strings, numbers or tuples."
            self._refuse("ids", "an id must be hashable", repr(bad), way)
        if len(distinct) < len(every) or GLOBAL in distinct:
            twice = next(e for e in (GLOBAL, *every) if [GLOBAL, *every].count(e) > 1)
            types = [name for name, ids in observation.ids.items() if twice in ids]
            rule = "must be unique over all types"
            way = "Make it (type, number), for instance."
            self._refuse(f"ids of entity types {types}", rule, f"{twice!r} again", way)

    def _check_visible(self, name: str, rows: Any, count: dict[str, int]) -> None:
        what = f"visible of entity type {name!r}"
        if name not in count:
            way = "Declare the type in obs_space, or drop it."
            self._refuse(what, f"the type must be one of {list(count)}", name, way)
        flags = np.asarray(rows)
        if flags.shape != (count[name],) or (flags.size and flags.dtype != np.bool_):
            rule = f"must be bool [{count[name]}], one for each entity"
            came = f"{flags.dtype} of shape {flags.shape}"
            self._refuse(what, rule, came, "Leave the type out if all are visible.")

    def _check_global(self, features: Any) -> None:
        if not self._global and not len(features):
            return
        array = self._array("global_features", features)
        if array.shape != (len(self._global),):
            rule = f"must be [{len(self._global)}], {', '.join(self._global)}"
            way = "Give those of obs_space.global_features in their order."
            self._refuse("global_features", rule, f"shape {array.shape}", way)
        if not _finite(array):
            at = int(np.argmin(np.abs(array) <= _MOST))
            way = "Find where it is computed, or clip it."
            came = f"{self._global[at]} = {array[at]}"
            self._refuse("global_features", _FINITE, came, way)

    def _check_outcome(self, observation: Observation) -> None:
        reward = observation.reward
        if not _is_number(reward) or not math.isfinite(reward):
            self._refuse("reward", "must be a finite number", repr(reward), "Return a float.")
        for name, flag in (("done", observation.done), ("truncated", observation.truncated)):
            if not isinstance(flag, bool | np.bool_):
                self._refuse(name, "must be a bool", repr(flag), "Use bool(...).")
        for name, value in observation.metrics.items():
            if not _is_number(value):
                way = "Give a float by name."
                self._refuse(f"metric {name!r}", "must be a number", repr(value), way)


def _finite(array: np.ndarray) -> bool:
    """Whether all of a feature array is finite, also as the float32 that it becomes."""
    if array.dtype.kind != "f":
        return True
    if array.size <= _FEW:
        flat = array.ravel().tolist()
        return math.isfinite(sum(flat)) and (
            min(flat, default=0.0) >= -_MOST and max(flat, default=0.0) <= _MOST
        )
    return bool((np.abs(array) <= _MOST).all())


def _is_number(value: Any) -> bool:
    return type(value) is float or (
        isinstance(value, int | float | np.number | np.bool_) and np.ndim(value) == 0
    )
