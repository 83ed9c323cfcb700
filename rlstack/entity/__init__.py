"""Entity environments: observations of entities of several types, actions of several actors."""

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

__all__ = [
    "GLOBAL",
    "Action",
    "ActionMask",
    "ActionSpace",
    "ActionType",
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
    "as_dm_env",
]
