"""GTrXL: attention to the last steps of an episode, with gates instead of skip connections.

Parisotto et al. (2020), "Stabilizing Transformers for Reinforcement Learning",
https://arxiv.org/abs/1910.06764.
"""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlstack.networks.base import SequenceCore
from rlstack.networks.layers.linear import Linear
from rlstack.types import Array

_GATE_BIAS = 2.0  # b_g of the paper: the first gates let the input pass
_MASKED = -1e9


class Memory(NamedTuple):
    """What GTrXL knows of the steps before."""

    inputs: jax.Array  # [B, L, M, D] of each layer at the last M steps, 0 before the episode
    length: jax.Array  # [B] int32, how many of these M steps there were


class GTrXL(SequenceCore):
    """A gated transformer over time; its state holds the inputs of its layers at the last steps.

    Each layer is that of section 3.1 and 3.2: layer norm before attention and before the dense
    layers, ReLU after them, and GRU gates in the place of sums. The attention has the relative
    positions of Transformer-XL (Dai et al. 2019, https://arxiv.org/abs/1901.02860, section 3.3),
    and no gradient flows into the state. A step attends to itself and to the ``memory`` steps
    before it that belong to its episode, whether they are in the sequence or in the state. So a
    sequence has the outputs of its single steps. The dense layers have 4 D units.
    """

    def __init__(
        self, size: int, num_layers: int, memory: int, num_heads: int, name: str = "core"
    ) -> None:
        """Makes the core.

        Args:
          size: D, the size of each layer's input and output.
          num_layers: L.
          memory: M, the number of earlier steps that each layer attends to.
          num_heads: number of heads, a divisor of ``size``.
          name: name of the module.
        """
        super().__init__(name=name)
        self._size, self._num_layers = size, num_layers
        self._memory, self._num_heads = memory, num_heads

    def initial_state(self, batch_size: int) -> Memory:
        """Returns an empty memory."""
        shape = (batch_size, self._num_layers, self._memory, self._size)
        return Memory(jnp.zeros(shape), jnp.zeros(batch_size, jnp.int32))

    def __call__(
        self, features: jax.Array, first: Array, state: Memory
    ) -> tuple[jax.Array, Memory]:
        """Maps ``[T, B, D]`` to ``[T, B, size]``; see `SequenceCore`."""
        x = Linear(self._size, name="input")(jnp.swapaxes(features, 0, 1))
        episode = _episodes(first, state.length, self._memory)
        mask = _visible(episode, self._memory)
        remembered = jax.lax.stop_gradient(state.inputs)
        kept = []
        for layer in range(self._num_layers):
            seen = jnp.concatenate([remembered[:, layer], x], axis=1)
            kept.append(seen[:, -self._memory :])
            with hk.name_scope(f"layer_{layer}"):
                found = _attention(_norm("norm")(seen), mask, self._num_heads)
                y = gated(x, jax.nn.relu(found), "gate")
                hidden = jax.nn.relu(Linear(4 * self._size, name="dense_in")(_norm("norm_2")(y)))
                found = Linear(self._size, name="dense_out")(hidden)
                x = gated(y, jax.nn.relu(found), "gate_2")
        current = episode[:, -self._memory :] == episode[:, -1:]
        inputs = jnp.where(current[:, None, :, None], jnp.stack(kept, axis=1), 0.0)
        after = Memory(inputs, current.sum(axis=1, dtype=jnp.int32))
        return jnp.swapaxes(x, 0, 1), after


def _attention(seen: jax.Array, mask: jax.Array, num_heads: int) -> jax.Array:
    """Returns what the steps of the sequence find, ``[B, T, D]``.

    Args:
      seen: ``[B, M + T, D]``, the steps of the memory and of the sequence.
      mask: bool ``[B, T, M + T]``, whether a step of the sequence attends to another.
      num_heads: number of heads.
    """
    length, size = mask.shape[1], seen.shape[-1]
    shape = (num_heads, size // num_heads)

    def heads(x: jax.Array, name: str) -> jax.Array:
        return Linear(size, name=name, with_bias=False)(x).reshape((*x.shape[:-1], *shape))

    query = heads(seen[:, -length:], "query")
    key, value = heads(seen, "key"), heads(seen, "value")
    places = heads(jnp.asarray(_positions(mask.shape[2] - length, size)), "position")
    of_content = hk.get_parameter("content_bias", shape, init=jnp.zeros)
    of_place = hk.get_parameter("position_bias", shape, init=jnp.zeros)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query + of_content, key)
    logits += _to_keys(jnp.einsum("bqhd,mhd->bhqm", query + of_place, places))
    logits = jnp.where(mask[:, None], logits / np.sqrt(shape[1]), _MASKED)
    found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)
    return Linear(size, name="result", with_bias=False)(found.reshape((-1, length, size)))


def gated(x: jax.Array, y: jax.Array, name: str) -> jax.Array:
    """Joins a layer's input x and its result y ``[..., D]`` as a GRU does (paper, equation 8)."""
    with hk.name_scope(name):
        size = x.shape[-1]
        of_y = Linear(3 * size, name="of_result", with_bias=False)(y)
        reset_y, update_y, new_y = jnp.split(of_y, 3, axis=-1)
        of_x = Linear(2 * size, name="of_input", with_bias=False)(x)
        reset_x, update_x = jnp.split(of_x, 2, axis=-1)
        bias = hk.get_parameter("bias", (size,), init=hk.initializers.Constant(_GATE_BIAS))
        update = jax.nn.sigmoid(update_y + update_x - bias)
        kept = jax.nn.sigmoid(reset_y + reset_x) * x
        new = jnp.tanh(new_y + Linear(size, name="of_kept", with_bias=False)(kept))
        return (1 - update) * x + update * new


def _norm(name: str) -> hk.LayerNorm:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)


def _episodes(first: Array, length: jax.Array, memory: int) -> jax.Array:
    """Numbers the episodes of the steps of memory and sequence, int32 ``[B, M + T]``.

    The episode of the state is 0; empty places of the memory are -1.
    """
    there = jnp.arange(memory) >= memory - length[:, None]
    numbers = jnp.cumsum(first.T, axis=1, dtype=jnp.int32)
    return jnp.concatenate([jnp.where(there, 0, -1), numbers], axis=1)


def _visible(episode: jax.Array, memory: int) -> jax.Array:
    """Returns whether a step of the sequence attends to another, bool ``[B, T, M + T]``."""
    length = episode.shape[1] - memory
    distance = memory + np.arange(length)[:, None] - np.arange(memory + length)
    near = (distance >= 0) & (distance <= memory)
    return jnp.asarray(near) & (episode[:, memory:, None] == episode[:, None, :])


def _positions(memory: int, size: int) -> np.ndarray:
    """Returns sines and cosines of the distances M, ..., 1, 0 between steps, ``[M + 1, D]``."""
    rates = 10_000.0 ** (-np.arange(0, size, 2) / size)
    angles = np.arange(memory, -1, -1)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :size].astype(np.float32)


def _to_keys(logits: jax.Array) -> jax.Array:
    """Moves row t of ``[..., T, M + 1]`` to the right by t places, in ``[..., T, M + T]``.

    In memory, rows of M + 1 + T numbers that are read as rows of M + T move by one more place each.
    """
    *leading, length, width = logits.shape
    flat = jnp.pad(logits, [(0, 0)] * (len(leading) + 1) + [(0, length)])
    flat = flat.reshape((*leading, -1))[..., : length * (width + length - 1)]
    return flat.reshape((*leading, length, width + length - 1))
