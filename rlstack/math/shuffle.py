"""Random permutations without sorting.

``jax.random.permutation`` sorts, and XLA's sort on the CPU takes longer than the gradients of a
small network: 10 ms for four permutations of 8,192 rows. This module takes 0.2 ms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstack.types import Array, PRNGKey

_NUM_ROUNDS = 8
_SORTED_BELOW = 64  # below this size sorting is cheap, and a cipher of few bits is poor


def permutations(rng_key: PRNGKey, count: int, size: int) -> Array:
    """Draws ``count`` permutations of ``range(size)``, int32 ``[count, size]``.

    Each is a keyed bijection: an alternating Feistel network (Luby and Rackoff 1988,
    https://doi.org/10.1137/0217022) over the next power of two. Results outside ``range(size)`` are
    enciphered again until they are inside. Not all ``size!`` permutations can occur, but there are
    enough of them to shuffle minibatches.
    """
    if size < _SORTED_BELOW:
        keys = jax.random.split(rng_key, count)
        return jax.vmap(lambda key: jax.random.permutation(key, size))(keys)
    round_keys = jax.random.bits(rng_key, (_NUM_ROUNDS, count, 1), jnp.uint32)
    num_bits = (size - 1).bit_length()
    low_bits = num_bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (num_bits - low_bits)) - 1

    def encipher(x: Array) -> Array:
        low, high = x & low_mask, x >> low_bits
        for i in range(0, _NUM_ROUNDS, 2):
            low ^= _mix(high ^ round_keys[i]) & low_mask
            high ^= _mix(low ^ round_keys[i + 1]) & high_mask
        return (high << low_bits) | low

    def walk(x: Array) -> Array:
        return jnp.where(x < size, x, encipher(x))

    start = jnp.broadcast_to(jnp.arange(size, dtype=jnp.uint32), (count, size))
    order = jax.lax.while_loop(lambda x: (x >= size).any(), walk, encipher(start))
    return order.astype(jnp.int32)


def _mix(x: Array) -> Array:
    """Mixes the bits of a word with the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
