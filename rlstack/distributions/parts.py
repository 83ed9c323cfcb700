"""The independent parts of a distribution, such as each choice of a ``MultiCategorical``."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from rlstack.distributions.discrete import Categorical, MultiCategorical
from rlstack.distributions.joint import Distribution, Joint
from rlstack.types import Array, PyTree


class Parts(NamedTuple):
    """Log probability and entropy of each of the K parts of a distribution, in order of the leaves.

    Their sums over the last axis are the ``log_prob`` and ``entropy`` of the distribution.
    """

    log_prob: Array  # [..., K] float32
    entropy: Array  # [..., K] float32
    decides: Array  # [..., K] bool, False where a part has only one legal choice


def parts(distribution: Distribution, action: PyTree) -> Parts:
    """Returns the parts of a distribution: K for a MultiCategorical, one for the other classes."""
    if isinstance(distribution, Joint):
        found: list[Parts] = []
        distribution.map(lambda component, part: found.append(parts(component, part)), action)
        return Parts(*(jnp.concatenate(columns, axis=-1) for columns in zip(*found, strict=True)))
    if isinstance(distribution, MultiCategorical):
        return _of_choices(distribution.categorical(), action - distribution.minimum)
    if isinstance(distribution, Categorical):
        return _one(_of_choices(distribution, action))
    log_prob = distribution.log_prob(action)
    return _one(Parts(log_prob, distribution.entropy(), jnp.ones(log_prob.shape, bool)))


def _of_choices(distribution: Categorical, action: Array) -> Parts:
    decides = distribution.legal().sum(-1) > 1
    return Parts(distribution.log_prob(action), distribution.entropy(), decides)


def _one(whole: Parts) -> Parts:
    return Parts(*(x[..., None] for x in whole))
