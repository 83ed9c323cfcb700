"""Distributions over discrete choices, with masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import Array, PRNGKey

# The logit of an illegal action. It is finite, so that 0 * log 0 is 0 and not NaN. Its exponential
# is exactly 0.
ILLEGAL = -1e9


class Categorical(NamedTuple):
    """One choice among A actions; build it with ``categorical``, which also takes a mask."""

    logits: Array  # [..., A] float32, unnormalised; ILLEGAL where an action is masked

    def sample(self, rng_key: PRNGKey) -> Array:
        """Draws one action per row, [...] int32."""
        return jax.random.categorical(rng_key, self.logits).astype(jnp.int32)

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[Array, Array]:
        """Draws one action per row and returns it with its log probability."""
        action = self.sample(rng_key)
        return action, self.log_prob(action)

    def log_prob(self, action: Array) -> Array:
        """Returns log p(action), [...]; about ``ILLEGAL`` for an illegal action."""
        # A product with one-hot rows, because the gradient of an indexed read is a scatter: XLA's
        # older CPU runtime aborts on it inside long loops.
        chosen = jnp.arange(self.logits.shape[-1]) == jnp.asarray(action, jnp.int32)[..., None]
        return jnp.where(chosen, self.log_probs(), 0.0).sum(-1)

    def log_probs(self) -> Array:
        """Returns the log probability of every action, [..., A]."""
        return jax.nn.log_softmax(self.logits)

    def probs(self) -> Array:
        """Returns the probability of every action, [..., A]; exactly 0 where illegal."""
        return jax.nn.softmax(self.logits)

    def legal(self) -> Array:
        """Returns which actions are legal, [..., A] bool."""
        return jnp.asarray(self.logits) > 0.5 * ILLEGAL

    def mixed(self, share: float) -> Categorical:
        """Returns it with this share of its probability spread evenly over the legal actions."""
        legal = self.legal()
        uniform = legal / jnp.maximum(legal.sum(axis=-1, keepdims=True), 1)
        probs = (1.0 - share) * self.probs() + share * uniform
        tiny = jnp.finfo(jnp.float32).tiny
        return Categorical(jnp.where(legal, jnp.log(jnp.maximum(probs, tiny)), ILLEGAL))

    def entropy(self) -> Array:
        """Returns the entropy over legal actions, [...]."""
        return -jnp.sum(self.probs() * self.log_probs(), axis=-1)

    def kl(self, other: Categorical) -> Array:
        """Returns KL(self || other), [...]; about 1e9 where other masks a legal action of self."""
        return jnp.sum(self.probs() * (self.log_probs() - other.log_probs()), axis=-1)

    def mode(self) -> Array:
        """Returns the action with the largest logit (the first of several), [...] int32."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)


class MultiCategorical(NamedTuple):
    """K independent choices of different sizes; an action is int32 [..., K].

    Smaller components are padded with illegal entries to the largest size, A.
    """

    logits: Array  # [..., K, A] float32, ILLEGAL where masked or beyond a component's size
    minimum: Array  # [..., K] int32, the smallest action of each component

    def categorical(self) -> Categorical:
        """Returns the components as one ``Categorical`` over [..., K], actions from 0."""
        return Categorical(self.logits)

    def mixed(self, share: float) -> MultiCategorical:
        """Returns it with each component mixed as `Categorical.mixed` says."""
        return self._replace(logits=self.categorical().mixed(share).logits)

    def sample(self, rng_key: PRNGKey) -> Array:
        """Draws one action per row, [..., K] int32."""
        return self.categorical().sample(rng_key) + self.minimum

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[Array, Array]:
        """Draws one action per row and returns it with its log probability."""
        action = self.sample(rng_key)
        return action, self.log_prob(action)

    def log_prob(self, action: Array) -> Array:
        """Returns the sum of the components' log probabilities, [...]."""
        return jnp.sum(self.categorical().log_prob(action - self.minimum), axis=-1)

    def legal(self) -> Array:
        """Returns which choices are legal, [..., K, A] bool."""
        return self.categorical().legal()

    def entropy(self) -> Array:
        """Returns the sum of the components' entropies, [...]."""
        return jnp.sum(self.categorical().entropy(), axis=-1)

    def kl(self, other: MultiCategorical) -> Array:
        """Returns the sum of the components' KL(self || other), [...]."""
        return jnp.sum(self.categorical().kl(other.categorical()), axis=-1)

    def mode(self) -> Array:
        """Returns the most likely action of each component, [..., K] int32."""
        return self.categorical().mode() + self.minimum


def categorical(logits: Array, mask: Array | None = None) -> Categorical:
    """Makes a ``Categorical`` that never takes a masked action.

    Args:
      logits: [..., A]; -inf counts as illegal.
      mask: [..., A], True where the action is legal. In a row without a legal action all actions
        count as legal, because padding rows have such masks and must stay finite.

    Raises:
      ValueError: the mask does not have the shape of the logits.
    """
    logits = jnp.maximum(jnp.asarray(logits, jnp.float32), ILLEGAL)
    if mask is not None:
        check_mask("categorical", logits, mask)
        mask = jnp.asarray(mask) != 0
        mask |= ~jnp.any(mask, axis=-1, keepdims=True)
        logits = jnp.where(mask, logits, ILLEGAL)
    return Categorical(logits)


def multi_categorical(
    logits: Array,
    num_values: Sequence[int],
    minimum: Array | None = None,
    mask: Array | None = None,
) -> MultiCategorical:
    """Makes a ``MultiCategorical`` from concatenated logits.

    Args:
      logits: [..., sum(num_values)], the concatenated logits of the components.
      num_values: the sizes of the K components.
      minimum: [K] int, the smallest action of each component; zeros by default.
      mask: [..., sum(num_values)], True where legal; in a component without a legal choice all
        choices count as legal.

    Raises:
      ValueError: the mask does not have the shape of the logits.
    """
    if mask is not None:
        check_mask("multi_categorical", logits, mask)
    ends = np.cumsum(num_values)[:-1].tolist()
    parts = jnp.split(jnp.asarray(logits, jnp.float32), ends, axis=-1)
    masks = [None] * len(parts) if mask is None else jnp.split(jnp.asarray(mask), ends, axis=-1)
    rows = []
    for part, part_mask in zip(parts, masks, strict=True):
        row = categorical(part, part_mask).logits
        widths = [(0, 0)] * (row.ndim - 1) + [(0, max(num_values) - row.shape[-1])]
        rows.append(jnp.pad(row, widths, constant_values=ILLEGAL))
    stacked = jnp.stack(rows, axis=-2)
    offset = jnp.zeros(len(rows), jnp.int32) if minimum is None else jnp.asarray(minimum, jnp.int32)
    return MultiCategorical(stacked, jnp.broadcast_to(offset, stacked.shape[:-1]))


def check_mask(where: str, logits: Array, mask: Array) -> None:
    """Checks that a mask has the shape of the logits; broadcasting would change its meaning.

    Raises:
      ValueError: the shapes differ; the message begins with ``where``.
    """
    if np.shape(mask) != np.shape(logits):
        shape = np.shape(logits)
        raise ValueError(
            f"{where}: the action mask must have the shape of the logits, {shape}, one entry for "
            f"each choice; got {np.shape(mask)}. Declare the observation's action_mask with shape "
            f"({shape[-1] if shape else ''},) in the environment."
        )
