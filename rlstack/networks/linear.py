"""Products with weights: plain layers, and layers with learned noise for exploration.

On CPUs, XLA computes the gradient of weights, a product of two tall matrices, more slowly than it
could (JAX 0.12). `multiply` chooses one of three forms when a function is traced:

- *plain*: XLA's gradients, as `convolution.plain_only` says. The other forms have no forward-mode
  derivatives (``jax.jvp``).
- *by output*, for few outputs, such as values or a few actions: one product of a vector and a
  matrix for each output, which takes a tenth to a half of the time. The gradient of the inputs is a
  sum of few terms, which becomes one operation with those before it.
- *transposed*, for few inputs, and where their number is a power of two, so that reading a column
  is slow: first a copy of the inputs with exchanged axes. It takes 0.4 to 0.9 of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlstack.networks.convolution import plain_only

_FEW = 8  # outputs
_LEAST = 2**13  # entries of the inputs, from which the form by output is faster
_WIDE = 64  # inputs and outputs, from which a copy of the inputs can be faster
_MANY = 512  # rows, above which it is faster only for as many inputs or more
_NARROW = 16  # inputs, up to which the copy is so small that it is always faster


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``x @ w``, with gradients in the form that is fastest where it is traced.

    The forms differ in the order of sums.

    Args:
      x: ``[..., D]``.
      w: ``[D, size]``.
    """
    inputs, outputs = w.shape
    if plain_only():
        return jnp.dot(x, w)
    if outputs <= _FEW and x.size >= _LEAST:
        return _with_gradients_by_output(x, w)
    is_power_of_two = inputs & (inputs - 1) == 0
    few_rows = x.size <= _MANY * inputs
    slow_to_read = is_power_of_two and inputs >= _WIDE and (few_rows or inputs >= _MANY)
    if outputs >= _WIDE and (slow_to_read or inputs <= _NARROW):
        return _with_transposed_gradient(x, w)
    return jnp.dot(x, w)


def _as_matrices(x: jax.Array, of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x.reshape(-1, x.shape[-1]), of_y.reshape(-1, of_y.shape[-1])


def _by_output(saved: tuple[jax.Array, jax.Array], of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    outputs = range(w.shape[1])
    of_x = sum((of_y[..., i : i + 1] * w[:, i] for i in outputs), jnp.zeros((), x.dtype))
    rows, columns = _as_matrices(x, of_y)
    return of_x, jnp.stack([jnp.dot(columns[:, i], rows) for i in outputs], axis=1)


def _transposed(saved: tuple[jax.Array, jax.Array], of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    rows, columns = _as_matrices(x, of_y)
    return jnp.dot(of_y, w.T), jnp.dot(_copied(rows.T), columns)


def _copied(x: jax.Array) -> jax.Array:
    """Lays out a matrix ``[N, D]`` by rows; XLA would read a transposed one as it lies."""
    from jax.experimental import layout

    layouts: Any = layout  # JAX 0.5, with which types are checked, has no such names
    return layouts.with_layout_constraint(x, layouts.Layout((0, 1)))


def _product_with(gradients: Callable[..., Any]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a product of two arrays whose gradients are those of a function."""
    product = jax.custom_vjp(lambda x, w: jnp.dot(x, w))
    product.defvjp(lambda x, w: (jnp.dot(x, w), (x, w)), gradients)
    return product


_with_gradients_by_output = _product_with(_by_output)
_with_transposed_gradient = _product_with(_transposed)


class Linear(hk.Module):
    """A dense layer; a replacement for ``hk.Linear`` with the same parameters."""

    def __init__(
        self,
        size: int,
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
    ) -> None:
        """Makes the layer.

        Args:
          size: size of the output.
          w_init: initial weights; by default a truncated normal distribution with the standard
              deviation 1 / sqrt(inputs), as in ``hk.Linear``.
          name: of the module; ``linear`` by default.
        """
        super().__init__(name=name)
        self._size, self._w_init = size, w_init

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., size]``."""
        shape = (x.shape[-1], self._size)
        w_init = self._w_init or hk.initializers.TruncatedNormal(stddev=1 / np.sqrt(shape[0]))
        w = hk.get_parameter("w", shape, x.dtype, init=w_init)
        b = hk.get_parameter("b", shape[1:], x.dtype, init=jnp.zeros)
        return multiply(x, w) + b


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
