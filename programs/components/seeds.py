"""Derives every seed of a run from the experiment's seed, a role and a rank."""

from __future__ import annotations

import functools
import zlib

import jax
import numpy as np

from rlstack.types import PRNGKey


def role_key(seed: int, role: str, rank: int = 0) -> PRNGKey:
    """Returns the JAX key of one role ("learner", "inferencer", ...) and rank."""
    return _derived(seed, _number(role), rank)


@functools.partial(jax.jit, static_argnums=0)
def _derived(seed: int, role: int, rank: int) -> PRNGKey:
    """Returns the key; one compiled function, because each node compiles it at its start."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(seed), role), rank)


def acting_key(seed: int, rank: int, incarnation: int = 0) -> PRNGKey:
    """Returns the key of an inferencer; each incarnation of a restarted one has its own."""
    key = role_key(seed, "inferencer", rank)
    return jax.random.fold_in(key, incarnation) if incarnation else key


def role_seed(seed: int, role: str, rank: int = 0) -> int:
    """Returns a seed of 30 bits; an environment's number can be added within 31."""
    return int(np.random.SeedSequence([seed, _number(role), rank]).generate_state(1)[0] >> 2)


def _number(role: str) -> int:
    return zlib.crc32(role.encode()) & 0x7FFFFFFF
