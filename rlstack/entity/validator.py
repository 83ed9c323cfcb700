"""Checks of a game's observations, with errors that name the entity or actor, the rule and a fix.

Without these checks a mistake appears later and elsewhere: as NaN in the loss, or as an action of
the wrong actor. The checks take about as long as the padding itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike

from rlstack.entity.environment import (
    ActionMask,
    CategoricalMask,
    EntityID,
    GlobalCategoricalMask,
    Observation,
    SelectEntityMask,
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
)

_SMALL = 64  # plain Python checks arrays up to this size faster than numpy does
_MAX_FLOAT = float(np.finfo(np.float32).max)
_FINITE = "features must be finite float32"
_MASK_TYPES: dict[type[ActionType], type[ActionMask]] = {
    Categorical: CategoricalMask,
    GlobalCategorical: GlobalCategoricalMask,
    SelectEntity: SelectEntityMask,
}


class Validator:
    """Checks observations of one environment against its spaces."""

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace, name: str):
        """Prepares the checks; errors call the environment ``name``."""
        self._name = name
        self._types = dict(obs_space.entities)
        self._global = obs_space.global_features
        self._masks = _ActionMaskValidator(action_space, name)

    def check(self, observation: Observation) -> None:
        """Checks a whole observation.

        Raises:
          EnvError: the observation breaks a rule. It is a ValueError that names the environment,
              the entity type or action type, and the entity.
        """
        if not isinstance(observation, Observation):
            rule, got = "reset and act must return an Observation", type(observation).__name__
            self._refuse("observation", rule, got, "Return one.")
        count = self._check_entities(observation)
        self._check_ids(observation, count)
        for name, rows in observation.visible.items():
            self._check_visible(name, rows, count)
        self._check_global(observation.global_features)
        for name, mask in observation.actions.items():
            self._masks.check(name, mask, observation, count)
        self._check_outcome(observation)

    def _refuse(self, what: str, rule: str, got: object, fix: str) -> NoReturn:
        refuse(self._name, what, rule, got, fix)

    def _check_entities(self, observation: Observation) -> dict[str, int]:
        """Checks the features of all types and returns the number of entities of each."""
        count = dict.fromkeys(self._types, 0)
        for name, rows in observation.features.items():
            kind = self._types.get(name)
            what = f"entity type {name!r}"
            if kind is None:
                fix = "Declare it in obs_space; features of GLOBAL go to global_features."
                self._refuse(what, f"must be one of {list(self._types)}", name, fix)
            width = len(kind.features)
            if isinstance(rows, int | np.integer) and not isinstance(rows, bool):
                if width or rows < 0:
                    rule = f"must give features [count, {width}], or a count if it has no features"
                    self._refuse(what, rule, rows, "Give a row of features for each entity.")
                number = int(rows)
            else:
                number = self._check_features(what, kind.features, rows, observation.ids.get(name))
            if number > kind.capacity:
                refuse_too_many(self._name, what, "entities", kind.capacity, number)
            count[name] = number
        return count

    def _check_features(
        self, what: str, names: Sequence[str], rows: ArrayLike, ids: Sequence[EntityID] | None
    ) -> int:
        """Checks the features of one type and returns its number of entities."""
        array = self._array(what, rows)
        if array.ndim == 1 and not len(array):
            return 0
        if array.ndim != 2 or array.shape[1] != len(names):
            rule = (
                f"features must be [count, {len(names)}], {', '.join(names) or 'without columns'}"
            )
            got = f"shape {array.shape}"
            self._refuse(what, rule, got, "Give one row per entity in the order of the space.")
        if not _finite(array):
            row, column = np.argwhere(~(np.abs(array) <= _MAX_FLOAT))[0].tolist()
            entity = ids[row] if ids is not None and row < len(ids) else f"row {row}"
            got = f"{names[column]} = {array[row, column]}"
            fix = "Find where it is computed, or clip it."
            self._refuse(f"{what}, entity {entity!r}", _FINITE, got, fix)
        return len(array)

    def _array(self, what: str, rows: ArrayLike) -> np.ndarray:
        try:
            array = np.asarray(rows)
        except ValueError:  # rows of different lengths
            array = np.empty((), object)
        if array.dtype.kind not in "fiub":
            got = f"{type(rows).__name__} of dtype {array.dtype}"
            rule = "features must be numbers, in rows of equal length"
            self._refuse(what, rule, got, "Encode categories one-hot (rlstack.entity.derive).")
        return array

    def _check_ids(self, observation: Observation, count: dict[str, int]) -> None:
        all_ids: list[EntityID] = []
        for name, ids in observation.ids.items():
            what = f"ids of entity type {name!r}"
            if name not in count:
                fix = "Declare the type in obs_space, or drop its ids."
                self._refuse(what, f"the type must be one of {list(count)}", name, fix)
            if len(ids) != count[name]:
                rule = f"there must be one for each of its {count[name]} entities"
                got, fix = (
                    f"{len(ids)}, {ids}",
                    "Give an id to every entity of the type or to none.",
                )
                self._refuse(what, rule, got, fix)
            all_ids += ids
        if not all_ids:
            return
        try:
            distinct = set(all_ids)
        except TypeError:
            bad = next(entity for entity in all_ids if not _is_hashable(entity))
            fix = "Use strings, numbers or tuples."
            self._refuse("ids", "an id must be hashable", repr(bad), fix)
        if len(distinct) < len(all_ids) or GLOBAL in distinct:
            twice = next(e for e in (GLOBAL, *all_ids) if [GLOBAL, *all_ids].count(e) > 1)
            types = [name for name, ids in observation.ids.items() if twice in ids]
            rule, fix = "must be unique over all types", "Use (type, number), for instance."
            self._refuse(f"ids of entity types {types}", rule, f"{twice!r} again", fix)

    def _check_visible(self, name: str, rows: ArrayLike, count: dict[str, int]) -> None:
        what = f"visible of entity type {name!r}"
        if name not in count:
            fix = "Declare the type in obs_space, or drop it."
            self._refuse(what, f"the type must be one of {list(count)}", name, fix)
        flags = np.asarray(rows)
        if flags.shape != (count[name],) or (flags.size and flags.dtype != np.bool_):
            rule = f"must be bool [{count[name]}], one for each entity"
            got = f"{flags.dtype} of shape {flags.shape}"
            self._refuse(what, rule, got, "Leave the type out if all its entities are visible.")

    def _check_global(self, features: ArrayLike) -> None:
        if not self._global and not len(features):  # type: ignore[arg-type]  # a sequence or array
            return
        array = self._array("global_features", features)
        if array.shape != (len(self._global),):
            rule = f"must be [{len(self._global)}], {', '.join(self._global)}"
            fix = "Give those of obs_space.global_features in their order."
            self._refuse("global_features", rule, f"shape {array.shape}", fix)
        if not _finite(array):
            at = int(np.argmin(np.abs(array) <= _MAX_FLOAT))
            fix = "Find where it is computed, or clip it."
            self._refuse("global_features", _FINITE, f"{self._global[at]} = {array[at]}", fix)

    def _check_outcome(self, observation: Observation) -> None:
        reward = observation.reward
        if not _is_number(reward) or not math.isfinite(reward):
            self._refuse("reward", "must be a finite number", repr(reward), "Return a float.")
        for name, flag in (("done", observation.done), ("truncated", observation.truncated)):
            if not isinstance(flag, bool | np.bool_):
                self._refuse(name, "must be a bool", repr(flag), "Use bool(...).")
        for name, value in observation.metrics.items():
            if not _is_number(value):
                self._refuse(f"metric {name!r}", "must be a number", repr(value), "Give a float.")


class _ActionMaskValidator:
    """Checks the actors and masks of observations against the action space."""

    def __init__(self, action_space: ActionSpace, where: str):
        self._where = where
        self._actions = dict(action_space)

    def check(
        self, name: str, given: ActionMask, observation: Observation, count: Mapping[str, int]
    ) -> None:
        """Checks one entry of ``observation.actions``; ids and ``count`` have been checked."""
        kind, what = self._actions.get(name), f"action {name!r}"
        if kind is None:
            fix = "Declare it in action_space."
            self._refuse(what, f"must be one of {list(self._actions)}", name, fix)
        expected = _MASK_TYPES[type(kind)]
        if not isinstance(given, expected):
            rule = f"a {type(kind).__name__} action needs a {expected.__name__}"
            self._refuse(what, rule, type(given).__name__, f"Give a {expected.__name__}.")
        if isinstance(given, GlobalCategoricalMask):
            if given.mask is not None:
                assert isinstance(kind, GlobalCategorical)
                mask = self._mask(what, given.mask, (len(kind.choices),))
                self._require_choice(what, mask[None], lambda: [GLOBAL])
            return
        ids, types = given.actor_ids, given.actor_types
        number = self._check_entities(what, "actor", ids, types, observation, count)
        if number > kind.capacity:
            refuse_too_many(self._where, what, "actors", kind.capacity, number)
        width = len(kind.choices) if isinstance(kind, Categorical) else 0
        if isinstance(given, SelectEntityMask):
            width = self._check_entities(
                what, "actee", given.actee_ids, given.actee_types, observation, count
            )
        if given.mask is not None:
            mask = self._mask(what, given.mask, (number, width))
        elif number and not width:
            mask = np.zeros((number, 0), np.bool_)
        else:
            return
        self._require_choice(what, mask, lambda: _entity_ids(ids, types, observation, count))

    def _check_entities(
        self,
        what: str,
        role: str,
        ids: Sequence[EntityID] | None,
        types: Sequence[str] | None,
        observation: Observation,
        count: Mapping[str, int],
    ) -> int:
        """Checks the actors or actees of an action and returns their number."""
        if ids is None:
            names = count if types is None else types
            if types is not None and len(set(types)) < len(types):
                rule = f"{role}_types must be unique"
                self._refuse(what, rule, list(types), "Name each type once.")
            try:
                return sum([count[name] for name in names])
            except KeyError as error:
                rule = f"{role}_types must be among {list(count)}"
                fix = "Declare the type in obs_space; GLOBAL acts by GlobalCategorical actions."
                self._refuse(what, rule, error, fix)
        if types is not None:
            rule = f"{role}s must be named by {role}_ids or by {role}_types, not by both"
            self._refuse(what, rule, f"ids {list(ids)} and types {list(types)}", "Drop one.")
        known = set().union(*observation.ids.values())
        for entity in ids:
            if not _is_hashable(entity) or entity not in known:
                rule = "must be among the ids of the observation"
                got = f"ids {sorted(known, key=repr)}"
                fix = "List it in Observation.ids under its type, or drop it."
                self._refuse(f"{what}, {role} {entity!r}", rule, got, fix)
        if len(set(ids)) < len(ids):
            rule = f"{role}_ids must be unique"
            self._refuse(what, rule, list(ids), "Name each entity once.")
        return len(ids)

    def _refuse(self, what: str, rule: str, got: object, fix: str) -> NoReturn:
        refuse(self._where, what, rule, got, fix)

    def _mask(self, what: str, given: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
        try:
            mask = np.asarray(given)
        except ValueError:  # rows of different lengths
            mask = np.empty((), object)
        if not mask.size and 0 in shape and mask.shape[:1] in (shape[:1], (0,)):
            return np.zeros(shape, np.bool_)
        if mask.shape != shape or mask.dtype != np.bool_:
            rule = f"its mask must be bool {list(shape)}, True where legal"
            fix = "Rows are the actors, columns the choices or actees, in the order given."
            self._refuse(what, rule, f"{mask.dtype} of shape {mask.shape}", fix)
        return mask

    def _require_choice(
        self, what: str, mask: np.ndarray, actors: Callable[[], Sequence[EntityID]]
    ) -> None:
        if mask.size <= _SMALL and mask.shape[1]:
            if all(True in row for row in mask.tolist()):
                return
        elif mask.any(-1).all():
            return
        at = int(np.argmin(mask.any(-1)))
        self._refuse(
            f"{what}, actor {actors()[at]!r}",
            "at least one choice must be legal",
            f"mask {mask[at].tolist()}",
            "Make one legal, or leave the actor out at this step.",
        )


def _entity_ids(
    ids: Sequence[EntityID] | None,
    types: Sequence[str] | None,
    observation: Observation,
    count: Mapping[str, int],
) -> list[EntityID]:
    if ids is not None:
        return list(ids)
    found: list[EntityID] = []
    for name in count if types is None else types:
        found += observation.ids.get(name) or [(name, row) for row in range(count[name])]
    return found


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _finite(array: np.ndarray) -> bool:
    """Whether all features are finite, also after conversion to float32."""
    if array.dtype.kind != "f":
        return True
    if array.size <= _SMALL:
        flat = array.ravel().tolist()
        return math.isfinite(sum(flat)) and (
            min(flat, default=0.0) >= -_MAX_FLOAT and max(flat, default=0.0) <= _MAX_FLOAT
        )
    return bool((np.abs(array) <= _MAX_FLOAT).all())


def _is_number(value: object) -> bool:
    return type(value) is float or (
        isinstance(value, int | float | np.number | np.bool_) and np.ndim(value) == 0
    )
