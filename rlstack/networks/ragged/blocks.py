"""The transformer's blocks and layer norm, over rows of tokens of one or several environments."""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.configs.entities import Pooling, RaggedTransformerConfig
from rlstack.networks.layers.linear import Linear
from rlstack.networks.ragged.relative_positions import PairCodes

_MASKED = -1e9  # the logit of a masked token; finite, so that a fully masked row is not NaN


class TokenRows(NamedTuple):
    """The environment and the visibility of each token of the rows; see `packed_rows`."""

    environment: Array  # [R, L] int32, -1 at padding
    visible: Array  # [R, L] bool, whether the policy may see the token

    def attention_mask(self) -> Array:
        """Returns whether a token (axis 1) may attend to another (axis 2), bool ``[R, L, L]``.

        A token attends to the tokens of its own environment. A visible token does not attend to
        hidden ones, so that hidden information cannot reach an action.
        """
        same = self.environment[:, :, None] == self.environment[:, None, :]
        present = (self.environment >= 0)[:, None, :]
        return same & present & (self.visible[:, None, :] | ~self.visible[:, :, None])


class Blocks(hk.Module):
    """Blocks of attention (or pooling) and dense layers, with layer norm before each (pre-norm).

    There is no layer norm after the last block.
    """

    def __init__(self, cfg: RaggedTransformerConfig) -> None:
        """Builds ``cfg.num_layers`` blocks."""
        super().__init__(name="trunk")  # the name of the params in checkpoints
        self._cfg = cfg

    def __call__(self, x: Array, rows: TokenRows, codes: PairCodes) -> Array:
        """Maps embeddings ``[R, L, D]`` to ``[R, L, D]``."""
        cfg, mask = self._cfg, rows.attention_mask()
        for layer in range(cfg.num_layers):
            normed = layer_norm(f"norm_{layer}")(x)
            with hk.name_scope(f"block_{layer}"):
                if cfg.pooling == "none":
                    mixed = attention(normed, mask, codes, cfg.num_heads)
                else:
                    mixed = Pool(cfg.pooling, cfg.d_model)(normed, mask)
            x = x + mixed
            normed = layer_norm(f"norm_{layer}_dense")(x)
            hidden = jax.nn.gelu(_linear(4 * cfg.d_model, f"dense_{layer}_in")(normed))
            x = x + _linear(cfg.d_model, f"dense_{layer}_out")(hidden)
        return x


def attention(x: Array, mask: Array, codes: PairCodes, num_heads: int) -> Array:
    """Applies multi-head attention with relative positions (Shaw et al. 2018, arXiv:1803.02155).

    Args:
      x: ``[R, L, D]``.
      mask: bool ``[R, L, L]``, see `TokenRows.attention_mask`.
      codes: the codes of relative positions, of size D / num_heads.
      num_heads: number of heads, a divisor of D.

    Returns:
      ``[R, L, D]``.
    """
    num_rows, length, size = x.shape
    joined = _linear(3 * size, "query_key_value")(x)
    query, key, value = jnp.moveaxis(
        joined.reshape((num_rows, length, 3, num_heads, size // num_heads)), 2, 0
    )
    logits = jnp.einsum("rqhd,rkhd->rhqk", query, key)
    if codes.key is not None:
        logits += _of_pairs(query, codes.key)
    logits *= 1 / np.sqrt(size // num_heads)
    weights = jax.nn.softmax(jnp.where(mask[:, None], logits, _MASKED))
    gathered = jnp.einsum("rhqk,rkhd->rqhd", weights, value)
    if codes.value is not None:
        gathered += jnp.einsum("rhqk,rqkd->rqhd", weights, codes.value)
    return _linear(size, "result")(gathered.reshape((num_rows, length, size)))


def _of_pairs(query: Array, codes: Array) -> Array:
    """Returns the products of queries ``[R, Q, H, D]`` and codes ``[R, Q, K, D]``, [R, H, Q, K].

    ``jnp.einsum`` would exchange the operands, and XLA would take six times as long for the
    gradient of the queries.
    """
    products = jax.lax.dot_general(query, codes, (((3,), (3,)), ((0, 1), (0, 1))))  # [R, Q, H, K]
    return jnp.moveaxis(products, 1, 2)


class Pool(hk.Module):
    """Replaces attention: a dense layer, the mean or maximum of visible tokens, a dense layer."""

    def __init__(self, kind: Pooling, d_model: int) -> None:
        """Makes the module; ``kind`` is mean, max or meanmax."""
        super().__init__(name="pooling")
        self._kind, self._d_model = kind, d_model

    def __call__(self, x: Array, mask: Array) -> Array:
        """Maps ``x`` ``[R, L, D]`` to ``[R, L, D]``; the bool ``mask`` is ``[R, L, L]``."""
        init = hk.initializers.RandomNormal(0.02)
        x = Linear(self._d_model, w_init=init, name="before")(x)
        pooled = []
        if self._kind in ("mean", "meanmax"):
            count = jnp.maximum(mask.sum(-1, keepdims=True), 1)
            pooled.append((mask / count).astype(x.dtype) @ x)
        if self._kind in ("max", "meanmax"):
            largest = jnp.where(mask[..., None], x[:, None], -jnp.inf).max(axis=2)
            pooled.append(jnp.where(mask.any(-1, keepdims=True), largest, 0.0))
        return Linear(self._d_model, w_init=init, name="after")(jnp.concatenate(pooled, axis=-1))


def layer_norm(name: str) -> hk.LayerNorm:
    """Makes a layer norm over the last axis."""
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, name=name)


def _linear(size: int, name: str) -> Linear:
    return Linear(size, w_init=hk.initializers.RandomNormal(0.02), name=name)
