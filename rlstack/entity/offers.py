"""Checks of the actions that an observation offers: who may act, and what they may choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from rlstack.entity.environment import (
    CategoricalMask,
    GlobalCategoricalMask,
    Observation,
    SelectEntityMask,
)
from rlstack.entity.errors import no_room, refuse
from rlstack.entity.spaces import (
    GLOBAL,
    ActionSpace,
    Categorical,
    GlobalCategorical,
    SelectEntity,
)

_FEW = 64  # below this many values Python's own loop beats numpy's fixed cost of a reduction
_MASKS: dict[type, Any] = {
    Categorical: CategoricalMask,
    GlobalCategorical: GlobalCategoricalMask,
    SelectEntity: SelectEntityMask,
}


class OfferCheck:
    """Checks what observations of one environment offer against its action space."""

    def __init__(self, action_space: ActionSpace, where: str):
        """Prepares to check; messages call the environment ``where``."""
        self._where = where
        self._actions = dict(action_space)

    def check(
        self, name: str, offer: Any, observation: Observation, count: Mapping[str, int]
    ) -> None:
        """Checks one action's offer; ids and ``count`` by type have been checked.

        Raises:
          EnvError: it breaks a rule.
        """
        kind, what = self._actions.get(name), f"action {name!r}"
        if kind is None:
            way = "Declare it in action_space."
            self._refuse(what, f"must be one of {list(self._actions)}", name, way)
        expected = _MASKS[type(kind)]
        if not isinstance(offer, expected):
            rule = f"a {type(kind).__name__} action is offered by a {expected.__name__}"
            self._refuse(what, rule, type(offer).__name__, f"Give a {expected.__name__}.")
        if isinstance(kind, GlobalCategorical):
            if offer.mask is not None:
                mask = self._mask(what, offer.mask, (len(kind.choices),))
                self._require_choice(what, mask[None], lambda: [GLOBAL])
            return
        number = self._check_who(
            what, "actor", offer.actor_ids, offer.actor_types, observation, count
        )
        if number > kind.capacity:
            no_room(self._where, what, "actors", kind.capacity, number)
        width = len(kind.choices) if isinstance(kind, Categorical) else 0
        if isinstance(kind, SelectEntity):
            width = self._check_who(
                what, "actee", offer.actee_ids, offer.actee_types, observation, count
            )
        if offer.mask is not None:
            mask = self._mask(what, offer.mask, (number, width))
        elif number and not width:
            mask = np.zeros((number, 0), np.bool_)
        else:
            return
        self._require_choice(
            what, mask, lambda: _names(offer.actor_ids, offer.actor_types, observation, count)
        )

    def _check_who(
        self,
        what: str,
        role: str,
        ids: Any,
        types: Any,
        observation: Observation,
        count: Mapping[str, int],
    ) -> int:
        """Checks the actors or actees that an action names and returns how many they are."""
        if ids is None:
            names = count if types is None else types
            if types is not None and len(set(types)) < len(types):
                rule = f"{role}_types must differ"
                self._refuse(what, rule, list(types), "Name each type once.")
            try:
                return sum([count[name] for name in names])
            except KeyError as error:
                rule = f"{role}_types must be among {list(count)}"
                way = "Declare the type in obs_space; GLOBAL acts by GlobalCategorical actions."
                self._refuse(what, rule, error, way)
        if types is not None:
            rule = f"{role}s must be named by {role}_ids or by {role}_types, not by both"
            self._refuse(what, rule, f"ids {list(ids)} and types {list(types)}", "Drop one.")
        known = set().union(*observation.ids.values())
        for entity in ids:
            if not is_hashable(entity) or entity not in known:
                rule = "must be among the ids of the observation"
                came = f"ids {sorted(known, key=repr)}"
                way = "List it in Observation.ids under its type, or drop it."
                self._refuse(f"{what}, {role} {entity!r}", rule, came, way)
        if len(set(ids)) < len(ids):
            rule = f"{role}_ids must differ"
            self._refuse(what, rule, list(ids), "Name each entity once.")
        return len(ids)

    def _refuse(self, what: str, rule: str, came: Any, way: str) -> NoReturn:
        refuse(self._where, what, rule, came, way)

    def _mask(self, what: str, given: Any, shape: tuple[int, ...]) -> np.ndarray:
        try:
            mask = np.asarray(given)
        except ValueError:  # rows of different lengths
            mask = np.empty((), object)
        if not mask.size and 0 in shape and mask.shape[:1] in (shape[:1], (0,)):
            return np.zeros(shape, np.bool_)
        if mask.shape != shape or mask.dtype != np.bool_:
            rule = f"its mask must be bool {list(shape)}, True where legal"
            way = "Rows are the actors and columns the choices or actees, in the order named."
            self._refuse(what, rule, f"{mask.dtype} of shape {mask.shape}", way)
        return mask

    def _require_choice(self, what: str, mask: np.ndarray, actors: Any) -> None:
        if mask.size <= _FEW and mask.shape[1]:
            if all(True in row for row in mask.tolist()):
                return
        elif mask.any(-1).all():
            return
        at = int(np.argmin(mask.any(-1)))
        self._refuse(
            f"{what}, actor {actors()[at]!r}",
            "at least one choice must be legal",
            f"mask {mask[at].tolist()}",
            "Allow one, or leave the actor out at this step.",
        )


def _names(ids: Any, types: Any, observation: Observation, count: Mapping[str, int]) -> list:
    if ids is not None:
        return list(ids)
    named: list[Any] = []
    for name in count if types is None else types:
        named += observation.ids.get(name) or [(name, row) for row in range(count[name])]
    return named


def is_hashable(value: Any) -> bool:
    """Whether a value can be a key."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
