"""Dense layers: plain ones, and ones with learned noise for exploration."""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlstack.networks.layers.products import multiply


class Linear(hk.Module):
    """A dense layer; a replacement for ``hk.Linear`` with the same parameters."""

    def __init__(
        self,
        size: int,
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
        *,
        b_init: hk.initializers.Initializer = jnp.zeros,
        with_bias: bool = True,
    ) -> None:
        """Makes the layer.

        Args:
          size: size of the output.
          w_init: initial weights; by default a truncated normal distribution with the standard
              deviation 1 / sqrt(inputs), as in ``hk.Linear``.
          name: the name of the Haiku module; ``linear`` by default.
          b_init: initial biases.
          with_bias: whether to add biases.
        """
        super().__init__(name=name)
        self._size, self._with_bias = size, with_bias
        self._w_init, self._b_init = w_init, b_init

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., size]``."""
        shape = (x.shape[-1], self._size)
        w_init = self._w_init or hk.initializers.TruncatedNormal(stddev=1 / np.sqrt(shape[0]))
        w = hk.get_parameter("w", shape, x.dtype, init=w_init)
        y = multiply(x, w)
        if not self._with_bias:
            return y
        return y + hk.get_parameter("b", shape[1:], x.dtype, init=self._b_init)


class NoisyLinear(hk.Module):
    """A dense layer with factorised Gaussian noise on weights and biases.

    Fortunato et al. (2018), https://arxiv.org/abs/1706.10295, equations 9 to 11 with the initial
    values of section 3.2: y = (w + w_sigma * f(p) f(q)^T) x + b + b_sigma * f(q), where p and q
    are standard normal and f(x) = sgn(x) sqrt|x|.

    All rows of a batch share one draw of the noise, as in section 3.1 of the paper. Without an RNG
    key the layer uses its mean weights.
    """

    def __init__(self, size: int, sigma: float, name: str | None = None) -> None:
        """Makes the layer.

        Args:
          size: size of the output.
          sigma: initial scale of the noise, sigma_0 in the paper (0.5 there).
          name: name of the module.
        """
        super().__init__(name=name)
        self._size, self._sigma = size, sigma

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., size]``."""
        num_inputs = x.shape[-1]
        bound = num_inputs**-0.5
        uniform = hk.initializers.RandomUniform(-bound, bound)
        scale = hk.initializers.Constant(self._sigma * bound)
        w = hk.get_parameter("w", (num_inputs, self._size), init=uniform)
        b = hk.get_parameter("b", (self._size,), init=uniform)
        w_sigma = hk.get_parameter("w_sigma", (num_inputs, self._size), init=scale)
        b_sigma = hk.get_parameter("b_sigma", (self._size,), init=scale)
        key = hk.maybe_next_rng_key()
        if key is not None:
            noise = _noise(key, num_inputs + self._size).astype(w.dtype)
            in_noise, out_noise = noise[:num_inputs], noise[num_inputs:]
            w = w + w_sigma * jnp.outer(in_noise, out_noise)
            b = b + b_sigma * out_noise
        return multiply(x, w) + b


def linear(
    size: int,
    *,
    noise: float = 0.0,
    w_init: hk.initializers.Initializer | None = None,
    name: str | None = None,
) -> Callable[[jax.Array], jax.Array]:
    """Makes a dense layer: a `NoisyLinear` with sigma ``noise``, or a plain one if it is 0."""
    if noise:
        return NoisyLinear(size, noise, name)
    return Linear(size, w_init=w_init, name=name)


def _noise(key: jax.Array, size: int) -> jax.Array:
    draws = jax.random.normal(key, (size,))
    return jnp.sign(draws) * jnp.sqrt(jnp.abs(draws))
