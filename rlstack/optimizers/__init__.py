"""Optimizers made from configs, one for each component of a network."""

from __future__ import annotations

from rlstack.optimizers.components import (
    ComponentOptimizer,
    Components,
    component_fields,
    component_optimizer,
    optimizer_step,
    require_component,
)
from rlstack.optimizers.config import OptimizerConfig, make_optimizer

__all__ = [
    "ComponentOptimizer",
    "Components",
    "OptimizerConfig",
    "component_fields",
    "component_optimizer",
    "make_optimizer",
    "optimizer_step",
    "require_component",
]
