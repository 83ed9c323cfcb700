"""Entity environments: observations of entities of several types, actions of several actors.

`BatchView` and `VecObs`, of `rlstack.entity.vec_obs`, are resolved on first use: workers of process
pools import this package too and must not pay for JAX.

May import: rlstack, rlstack.envs, rlstack.networks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlstack.entity.adapter import EntityEnv, as_dm_env
from rlstack.entity.environment import (
    Action,
    ActionMask,
    CategoricalAction,
    CategoricalMask,
    EntityID,
    Environment,
    GlobalCategoricalMask,
    Observation,
    SelectEntityAction,
    SelectEntityMask,
)
from rlstack.entity.spaces import (
    GLOBAL,
    ActionSpace,
    ActionType,
    Categorical,
    EntityType,
    GlobalCategorical,
    ObsSpace,
    SelectEntity,
    Slots,
)

if TYPE_CHECKING:
    from rlstack.entity.vec_obs import BatchView, VecObs

__all__ = [
    "GLOBAL",
    "Action",
    "ActionMask",
    "ActionSpace",
    "ActionType",
    "BatchView",
    "Categorical",
    "CategoricalAction",
    "CategoricalMask",
    "EntityEnv",
    "EntityID",
    "EntityType",
    "Environment",
    "GlobalCategorical",
    "GlobalCategoricalMask",
    "ObsSpace",
    "Observation",
    "SelectEntity",
    "SelectEntityAction",
    "SelectEntityMask",
    "Slots",
    "VecObs",
    "as_dm_env",
]


def __getattr__(name: str) -> Any:
    if name in ("BatchView", "VecObs"):
        return getattr(importlib.import_module("rlstack.entity.vec_obs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
