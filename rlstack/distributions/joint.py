"""The interface of all distributions; ``Joint``, a pytree of independent ones; and their parts.

The parts are independent too, such as each choice of a ``MultiCategorical``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from rlstack.distributions.continuous import Deterministic, Normal, TanhNormal
from rlstack.distributions.discrete import Categorical, MultiCategorical
from rlstack.types import Array, PRNGKey, PyTree

Self = TypeVar("Self")


class Distribution(Protocol):
    """The interface of all distributions; [...] are the leading (batch, time) axes."""

    def sample(self, rng_key: PRNGKey) -> PyTree:
        """Draws one action per row, [..., *action]."""

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[PyTree, Array]:
        """Draws one action per row and returns it with its log probability, [...]."""

    def log_prob(self, action: PyTree) -> Array:
        """Returns the log probability (density) of ``action``, [...] float32."""

    def entropy(self) -> Array:
        """Returns the entropy in nats, [...] float32."""

    def kl(self: Self, other: Self) -> Array:
        """Returns KL(self || other) in nats, [...] float32; ``other`` is of the same class."""

    def mode(self) -> PyTree:
        """Returns the greedy action, [..., *action]."""


class Joint(NamedTuple):
    """Independent distributions in a pytree; an action is a pytree of the same structure."""

    components: PyTree  # a dict, tuple or other pytree of distributions

    def sample(self, rng_key: PRNGKey) -> PyTree:
        """Draws one action per row from every component, each with its own key."""
        return self.map(lambda component, key: component.sample(key), self.split(rng_key))

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[PyTree, Array]:
        """Draws one action per row and returns it with its log probability."""
        leaves, treedef = _flatten(self.components)
        keys = jax.random.split(rng_key, len(leaves))
        pairs = [leaf.sample_and_log_prob(key) for leaf, key in zip(leaves, keys, strict=True)]
        action = jax.tree.unflatten(treedef, [action for action, _ in pairs])
        return action, _total([log_prob for _, log_prob in pairs])

    def log_prob(self, action: PyTree) -> Array:
        """Returns the sum of the components' log probabilities, [...]."""
        return self._sum(lambda component, part: component.log_prob(part), action)

    def entropy(self) -> Array:
        """Returns the sum of the components' entropies, [...]."""
        return self._sum(lambda component: component.entropy())

    def kl(self, other: Joint) -> Array:
        """Returns the sum of the components' KL(self || other), [...]."""
        return self._sum(lambda component, part: component.kl(part), other.components)

    def mode(self) -> PyTree:
        """Returns every component's mode."""
        return self.map(lambda component: component.mode())

    def split(self, rng_key: PRNGKey) -> PyTree:
        """Returns one key per component, in the structure of the components."""
        leaves, treedef = _flatten(self.components)
        return jax.tree.unflatten(treedef, list(jax.random.split(rng_key, len(leaves))))

    def map(self, function: Callable[..., PyTree], *rest: PyTree) -> PyTree:
        """Applies ``function(component, *parts)`` to every component; keeps the structure."""
        leaves, treedef = _flatten(self.components)
        columns = [treedef.flatten_up_to(tree) for tree in rest]
        return jax.tree.unflatten(
            treedef, [function(*row) for row in zip(leaves, *columns, strict=True)]
        )

    def _sum(self, function: Callable[..., Array], *rest: PyTree) -> Array:
        leaves, treedef = _flatten(self.components)
        columns = [treedef.flatten_up_to(tree) for tree in rest]
        return _total([function(*row) for row in zip(leaves, *columns, strict=True)])


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


def _is_distribution(x: object) -> bool:
    kinds = (Categorical, MultiCategorical, Normal, TanhNormal, Deterministic, Joint)
    return isinstance(x, kinds)


def _flatten(components: PyTree) -> tuple[list[Distribution], PyTreeDef]:
    """Returns the distributions in a pytree, and its structure."""
    return jax.tree.flatten(components, is_leaf=_is_distribution)


def _total(terms: list[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _of_choices(distribution: Categorical, action: Array) -> Parts:
    decides = distribution.legal().sum(-1) > 1
    return Parts(distribution.log_prob(action), distribution.entropy(), decides)


def _one(whole: Parts) -> Parts:
    return Parts(*(x[..., None] for x in whole))
