"""Derives every seed of a run from the experiment's seed, a role and a rank."""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import PRNGKey

_WORD = 2**32 - 1
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)  # of Threefry-2x32


def role_key(seed: int, role: str, rank: int = 0) -> PRNGKey:
    """Returns the JAX key of one role ("learner", "inferencer", ...) and rank."""
    numbers = _number(role), rank
    if not (_has_usual_keys() and 0 <= seed < 2**31):
        return functools.reduce(jax.random.fold_in, numbers, jax.random.PRNGKey(seed))
    # The same numbers without a compiled function, for which each node would wait at its start.
    return jnp.asarray(functools.reduce(_folded, numbers, np.array([0, seed], np.uint32)))


def _has_usual_keys() -> bool:
    """Whether keys are two words, for the generator Threefry; JAX has settings for others."""
    usual: bool = getattr(jax.config, "jax_default_prng_impl", "") == "threefry2x32"
    return usual and not getattr(jax.config, "jax_enable_custom_prng", False)


def _folded(key: np.ndarray, number: int) -> np.ndarray:
    """Returns what ``jax.random.fold_in`` does: the block (0, number), encrypted with the key.

    The cipher is Threefry-2x32 with 20 rounds (Salmon et al., 2011, "Parallel Random Numbers: As
    Easy as 1, 2, 3").
    """
    keys = [int(key[0]), int(key[1])]
    keys.append(keys[0] ^ keys[1] ^ 0x1BD11BDA)
    x, y = keys[0], (number + keys[1]) & _WORD
    for i in range(5):
        for distance in _ROTATIONS[i % 2]:
            x = (x + y) & _WORD
            y = x ^ ((y << distance | y >> (32 - distance)) & _WORD)
        x = (x + keys[(i + 1) % 3]) & _WORD
        y = (y + keys[(i + 2) % 3] + i + 1) & _WORD
    return np.array([x, y], np.uint32)


def acting_key(seed: int, rank: int, incarnation: int = 0) -> PRNGKey:
    """Returns the key of an inferencer; each incarnation of a restarted one has its own."""
    key = role_key(seed, "inferencer", rank)
    return jax.random.fold_in(key, incarnation) if incarnation else key


def role_seed(seed: int, role: str, rank: int = 0) -> int:
    """Returns a seed of 30 bits; an environment's number can be added within 31."""
    return int(np.random.SeedSequence([seed, _number(role), rank]).generate_state(1)[0] >> 2)


def _number(role: str) -> int:
    return zlib.crc32(role.encode()) & 0x7FFFFFFF
