"""Convolutions that encode images, and that decode them again.

Hafner et al. (2025), https://doi.org/10.1038/s41586-025-08744-2: kernels of 5 x 5; a maximum over
2 x 2 pixels halves images, which are halved until a side would have fewer than 3 pixels, at most
four times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from rlstack.networks.layers.blocks import BlockLinear, Layers, scaled_init
from rlstack.networks.layers.convolution import Conv2D
from rlstack.networks.layers.dense import Block, normalised
from rlstack.networks.layers.linear import Linear

_KERNEL = 5
_MULTIPLES = (2, 3, 4, 4)  # of the depth: channels after each halving
_LEAST = 3  # pixels of a side

Activation = Callable[[jax.Array], jax.Array]


def resolutions(height: int, width: int) -> list[tuple[int, int]]:
    """Returns the sizes of an image, from its own on, each about half of the one before.

    An image that is too small to be halved has its own size twice.
    """
    found = [(height, width)]
    while len(found) <= len(_MULTIPLES) and min(found[-1]) >= 2 * _LEAST:
        above, beside = found[-1]
        found.append((-(-above // 2), -(-beside // 2)))
    return found if len(found) > 1 else found * 2


class ImageEncoder(hk.Module):
    """Maps images to features."""

    def __init__(self, depth: int, activation: Activation, block: Block, name: str) -> None:
        super().__init__(name=name)
        self._depth, self._activation, self._block = depth, activation, block

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images ``[N, H, W, C]`` in [0, 1] to ``[N, D]``."""
        x = x - 0.5
        for multiple, size in zip(_MULTIPLES, resolutions(*x.shape[1:3])[1:], strict=False):
            x = Conv2D(self._depth * multiple, _KERNEL, w_init=scaled_init())(x)
            if x.shape[1:3] != size:
                x = halved(x)
            x = self._activation(normalised(x, self._block, is_training=False))
        return x.reshape(len(x), -1)


class ImageDecoder(hk.Module):
    """Maps states of a world model to images."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        depth: int,
        units: int,
        blocks: int,
        activation: Activation,
        block: Block,
        name: str,
    ) -> None:
        super().__init__(name=name)
        self._shape, self._depth, self._units, self._blocks = shape, depth, units, blocks
        self._activation, self._block = activation, block

    def __call__(self, recurrent: jax.Array, categories: jax.Array) -> jax.Array:
        """Maps states ``[N, D]`` and ``[N, K]`` to images ``[N, H, W, C]`` in (0, 1)."""
        *larger, smallest = resolutions(*self._shape[:2])
        channels = [self._depth * multiple for multiple in _MULTIPLES[: len(larger)]]
        x = self._first(recurrent, categories, (*smallest, channels[-1]))
        outputs = [self._shape[-1], *channels[:-1]]
        for size, output in reversed(list(zip(larger, outputs, strict=True))):
            x = self._activation(normalised(x, self._block, is_training=False))
            if x.shape[1:3] != size:
                x = x.repeat(2, axis=1).repeat(2, axis=2)[:, : size[0], : size[1]]
            x = Conv2D(output, _KERNEL, w_init=scaled_init())(x)
        return jax.nn.sigmoid(x)

    def _first(
        self, recurrent: jax.Array, categories: jax.Array, shape: tuple[int, int, int]
    ) -> jax.Array:
        """Returns the smallest image; blocks of the state make blocks of its channels."""
        rows, blocks = len(recurrent), math.gcd(self._blocks, shape[-1])
        x = BlockLinear(math.prod(shape) // blocks, "of_recurrent")(
            recurrent.reshape(rows, blocks, -1)
        )
        x = x.reshape(rows, blocks, *shape[:2], -1)
        x = jnp.moveaxis(x, 1, 3).reshape(rows, *shape)
        y = Layers((2 * self._units,), self._activation, self._block, "layers")(categories)
        y = Linear(math.prod(shape), scaled_init(), "of_categories")(y)
        return x + y.reshape(rows, *shape)


def halved(x: jax.Array) -> jax.Array:
    """Returns the maxima over 2 x 2 pixels of images ``[N, H, W, C]``; odd sides are rounded up."""
    rows, height, width, channels = x.shape
    pads = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))
    x = jnp.pad(x, pads, mode="edge")
    x = x.reshape(rows, -(-height // 2), 2, -(-width // 2), 2, channels)
    return x.max(axis=(2, 4))
