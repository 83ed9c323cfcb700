"""Derives every seed of a run from the experiment's seed, a role and a rank."""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.random import threefry
from rlstack.types import PRNGKey


def role_key(seed: int, role: str, rank: int = 0) -> PRNGKey:
    """Returns the JAX key of one role ("learner", "inferencer", ...) and rank."""
    numbers = _number(role), rank
    if not (_has_usual_keys() and 0 <= seed < 2**31):
        return functools.reduce(jax.random.fold_in, numbers, jax.random.PRNGKey(seed))
    # The same numbers without a compiled function, for which each node would wait at its start.
    key = np.array([0, seed], np.uint32)
    return jnp.asarray(functools.reduce(threefry.fold_in, numbers, key))


def _has_usual_keys() -> bool:
    """Whether JAX uses its default keys: two words, for the generator Threefry."""
    usual: bool = getattr(jax.config, "jax_default_prng_impl", "") == "threefry2x32"
    return usual and not getattr(jax.config, "jax_enable_custom_prng", False)


def acting_key(seed: int, rank: int, incarnation: int = 0) -> PRNGKey:
    """Returns the key of an inferencer; each incarnation of a restarted one has its own."""
    key = role_key(seed, "inferencer", rank)
    return jax.random.fold_in(key, incarnation) if incarnation else key


def role_seed(seed: int, role: str, rank: int = 0) -> int:
    """Returns a seed of 30 bits; an environment's number can be added within 31.

    Raises:
      ValueError: see `check_seed`.
    """
    check_seed(seed)
    return int(np.random.SeedSequence([seed, _number(role), rank]).generate_state(1)[0] >> 2)


def check_seed(seed: int) -> None:
    """Checks a seed that a command or a function takes in place of a run's seed.

    Raises:
      ValueError: the seed is not in [0, 2^31).
    """
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed (--seed) must be in [0, 2^31); got {seed}.")


def _number(role: str) -> int:
    return zlib.crc32(role.encode()) & 0x7FFFFFFF
