"""Layers of the hypersphere: features and weights have the Euclidean norm 1.

Lee et al. (2025), "Hyperspherical normalization for scalable deep reinforcement learning"
(SimBaV2), https://arxiv.org/abs/2502.15280, section 4. `rlstack.stateful_params.on_sphere` keeps
the norm of the weights after each step of an optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlstack.networks.layers.products import multiply
from rlstack.stateful_params import UNIT_WEIGHTS, normed

_SHIFT = 3.0  # a constant input, so that the length of an observation is not lost
_EXPANSION = 4  # a block's inner layer has this many times its units


class UnitLinear(hk.Module):
    """Weights without biases, of which those of each output have the norm 1."""

    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._size = size

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., size]``."""
        shape = (x.shape[-1], self._size)
        w = hk.get_parameter(UNIT_WEIGHTS, shape, x.dtype, init=_unit_weights)
        return multiply(x, w)


class Scaler(hk.Module):
    """Learned factors, ``[D]``, that begin as ``initial``.

    They are stored in units in which they begin as ``scale``, which sets how fast they change
    (equation 8 of the paper). They are float32, and so is what they scale, as in layers that norm.
    """

    def __init__(self, initial: float, scale: float, name: str | None = None) -> None:
        super().__init__(name=name)
        self._initial, self._scale = initial, scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., D]``."""
        init = hk.initializers.Constant(self._scale)
        factors = hk.get_parameter("scale", x.shape[-1:], jnp.float32, init=init)
        return x * factors * (self._initial / self._scale)


class SphereTorso(hk.Module):
    """An embedding on the sphere, then ``blocks`` of spherical interpolations.

    Section 4.1 and 4.2 of the paper; the constants are those of the authors' program.
    """

    def __init__(self, size: int, blocks: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._size, self._blocks = size, blocks

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[B, ...]`` to ``[B, size]``, rows of norm 1."""
        x = x.reshape((x.shape[0], -1))
        x = normed(jnp.concatenate([x, jnp.full_like(x[:, :1], _SHIFT)], axis=-1), -1)
        scale = np.sqrt(2 / self._size)
        x = normed(Scaler(scale, scale)(UnitLinear(self._size)(x)), -1)
        inner = scale / np.sqrt(_EXPANSION)
        for _ in range(self._blocks):
            y = Scaler(inner, inner)(UnitLinear(_EXPANSION * self._size)(x))
            y = normed(UnitLinear(self._size)(jax.nn.relu(y) + 1e-8), -1)  # never all zero
            step = Scaler(1 / (self._blocks + 1), 1 / np.sqrt(self._size), "step")
            x = normed(x + step(y - x), -1)
        return x


class SphereHead(hk.Module):
    """The last layers on the sphere: weights, factors, weights and biases (equation 14)."""

    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._size = size

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., size]``."""
        hidden = Scaler(1.0, 1.0)(UnitLinear(x.shape[-1])(x))
        return UnitLinear(self._size)(hidden) + hk.get_parameter(
            "b", (self._size,), x.dtype, init=jnp.zeros
        )


def _unit_weights(shape: Sequence[int], dtype: Any) -> jax.Array:
    return normed(hk.initializers.Orthogonal()(shape, dtype), -2)
