"""Embedding of entities of different types as tokens of one width."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.networks.layers.linear import Linear
from rlstack.networks.ragged.entity_layout import GLOBAL, EntityLayout, leading_shape, module_names
from rlstack.types import PyTree


class Embedding(hk.Module):
    """A dense layer, ReLU and layer norm per type; a type without features is a learned vector.

    The global features are concatenated to the features of every entity.
    """

    def __init__(self, layout: EntityLayout, d_model: int) -> None:
        """Makes the module; ``d_model`` is the width of a token."""
        super().__init__(name="embedding")
        self._layout, self._d_model = layout, d_model

    def __call__(self, observation: PyTree) -> Array:
        """Returns the tokens of all slots, including empty ones, ``[B, E, D]``."""
        features = observation["features"]
        (batch,) = leading_shape(observation)
        shared = features.get(GLOBAL)
        names = module_names([kind.name for kind in self._layout.types])
        parts = []
        for kind in self._layout.types:
            found = [features[kind.name]] if kind.features else []
            if shared is not None and kind.name != GLOBAL:
                found.append(jnp.broadcast_to(shared, (batch, kind.capacity, shared.shape[-1])))
            if found:
                parts.append(self._embedded(names[kind.name], jnp.concatenate(found, axis=-1)))
            else:
                init = hk.initializers.RandomNormal()
                name = f"{names[kind.name]}_vector"
                vector = hk.get_parameter(name, (self._d_model,), init=init)
                parts.append(jnp.broadcast_to(vector, (batch, kind.capacity, self._d_model)))
        return jnp.concatenate(parts, axis=1)

    def _embedded(self, name: str, x: Array) -> Array:
        # Biases are random, because with zero biases the norm reduces a single feature to its sign.
        bound = 1 / np.sqrt(x.shape[-1])
        init = hk.initializers.RandomUniform(-bound, bound)
        layer = Linear(self._d_model, init, f"{name}_linear", b_init=init)
        return layer_norm(f"{name}_norm")(jax.nn.relu(layer(x)))


def layer_norm(name: str) -> hk.LayerNorm:
    """Makes a layer norm over the last axis."""
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, name=name)
