"""Linear recurrences over the first axis, h[t] = decay[t] h[t - 1] + inputs[t]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@jax.custom_vjp
def linear_scan(decay: jax.Array, inputs: jax.Array, state: jax.Array) -> jax.Array:
    """Returns h[t] = decay[t] h[t - 1] + inputs[t], with h[-1] = state.

    The gradient is a linear recurrence in reverse, and is computed in the same way.

    Args:
      decay: ``[T, ...]``, real or complex.
      inputs: ``[T, ...]``.
      state: ``[...]``.
    """
    return _scan(decay, inputs.at[0].add(decay[0] * state))


def _scan(decay: jax.Array, inputs: jax.Array, reverse: bool = False) -> jax.Array:
    if len(inputs) == 1:
        return inputs
    ways = {"cpu": step_by_step, "default": in_parallel}
    return jax.lax.platform_dependent(
        decay,
        inputs,
        **{place: functools.partial(way, reverse=reverse) for place, way in ways.items()},
    )


def step_by_step(decay: jax.Array, inputs: jax.Array, reverse: bool) -> jax.Array:
    """Computes the recurrence from a state of 0, step by step."""

    def step(state: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state = given[0] * state + given[1]
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(inputs[0]), (decay, inputs), reverse=reverse)[1]


def in_parallel(decay: jax.Array, inputs: jax.Array, reverse: bool = False) -> jax.Array:
    """Does the same by a parallel scan, in about log T operations.

    Blelloch (1990), "Prefix sums and their applications", section 1.4.
    """

    def join(
        earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    return jax.lax.associative_scan(join, (decay, inputs), reverse=reverse)[1]


def _forward(
    decay: jax.Array, inputs: jax.Array, state: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    found = linear_scan(decay, inputs, state)
    return found, (decay, state, found)


def _backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], grads: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    decay, state, found = saved
    after = jnp.concatenate([decay[1:], jnp.zeros_like(decay[:1])])
    of_inputs = _scan(after, grads, reverse=True)
    before = jnp.concatenate([state[None], found[:-1]])
    return of_inputs * before, of_inputs, of_inputs[0] * decay[0]


linear_scan.defvjp(_forward, _backward)
