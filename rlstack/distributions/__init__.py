"""Distributions over actions, as pytrees with methods.

A distribution is a ``NamedTuple`` of arrays, so jit, vmap, scan and replay handle it like any other
record. Every field of one distribution has the same leading axes, so slicing its leaves
(``jax.tree.map(lambda x: x[:-1], distribution)``) slices the distribution. Discrete actions are
int32. ``sample`` of ``Normal`` and ``TanhNormal`` is reparameterised: gradients flow through it.

An agent gets its distribution from a network's output: ``num_parameters(action_spec)`` is the size
of that output, and ``from_parameters`` converts it to the distribution.

Pure.

May import: rlstack, rlstack.specs.
"""

from rlstack.distributions.continuous import Deterministic, Normal, TanhNormal, tanh_to_bounds
from rlstack.distributions.discrete import (
    ILLEGAL,
    Categorical,
    MultiCategorical,
    categorical,
    multi_categorical,
)
from rlstack.distributions.joint import Distribution, Joint, Parts, parts
from rlstack.distributions.parameters import (
    LOG_STD_RANGE,
    Bounds,
    bounds_of,
    from_parameters,
    num_parameters,
)

__all__ = [
    "ILLEGAL",
    "LOG_STD_RANGE",
    "Bounds",
    "Categorical",
    "Deterministic",
    "Distribution",
    "Joint",
    "MultiCategorical",
    "Normal",
    "Parts",
    "TanhNormal",
    "bounds_of",
    "categorical",
    "from_parameters",
    "multi_categorical",
    "num_parameters",
    "parts",
    "tanh_to_bounds",
]
