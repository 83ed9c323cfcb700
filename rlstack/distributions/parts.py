"""A distribution's independent parts: of several numbers chosen at once, each on its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from rlstack.distributions.discrete import Categorical, MultiCategorical
from rlstack.distributions.joint import Distribution, Joint
from rlstack.types import Array, PyTree


class Parts(NamedTuple):
    """What the parts of a distribution say of an action, K of them, in order of the leaves.

    Sums over the last axis, without regard to ``decides``, are ``log_prob`` and ``entropy`` of the
    whole.
    """

    log_prob: Array  # [..., K] float32
    entropy: Array  # [..., K] float32
    decides: Array  # [..., K] bool, False where a part has no choice, such as that of nobody


def parts(distribution: Distribution, action: PyTree) -> Parts:
    """Returns the parts: one a number of a MultiCategorical, one each of the other kinds."""
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


def _of_choices(distribution: Categorical, action: Any) -> Parts:
    decides = distribution.legal().sum(-1) > 1
    return Parts(distribution.log_prob(action), distribution.entropy(), decides)


def _one(whole: Parts) -> Parts:
    return Parts(*(x[..., None] for x in whole))
