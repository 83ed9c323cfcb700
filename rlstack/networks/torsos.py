"""Torsos: Haiku modules from observations, a float array ``[B, ...]``, to features ``[B, D]``.

`observation_features` converts any pytree of observations to such an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.networks.noisy import linear
from rlstack.types import PyTree

ACTION_MASK = "action_mask"  # the entry of a dict observation that marks the legal actions


def action_mask(observation: PyTree) -> jax.Array | None:
    """Returns the action mask of a dict observation, bool ``[B, A]`` or a pytree, or None."""
    if isinstance(observation, Mapping) and ACTION_MASK in observation:
        return jax.tree.map(lambda mask: mask.astype(bool), observation[ACTION_MASK])
    return None


def without_action_mask(tree: PyTree) -> PyTree:
    """Removes the action mask from a dict observation or its spec."""
    if isinstance(tree, Mapping) and ACTION_MASK in tree:
        return {name: value for name, value in tree.items() if name != ACTION_MASK}
    return tree


def observation_features(obs_spec: PyTree, observation: PyTree) -> jax.Array:
    """Converts an observation to one float array ``[B, ...]`` for a torso.

    Images (uint8 of rank 3) are scaled to [0, 1] with the channels last. Discrete entries become
    one-hot. Several entries are flattened and concatenated. The action mask is left out.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      observation: the same structure of arrays ``[B, ...]``.
    """
    spec_leaves = jax.tree.leaves(without_action_mask(obs_spec))
    leaves = [
        _leaf_features(spec, x)
        for spec, x in zip(
            spec_leaves, jax.tree.leaves(without_action_mask(observation)), strict=True
        )
    ]
    if len(leaves) == 1:
        return leaves[0]
    return jnp.concatenate([x.reshape((x.shape[0], -1)) for x in leaves], axis=-1)


def is_image(spec: specs.Array) -> bool:
    """Returns whether a spec describes an image: uint8 of rank 3."""
    return len(spec.shape) == 3 and spec.dtype == np.uint8


def _leaf_features(spec: specs.Array, x: jax.Array) -> jax.Array:
    if isinstance(spec, specs.DiscreteArray):
        return jax.nn.one_hot(x, spec.num_values)
    x = x.astype(jnp.float32)
    if is_image(spec):
        # The shortest axis is that of the channels.
        channels_first = spec.shape[0] == min(spec.shape)
        return (jnp.moveaxis(x, 1, -1) if channels_first else x) / 255.0
    return x


class MLPTorso(hk.Module):
    """Dense layers over the flattened input; orthogonal initial weights with gain sqrt(2)."""

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "tanh",
        noise: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._sizes, self._noise = tuple(sizes), noise
        self._activation = getattr(jax.nn, activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[B, ...]`` to ``[B, sizes[-1]]``."""
        x = x.reshape((x.shape[0], -1))
        init = hk.initializers.Orthogonal(np.sqrt(2))
        for size in self._sizes:
            x = self._activation(linear(size, noise=self._noise, w_init=init)(x))
        return x


class NatureTorso(hk.Module):
    """The convolutions of Mnih et al. (2015), https://doi.org/10.1038/nature14236, then dense."""

    def __init__(self, hidden_size: int = 512, noise: float = 0.0, name: str | None = None) -> None:
        super().__init__(name=name)
        self._hidden_size, self._noise = hidden_size, noise

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images ``[B, H, W, C]`` to ``[B, hidden_size]``."""
        init = hk.initializers.Orthogonal(np.sqrt(2))
        for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = jax.nn.relu(hk.Conv2D(channels, kernel, stride, padding="VALID", w_init=init)(x))
        x = x.reshape((x.shape[0], -1))
        return jax.nn.relu(linear(self._hidden_size, noise=self._noise, w_init=init)(x))


class ImpalaTorso(hk.Module):
    """The deep residual torso of Espeholt et al. (2018), figure 3, arXiv:1802.01561."""

    def __init__(
        self,
        channels: Sequence[int] = (16, 32, 32),
        hidden_size: int = 256,
        noise: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._channels = tuple(channels)
        self._hidden_size, self._noise = hidden_size, noise

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images ``[B, H, W, C]`` to ``[B, hidden_size]``."""
        for channels in self._channels:
            x = hk.Conv2D(channels, 3, 1, padding="SAME")(x)
            x = hk.max_pool(x, (3, 3, 1), (2, 2, 1), padding="SAME")
            for _ in range(2):
                residual = hk.Conv2D(channels, 3, 1, padding="SAME")(jax.nn.relu(x))
                x = x + hk.Conv2D(channels, 3, 1, padding="SAME")(jax.nn.relu(residual))
        x = jax.nn.relu(x).reshape((x.shape[0], -1))
        return jax.nn.relu(linear(self._hidden_size, noise=self._noise)(x))
