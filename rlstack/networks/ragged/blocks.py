"""The transformer's blocks, over rows of entities of one or of several environments."""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.networks.ragged.config import Pooling, RaggedTransformerConfig
from rlstack.networks.ragged.embedding import layer_norm
from rlstack.networks.ragged.relative_positions import PairCodes

_NOT_SEEN = -1e9  # finite, so that a row that sees nothing stays finite


class TokenRows(NamedTuple):
    """Who stands where in rows of attention; a row without packing is an environment."""

    environment: Array  # [R, L] int32, -1 where nobody stands
    visible: Array  # [R, L] bool

    def sees(self) -> Array:
        """Returns which entity may see which, bool ``[R, L, L]``.

        Only those of its environment; and whoever the policy sees does not see the hidden, so that
        what is hidden cannot reach an action.
        """
        same = self.environment[:, :, None] == self.environment[:, None, :]
        there = (self.environment >= 0)[:, None, :]
        return same & there & (self.visible[:, None, :] | ~self.visible[:, :, None])


class Blocks(hk.Module):
    """Blocks of attention (or pooling) and dense layers, each normalised before and added after.

    There is no norm at the end.
    """

    def __init__(self, cfg: RaggedTransformerConfig) -> None:
        """Builds ``cfg.num_layers`` blocks."""
        super().__init__(name="trunk")
        self._cfg = cfg

    def __call__(self, x: Array, rows: TokenRows, codes: PairCodes) -> Array:
        """Returns ``[R, L, D]`` of embeddings ``[R, L, D]``."""
        cfg, sees = self._cfg, rows.sees()
        for layer in range(cfg.num_layers):
            normed = layer_norm(f"norm_{layer}")(x)
            with hk.name_scope(f"block_{layer}"):
                if cfg.pooling == "none":
                    mixed = attention(normed, sees, codes, cfg.num_heads)
                else:
                    mixed = Pool(cfg.pooling, cfg.d_model)(normed, sees)
            x = x + mixed
            normed = layer_norm(f"norm_{layer}_dense")(x)
            hidden = jax.nn.gelu(_linear(4 * cfg.d_model, f"dense_{layer}_in")(normed))
            x = x + _linear(cfg.d_model, f"dense_{layer}_out")(hidden)
        return x


def attention(x: Array, sees: Array, codes: PairCodes, num_heads: int) -> Array:
    """Returns what each entity gathers of those it sees.

    Args:
      x: ``[R, L, D]``.
      sees: bool ``[R, L, L]``.
      codes: of where they stand, as wide as a head.
      num_heads: heads, a divisor of D.
    """
    num_rows, length, size = x.shape
    joined = _linear(3 * size, "query_key_value")(x)
    query, key, value = jnp.moveaxis(
        joined.reshape((num_rows, length, 3, num_heads, size // num_heads)), 2, 0
    )
    logits = jnp.einsum("rqhd,rkhd->rhqk", query, key)
    if codes.key is not None:
        logits += jnp.einsum("rqhd,rqkd->rhqk", query, codes.key)
    logits *= 1 / np.sqrt(size // num_heads)
    weights = jax.nn.softmax(jnp.where(sees[:, None], logits, _NOT_SEEN))
    gathered = jnp.einsum("rhqk,rkhd->rqhd", weights, value)
    if codes.value is not None:
        gathered += jnp.einsum("rhqk,rqkd->rqhd", weights, codes.value)
    return _linear(size, "result")(gathered.reshape((num_rows, length, size)))


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


def _linear(size: int, name: str) -> hk.Linear:
    return hk.Linear(size, w_init=hk.initializers.RandomNormal(0.02), name=name)
