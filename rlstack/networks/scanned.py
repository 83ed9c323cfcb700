"""Recurrent cores whose state is a linear recurrence: minGRU and S5.

All matrix products are over the whole sequence, where those of an LSTM or GRU wait for the step
before. What is left is a product and a sum of vectors at each step: a parallel scan, or on CPUs,
which have few units for it, a loop. Resets are inside of it: at the first step of an episode the
old state is multiplied by 0 (Lu et al. 2023, "Structured State Space Models for In-Context
Reinforcement Learning", https://arxiv.org/abs/2303.03982).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlstack.math.recurrences import linear_scan
from rlstack.networks.base import SequenceCore
from rlstack.networks.layers.linear import Linear
from rlstack.types import Array, PRNGKey

_LONGEST = 1000.0  # steps for which the first gates of minGRU keep an input
_STEPS = (1e-3, 1e-1)  # the first lengths of a step of S5


# (x [T, B, D], keeps, state [B, D]) -> (outputs [T, B, D], the state after the last step [B, D]),
# with keeps bool [T, B, 1], False where an episode begins; called inside a Haiku transform.
Recurrence = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class ScannedCore(SequenceCore):
    """Layers that add to their input what a recurrence finds in its layer norm.

    Features of another size than theirs pass through a dense layer first.
    """

    def __init__(self, recurrence: Recurrence, size: int, num_layers: int, name: str) -> None:
        """Makes ``num_layers`` layers of this size, each with params of its own."""
        super().__init__(name=name)
        self._recurrence, self._size, self._num_layers = recurrence, size, num_layers

    def initial_state(self, batch_size: int) -> tuple[jax.Array, ...]:
        """Returns zeros ``[B, size]`` for each layer."""
        return (jnp.zeros((batch_size, self._size)),) * self._num_layers

    def __call__(
        self, features: jax.Array, first: Array, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Maps ``[T, B, D]`` to ``[T, B, size]``; see `SequenceCore`."""
        x, keeps, after = features, jnp.logical_not(first)[..., None], []
        if x.shape[-1] != self._size:
            x = Linear(self._size, name="input")(x)
        for layer, before in enumerate(state):
            with hk.name_scope(f"layer_{layer}"):
                normed = hk.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")(x)
                found, new = self._recurrence(normed, keeps, before)
            x = x + found
            after.append(new)
        return x, tuple(after)


def min_gru(x: jax.Array, keeps: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies minGRU, Feng et al. (2024), "Were RNNs All We Needed?", arXiv:2410.01201.

    Section 3.1: h[t] = (1 - z[t]) h[t - 1] + z[t] c[t], where the gate z = sigmoid(W x + b) and the
    candidate c = V x + d depend on the step's input alone. Deviation: the first gates keep inputs
    for 1 to 1,000 steps, by initial biases as those of Tallec and Ollivier (2018),
    https://arxiv.org/abs/1804.11188, equation 16, but uniform in logarithms. With biases of 0, what
    is kept would halve from step to step.
    """
    gates = Linear(2 * state.shape[-1], b_init=_first_gates, name="gates")(x)
    update, candidate = jnp.split(gates, 2, axis=-1)
    update = jax.nn.sigmoid(update)
    found = linear_scan(jnp.where(keeps, 1 - update, 0.0), update * candidate, state)
    return found, found[-1]


def _first_gates(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns the biases of the gate, and zeros, those of the candidate."""
    kept = jax.random.uniform(hk.next_rng_key(), (shape[0] // 2,), dtype) * np.log(_LONGEST)
    return jnp.concatenate([-kept, jnp.zeros_like(kept)])


def s5(x: jax.Array, keeps: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies S5, Smith et al. (2023), https://arxiv.org/abs/2208.04933.

    The recurrence is x' = A x + B u, y = C x + D u, with a diagonal complex A (section 3), and a
    zero-order hold with learned steps (equation 6). It starts as the normal part of HiPPO-LegS, in
    one block, and with real B and C in the basis of that matrix. Complex numbers come in conjugate
    pairs, of which one is computed: the state is the real parts and the imaginary parts of D / 2 of
    them. GELU and a gate (half GLU) follow, as in appendix G. Deviation: the real part of A is -exp
    of a param, so it stays below 0.
    """
    size, half = state.shape[-1], state.shape[-1] // 2
    steps = hk.initializers.RandomUniform(*np.log(_STEPS))
    step = jnp.exp(hk.get_parameter("log_step", (half,), init=steps))
    real = hk.get_parameter("log_decay", (half,), init=hk.initializers.Constant(np.log(0.5)))
    imaginary = hk.get_parameter("frequency", (half,), init=_frequencies)
    rates = jax.lax.complex(-jnp.exp(real), imaginary)
    decay = jnp.exp(rates * step)
    entered = _joined(Linear(size, _to_basis, "enter", with_bias=False)(x))
    inputs = entered * ((decay - 1) / rates)
    found = linear_scan(jnp.where(keeps, decay, 0.0), inputs, _joined(state))
    parts = jnp.concatenate([found.real, found.imag], axis=-1)
    passed = x * hk.get_parameter("passed", (size,), init=hk.initializers.RandomNormal())
    y = jax.nn.gelu(Linear(size, _from_basis, "leave", with_bias=False)(parts) + passed)
    return y * jax.nn.sigmoid(Linear(size, name="gate")(y)), parts[-1]


def _joined(parts: jax.Array) -> jax.Array:
    return jax.lax.complex(*jnp.split(parts, 2, axis=-1))


@functools.cache
def hippo(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the imaginary parts of half of the eigenvalues of HiPPO-N, and their eigenvectors.

    Smith et al. (2023), appendix B.1.1: the matrix has -1/2 in its diagonal, and is antisymmetric
    beside it. So all eigenvalues have the real part -1/2, and they come in conjugate pairs.

    Args:
      size: an even number.

    Returns:
      ``[size / 2]``, above 0 and rising; ``[size, size / 2]``, complex columns of norm 1, whose
      first entry is real and above 0.
    """
    root = np.sqrt(2 * np.arange(size) + 1)
    below = np.tril(np.outer(root, root), -1) / 2
    values, vectors = np.linalg.eigh(-1j * (below.T - below))
    values, vectors = values[size // 2 :], vectors[:, size // 2 :]
    return values, vectors * np.exp(-1j * np.angle(vectors[0]))


def _frequencies(shape: Sequence[int], dtype: Any) -> jax.Array:
    return jnp.asarray(hippo(2 * shape[0])[0], dtype)


def _real_matrix(key: PRNGKey, shape: Sequence[int]) -> jax.Array:
    return jax.random.truncated_normal(key, -2, 2, shape) / np.sqrt(shape[0])


def _to_basis(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns a random matrix of inputs, in the basis of eigenvectors: real and imaginary parts."""
    vectors = hippo(shape[1])[1].conj()
    basis = np.concatenate([vectors.real, vectors.imag], axis=1)
    return _real_matrix(hk.next_rng_key(), shape) @ jnp.asarray(basis, dtype)


def _from_basis(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns a random matrix of outputs, of the real and imaginary parts of each pair."""
    vectors = hippo(shape[0])[1]
    basis = np.concatenate([2 * vectors.real, -2 * vectors.imag], axis=1)
    return jnp.asarray(basis.T, dtype) @ _real_matrix(hk.next_rng_key(), shape)
