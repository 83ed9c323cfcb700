"""Products of inputs and weights, with gradients that are fast on CPUs.

The gradient of weights is a product of two tall matrices, ``x.T @ g``. XLA for the CPU reads the
columns of x for it (JAX 0.12), which takes up to twice the time of a product that reads rows.
`multiply` chooses one of four forms when a function is traced:

- *plain*: XLA's gradients, as `forms.plain_only` says. The other forms have no forward-mode
  derivatives (``jax.jvp``).
- *by output*, for few outputs, such as values or a few actions: one product of a vector and a
  matrix for each output. The gradient of the inputs is a sum of few terms, which becomes one
  operation with those before it.
- *copied inputs*: first a copy of x with exchanged axes, so that all is read by rows.
- *copied outputs*: ``(g.T @ x).T``, with copies of g and of the result, where they are smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout

from rlstack.networks.layers import forms

_FEW = 8  # outputs
_LEAST = 2**13  # entries of the inputs, from which the form by output is faster


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``x @ w``, with gradients in the form that is fastest where it is traced.

    The forms differ in the order of sums.

    Args:
      x: ``[..., D]``.
      w: ``[D, size]``.
    """
    if forms.plain_only() or not isinstance(x.size, int):  # exported for batches of any size
        return jnp.dot(x, w)
    inputs, outputs = w.shape
    if outputs <= _FEW and x.size >= _LEAST:
        return _with_gradients_by_output(x, w)
    rows = x.size // inputs
    if rows * inputs <= rows * outputs + inputs * outputs:
        return _with_copied_inputs(x, w)
    return _with_copied_outputs(x, w)


def _as_matrices(x: jax.Array, of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x.reshape(-1, x.shape[-1]), of_y.reshape(-1, of_y.shape[-1])


def _by_output(saved: tuple[jax.Array, jax.Array], of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    outputs = range(w.shape[1])
    of_x = sum((of_y[..., i : i + 1] * w[:, i] for i in outputs), jnp.zeros((), x.dtype))
    rows, columns = _as_matrices(x, of_y)
    return of_x, jnp.stack([jnp.dot(columns[:, i], rows) for i in outputs], axis=1)


def _copied_inputs(
    saved: tuple[jax.Array, jax.Array], of_y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    rows, columns = _as_matrices(x, of_y)
    return jnp.dot(of_y, w.T), jnp.dot(_by_rows(rows.T), columns)


def _copied_outputs(
    saved: tuple[jax.Array, jax.Array], of_y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    # Without the barrier, XLA computes the gradient a second time, in the order of the copy.
    of_y = jax.lax.optimization_barrier(of_y)
    rows, columns = _as_matrices(x, of_y)
    transposed = _by_rows(jnp.dot(_by_rows(columns.T), rows))
    return jnp.dot(of_y, w.T), _by_rows(transposed.T)


def _by_rows(x: jax.Array) -> jax.Array:
    """Returns a matrix that is stored row by row; XLA does not move a transposed one."""
    layouts: Any = layout  # JAX 0.5, with which types are checked, has no such names
    x = jnp.asarray(x)  # without jit, JAX keeps constants as numpy arrays, which have no layout
    return layouts.with_layout_constraint(x, layouts.Layout((0, 1)))


def _product_with(gradients: Callable[..., Any]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a function that multiplies two arrays and has these gradients.

    Args:
      gradients: takes a tuple of both arrays and the gradient of the product; returns theirs.
    """
    product = jax.custom_vjp(lambda x, w: jnp.dot(x, w))
    product.defvjp(lambda x, w: (jnp.dot(x, w), (x, w)), gradients)
    return product


_with_gradients_by_output = _product_with(_by_output)
_with_copied_inputs = _product_with(_copied_inputs)
_with_copied_outputs = _product_with(_copied_outputs)
