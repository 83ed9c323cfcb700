"""Threefry-2x32 in numpy: the same numbers as those of ``jax.random``, without a compiled function.

The cipher is that of Salmon et al., 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", with 20
rounds. How numbers are drawn from its blocks is JAX's (``jax_threefry_partitionable``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_PARITY = np.uint32(0x1BD11BDA)
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)  # of even and odd groups of four rounds


def encrypt(key: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns encrypted blocks.

    Args:
      key: ``[..., 2]`` uint32.
      x: the first words of the blocks, uint32; its shape broadcasts with ``key[..., 0]``.
      y: the second words, as `x`.
    """
    first, second = key[..., 0], key[..., 1]
    keys = first, second, first ^ second ^ _PARITY
    with np.errstate(over="ignore"):  # numpy warns where words are scalars
        x, y = x + keys[0], y + keys[1]
        for i in range(5):
            for distance in _ROTATIONS[i % 2]:
                x = x + y
                y = x ^ (y << np.uint32(distance) | y >> np.uint32(32 - distance))
            x = x + keys[(i + 1) % 3]
            y = y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def fold_in(key: np.ndarray, number: int) -> np.ndarray:
    """Returns what ``jax.random.fold_in`` does.

    Args:
      key: ``[2]`` uint32.
      number: 32 bits.
    """
    blocks = encrypt(key, np.zeros(1, np.uint32), np.array([number], np.uint32))
    return np.concatenate(blocks)


def split(key: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns what ``jax.random.split`` does for each key, ``[..., *shape, 2]``.

    Args:
      key: ``[..., 2]`` uint32.
      shape: the shape of the array of new keys for each key.
    """
    return np.stack(_blocks(key, shape), axis=-1)


def bits(key: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns what ``jax.random.bits`` does for each key, ``[..., *shape]`` uint32.

    Args:
      key: ``[..., 2]`` uint32.
      shape: the shape of the array of numbers for each key.
    """
    x, y = _blocks(key, shape)
    return x ^ y


def _blocks(key: np.ndarray, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Encrypts the positions in an array of this shape, as numbers of 64 bits, with each key."""
    position = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    key = key.reshape(key.shape[:-1] + (1,) * len(shape) + (2,))
    return encrypt(key, (position >> np.uint64(32)).astype(np.uint32), position.astype(np.uint32))
