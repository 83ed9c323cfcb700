"""The interface of all distributions, and ``Joint``, a pytree of independent distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
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
        parts = [treedef.flatten_up_to(tree) for tree in rest]
        return jax.tree.unflatten(
            treedef, [function(*row) for row in zip(leaves, *parts, strict=True)]
        )

    def _sum(self, function: Callable[..., Array], *rest: PyTree) -> Array:
        leaves, treedef = _flatten(self.components)
        parts = [treedef.flatten_up_to(tree) for tree in rest]
        return _total([function(*row) for row in zip(leaves, *parts, strict=True)])


def _is_distribution(x: object) -> bool:
    kinds = (Categorical, MultiCategorical, Normal, TanhNormal, Deterministic, Joint)
    return isinstance(x, kinds)


def _flatten(components: PyTree) -> tuple[list[Distribution], PyTreeDef]:
    """Returns the distributions in a pytree, and its structure."""
    return jax.tree.flatten(components, is_leaf=_is_distribution)


def _total(parts: list[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
