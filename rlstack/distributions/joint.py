"""What distributions have in common, and nests of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from rlstack.distributions.continuous import Deterministic, Normal, TanhNormal
from rlstack.distributions.discrete import Categorical, MultiCategorical
from rlstack.types import Array, PRNGKey, PyTree


class Distribution(Protocol):
    """What every distribution here offers; [...] are the leading (batch, time) axes."""

    def sample(self, rng_key: PRNGKey) -> PyTree:
        """Draws one action a row, [..., *action]."""

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[PyTree, Array]:
        """Draws one action a row and gives its log probability, [...]."""

    def log_prob(self, action: PyTree) -> Array:
        """Returns the log probability (density) of ``action``, [...] float32."""

    def entropy(self) -> Array:
        """Returns the entropy in nats, [...] float32."""

    def kl(self, other: Any) -> Array:
        """Returns KL(self || other) in nats, [...] float32; ``other`` is of the same kind."""

    def mode(self) -> PyTree:
        """Returns the greedy action, [..., *action]."""


class Joint(NamedTuple):
    """Independent distributions in a pytree; an action is a pytree of the same structure."""

    components: PyTree  # a dict, tuple or nest of distributions

    def sample(self, rng_key: PRNGKey) -> PyTree:
        """Draws one action a row from every component, each with a key of its own."""
        return self.map(lambda component, key: component.sample(key), self.split(rng_key))

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[PyTree, Array]:
        """Draws one action a row and gives its log probability."""
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
        """Returns one key a component, in the components' structure."""
        leaves, treedef = _flatten(self.components)
        return jax.tree.unflatten(treedef, list(jax.random.split(rng_key, len(leaves))))

    def map(self, function: Any, *rest: PyTree) -> PyTree:
        """Returns ``function(component, *parts)`` of every component, in the same structure."""
        leaves, treedef = _flatten(self.components)
        parts = [treedef.flatten_up_to(tree) for tree in rest]
        return jax.tree.unflatten(
            treedef, [function(*row) for row in zip(leaves, *parts, strict=True)]
        )

    def _sum(self, function: Any, *rest: PyTree) -> Array:
        leaves, treedef = _flatten(self.components)
        parts = [treedef.flatten_up_to(tree) for tree in rest]
        return _total([function(*row) for row in zip(leaves, *parts, strict=True)])


def _is_distribution(x: Any) -> bool:
    kinds = (Categorical, MultiCategorical, Normal, TanhNormal, Deterministic, Joint)
    return isinstance(x, kinds)


def _flatten(components: PyTree) -> tuple[list[Any], Any]:
    """The distributions in a nest, and the nest's structure."""
    return jax.tree.flatten(components, is_leaf=_is_distribution)


def _total(parts: list[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
