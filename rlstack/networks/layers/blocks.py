"""Layers of world models: dense layers, block-diagonal layers, and a GRU made of them."""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from rlstack.networks.layers.dense import Block, dense, normalised
from rlstack.networks.layers.linear import Linear
from rlstack.networks.precision import in_float32

Activation = Callable[[jax.Array], jax.Array]


def scaled_init(scale: float = 1.0) -> hk.initializers.Initializer:
    """Returns initial weights of the deviation scale / sqrt(inputs), cut off at two deviations."""
    if not scale:
        return jnp.zeros
    return hk.initializers.VarianceScaling(scale**2, "fan_in", "truncated_normal")


class Layers(hk.Module):
    """Dense layers over the last axis, each with a norm and an activation."""

    def __init__(
        self, sizes: tuple[int, ...], activation: Activation, block: Block, name: str
    ) -> None:
        super().__init__(name=name)
        self._sizes, self._activation, self._block = sizes, activation, block

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., sizes[-1]]``."""
        for size in self._sizes:
            x = dense(x, size, self._activation, self._block, w_init=scaled_init())
        return x


class BlockLinear(hk.Module):
    """Dense layers side by side: each block of outputs sees the same block of inputs only."""

    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._size = size

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[N, G, D]`` to ``[N, G, size]``."""
        blocks, inputs = x.shape[1:]
        w = hk.get_parameter("w", (blocks, inputs, self._size), x.dtype, init=scaled_init())
        b = hk.get_parameter("b", (blocks, self._size), x.dtype, init=jnp.zeros)
        return jnp.einsum("ngi,gio->ngo", x, w) + b


class BlockGRU(hk.Module):
    """A gated recurrent unit whose state consists of blocks (Hafner et al. 2025, appendix).

    The state, the categories and the action pass a dense layer each. Every block sees its own part
    of the state and all of these. The reset gate multiplies the candidate's input.
    """

    def __init__(
        self, hidden: int, blocks: int, activation: Activation, block: Block, name: str
    ) -> None:
        super().__init__(name=name)
        self._hidden, self._blocks = hidden, blocks
        self._activation, self._block = activation, block

    def __call__(self, state: jax.Array, *inputs: jax.Array) -> jax.Array:
        """Maps a state ``[N, D]`` and inputs ``[N, ...]`` to the next state."""
        rows, size = state.shape
        seen = [
            Layers((self._hidden,), self._activation, self._block, f"input_{i}")(x)
            for i, x in enumerate((state, *inputs))
        ]
        shared = jnp.concatenate(seen, axis=-1)[:, None]
        own = state.reshape(rows, self._blocks, -1)
        shared = jnp.broadcast_to(shared, (rows, self._blocks, shared.shape[-1]))
        x = BlockLinear(size // self._blocks, "hidden")(jnp.concatenate([own, shared], axis=-1))
        x = self._activation(normalised(x.reshape(rows, size), self._block, is_training=False))
        gates = BlockLinear(3 * size // self._blocks, "gates")(x.reshape(own.shape))
        reset, candidate, update = (x.reshape(rows, size) for x in jnp.split(gates, 3, axis=-1))
        candidate = jnp.tanh(jax.nn.sigmoid(reset) * candidate)
        update = jax.nn.sigmoid(update - 1.0)  # at first the state changes slowly
        return update * candidate + (1.0 - update) * state


class Head(hk.Module):
    """Dense layers and a last one, whose initial weights are scaled."""

    def __init__(
        self,
        layers: tuple[int, ...],
        size: int,
        scale: float,
        activation: Activation,
        block: Block,
        name: str,
    ) -> None:
        super().__init__(name=name)
        self._layers, self._size, self._scale = layers, size, scale
        self._activation, self._block = activation, block

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., size]``."""
        x = Layers(self._layers, self._activation, self._block, "layers")(x)
        return in_float32(Linear(self._size, scaled_init(self._scale), "output"))(x)
