"""Entity environments: observations of entities of several types, actions of several actors.

Start with `rlstack.entity.environment`, `rlstack.entity.spaces` and one of `rlstack.entity.games`.
`BatchView` and `VecObs` are imported on first use, because `rlstack.entity.vec_obs` imports JAX and
the worker processes of pools, which import this package, should not.

May import: rlstack, rlstack.envs, rlstack.imports, rlstack.networks, rlstack.rpc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstack.entity.adapter import EntityEnv, as_dm_env
from rlstack.entity.environment import (
    Action,
    ActionMask,
    Actions,
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
from rlstack.imports.deferred import on_first_use

if TYPE_CHECKING:
    from rlstack.entity.vec_obs import BatchView, VecObs

__all__ = [
    "GLOBAL",
    "Action",
    "ActionMask",
    "ActionSpace",
    "ActionType",
    "Actions",
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

__getattr__ = on_first_use(__name__, {"BatchView": "vec_obs", "VecObs": "vec_obs"})
