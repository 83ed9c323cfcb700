"""`Network`: the pure functions through which an agent calls any network.

A user's own network is a Haiku function given to `feed_forward` or `recurrent`, or any other pure
functions put into a `Network` by hand (Flax, Equinox, plain JAX).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from rlstack.types import AgentState, Params, PRNGKey, PyTree, TimeStep


class ActorCriticOutput(NamedTuple):
    """What an actor-critic network says of each step."""

    policy: jax.Array  # [B, n] parameters of the action distribution
    value: jax.Array  # [B] float32


class Standardiser(NamedTuple):
    """How observations are standardised, where a network knows better than entry by entry.

    `rlstack.families.normalised` uses it. Statistics are a pytree; observations have any leading
    axes.
    """

    initial: Callable[[], PyTree]  # () -> statistics
    update: Callable[[PyTree, PyTree], PyTree]  # (statistics, observation) -> statistics
    # (statistics, observation, clip) -> what the network is to see
    apply: Callable[[PyTree, PyTree, float], PyTree]


class Network(NamedTuple):
    """Pure functions over explicit params and state.

    ``rng_key`` may be None for networks that draw no noise.
    """

    init: Callable[[PRNGKey], Params]
    # (rng_key, params, timestep [B, ...], state [B, ...]) -> (output [B, ...], state [B, ...])
    apply: Callable[[PRNGKey | None, Params, TimeStep, AgentState], tuple[Any, AgentState]]
    # The same over time: timesteps [T, B, ...]; state as of the first step; output [T, B, ...].
    unroll: Callable[[PRNGKey | None, Params, TimeStep, AgentState], tuple[Any, AgentState]]
    initial_state: Callable[[int], AgentState]
    # None: the float entries are, each on its own.
    standardiser: Standardiser | None = None
    # Puts into observations [B, ...], on the host, what `apply` can make use of; see Agent.lay_out.
    lay_out: Callable[[PyTree], PyTree] | None = None


def feed_forward(forward: Callable[[PyTree], Any], obs_spec: PyTree) -> Network:
    """Makes a stateless network of a Haiku function.

    Args:
      forward: called inside ``hk.transform`` with an observation ``[B, ...]``; returns a pytree of
        ``[B, ...]``.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """
    transformed = hk.transform(forward)

    def init(rng_key: PRNGKey) -> Params:
        return transformed.init(rng_key, dummy_timestep(obs_spec).observation)

    def apply(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> Any:
        return transformed.apply(params, rng_key, timestep.observation), state

    def unroll(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> Any:
        merged = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), timestep.observation)
        output = transformed.apply(params, rng_key, merged)
        leading = timestep.step_type.shape
        return jax.tree.map(lambda x: x.reshape(leading + x.shape[1:]), output), state

    return Network(init, apply, unroll, lambda batch_size: ())


def recurrent(
    encode: Callable[[PyTree], Any],
    core: Callable[[], hk.RNNCore],
    decode: Callable[[Any, PyTree], Any],
    obs_spec: PyTree,
) -> Network:
    """Makes a recurrent network of Haiku functions; the core starts afresh at every FIRST step.

    Args:
      encode: observation ``[N, ...]`` to features ``[N, D]``.
      core: makes the recurrent core.
      decode: core output ``[N, D]`` and observation ``[N, ...]`` to the network's output.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """

    def forward(timestep: TimeStep, state: AgentState) -> tuple[Any, AgentState]:
        features = hk.BatchApply(encode)(timestep.observation)
        hidden, state = hk.dynamic_unroll(
            hk.ResetCore(core()), (features, timestep.first()), state, reverse=False
        )
        return hk.BatchApply(decode)(hidden, timestep.observation), state

    transformed = hk.transform(forward)
    state_function = hk.transform(lambda batch_size: core().initial_state(batch_size))

    def initial_state(batch_size: int) -> AgentState:
        return state_function.apply({}, None, batch_size)

    def init(rng_key: PRNGKey) -> Params:
        timestep = jax.tree.map(lambda x: x[None], dummy_timestep(obs_spec))
        return transformed.init(rng_key, timestep, initial_state(1))

    def unroll(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> Any:
        return transformed.apply(params, rng_key, timestep, state)

    def apply(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> Any:
        output, state = unroll(rng_key, params, jax.tree.map(lambda x: x[None], timestep), state)
        return jax.tree.map(lambda x: x[0], output), state

    return Network(init, apply, unroll, initial_state)


def dummy_timestep(obs_spec: PyTree, batch_size: int = 1) -> TimeStep:
    """Returns FIRST steps of zero observations, ``[B, ...]``, to initialise networks with."""
    observation = jax.tree.map(
        lambda spec: jnp.zeros((batch_size, *spec.shape), spec.dtype), obs_spec
    )
    return TimeStep(
        step_type=jnp.zeros(batch_size, jnp.int32),
        reward=jnp.zeros(batch_size, jnp.float32),
        discount=jnp.ones(batch_size, jnp.float32),
        observation=observation,
    )
