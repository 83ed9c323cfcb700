"""What may take the place of attention: each entity learns a summary of those it may see."""

from __future__ import annotations

import haiku as hk
import jax.numpy as jnp
from jax import Array

from rlstack.networks.ragged.config import Pooling


class Pool(hk.Module):
    """A dense layer, the mean or maximum over what each entity may see, and a dense layer."""

    def __init__(self, kind: Pooling, d_model: int) -> None:
        """Pools by ``kind``: mean, max or meanmax."""
        super().__init__(name="pooling")
        self._kind, self._d_model = kind, d_model

    def __call__(self, x: Array, sees: Array) -> Array:
        """Returns ``[R, L, D]``.

        Args:
          x: ``[R, L, D]``.
          sees: bool ``[R, L, L]``, whether the first may see the second.
        """
        init = hk.initializers.RandomNormal(0.02)
        x = hk.Linear(self._d_model, w_init=init, name="before")(x)
        pooled = []
        if self._kind in ("mean", "meanmax"):
            count = jnp.maximum(sees.sum(-1, keepdims=True), 1)
            pooled.append((sees / count).astype(x.dtype) @ x)
        if self._kind in ("max", "meanmax"):
            largest = jnp.where(sees[..., None], x[:, None], -jnp.inf).max(axis=2)
            pooled.append(jnp.where(sees.any(-1, keepdims=True), largest, 0.0))
        return hk.Linear(self._d_model, w_init=init, name="after")(jnp.concatenate(pooled, axis=-1))
