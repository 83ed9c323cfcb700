"""Mixed precision: layers compute in bfloat16; params, heads and outputs are float32.

Micikevicius et al. (2018), https://arxiv.org/abs/1710.03740, keep the params in float32 and compute
with copies of less precision. bfloat16 has the range of float32, so losses need no scaling. It has
8 significant bits: values near 100 would be multiples of 0.5, so heads compute in float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from rlstack.configs.network import Precision
from rlstack.networks.base import as_float32
from rlstack.networks.layers.convolution import Conv2D
from rlstack.networks.layers.linear import Linear, NoisyLinear
from rlstack.networks.layers.sphere import UnitLinear
from rlstack.types import PyTree

_Arguments = ParamSpec("_Arguments")
# Layers that compute in less precision.
_LAYERS = (hk.Linear, Linear, NoisyLinear, UnitLinear, Conv2D)
_NORMS = (hk.LayerNorm, hk.RMSNorm)


def in_precision(
    precision: Precision, forward: Callable[_Arguments, PyTree]
) -> Callable[_Arguments, PyTree]:
    """Makes a Haiku function compute its layers in some precision, with float32 results.

    Dense layers and convolutions compute in it. Layer norm and RMS norm compute in float32, because
    the mean of many squares needs more digits.

    Args:
      precision: the precision of the layers.
      forward: a function that is called inside a Haiku transform.
    """
    return forward if precision == "float32" else in_own_precision(precision, forward)


def in_own_precision(
    precision: Precision, forward: Callable[_Arguments, PyTree]
) -> Callable[_Arguments, PyTree]:
    """Does the same for a part of a network, whose other layers may have another precision."""
    low = getattr(jnp, precision)
    policies = {
        **dict.fromkeys(_LAYERS, jmp.Policy(jnp.float32, low, low)),
        **dict.fromkeys(_NORMS, jmp.Policy(jnp.float32, jnp.float32, low)),
    }

    @functools.wraps(forward)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> PyTree:
        if precision == "float32" and hk.mixed_precision.get_policy(Linear) is None:
            return forward(*args, **kwargs)
        with _pushed(policies):
            return as_float32(forward(*args, **kwargs))

    return run


def in_float32(layer: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Makes a last layer compute in float32, whatever precision the layers before it have."""
    return in_own_precision("float32", layer)


@contextlib.contextmanager
def _pushed(policies: Mapping[type[hk.Module], jmp.Policy]) -> Iterator[None]:
    with contextlib.ExitStack() as pushed:
        for layer, policy in policies.items():
            pushed.enter_context(hk.mixed_precision.push_policy(layer, policy))
        yield
