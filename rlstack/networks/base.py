"""`Network`: the pure functions by which an agent calls any network.

To use a network of your own, pass a Haiku function to `feed_forward` or `recurrent`, or pure
functions to `from_functions`. `rlstack.networks.adapters` takes models of Flax and Equinox.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep, merge_leading_dims


class ActorCriticOutput(NamedTuple):
    """The output of an actor-critic network."""

    policy: jax.Array  # [B, n] parameters of the action distribution
    value: jax.Array  # [B] float32


class PhasicOutput(NamedTuple):
    """The output of an actor-critic network whose policy has a value of its own."""

    policy: jax.Array  # [B, n] parameters of the action distribution
    value: jax.Array  # [B] float32
    auxiliary_value: jax.Array  # [B] float32, of the policy's torso


class Standardiser(NamedTuple):
    """A network's own way to standardise observations; `rlstack.families.normalised` calls it.

    Statistics are a pytree. Observations have any leading axes.
    """

    initial: Callable[[], PyTree]  # () -> statistics
    # (statistics, observation, mask) -> statistics; the mask, of the leading axes, says what to add
    update: Callable[[PyTree, PyTree, jax.Array], PyTree]
    # (statistics, observation, clip) -> the observation for the network
    apply: Callable[[PyTree, PyTree, float], PyTree]


Apply = Callable[[PRNGKey | None, Params, TimeStep, AgentState], tuple[PyTree, AgentState]]


class Network(NamedTuple):
    """Pure functions of explicit params and state.

    ``rng_key`` may be None for networks without random numbers. Outputs are float32, because the
    losses compute in their type; the functions of this module see to it.
    """

    init: Callable[[PRNGKey], Params]
    # (rng_key, params, timestep [B, ...], state [B, ...]) -> (output [B, ...], state [B, ...])
    apply: Apply
    # The same over time, with timesteps [T, B, ...], the state [B, ...] before the first step, and
    # output [T, B, ...].
    unroll: Apply
    initial_state: Callable[[int], AgentState]  # batch size -> state [B, ...]
    # How to standardise observations; None standardises each float entry by itself.
    standardiser: Standardiser | None = None
    # Adds data for `apply` to observations [B, ...], on the host; see Agent.lay_out.
    lay_out: Callable[[PyTree], PyTree] | None = None
    # Networks with state or dropout; see `rlstack.networks.stateful`. Their params are
    # `rlstack.stateful_params.StatefulParams`, in a loss TrainingParams.
    # (TrainingParams, timestep [T, B, ...], state [B, ...]) -> the new state of the params
    new_state: Callable[[Params, TimeStep, AgentState], PyTree] | None = None


def feed_forward(forward: Callable[[PyTree], PyTree], obs_spec: PyTree) -> Network:
    """Makes a stateless network from a Haiku function.

    Args:
      forward: maps an observation ``[B, ...]`` to a pytree of ``[B, ...]``; called inside
          ``hk.transform``.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """
    return from_functions(*hk.transform(forward), obs_spec)


def from_functions(
    init: Callable[[PRNGKey, PyTree], Params],
    apply: Callable[[Params, PRNGKey | None, PyTree], PyTree],
    obs_spec: PyTree,
) -> Network:
    """Makes a stateless network from two pure functions, such as those of plain JAX.

    Args:
      init: ``(rng_key, observation [B, ...]) -> params``.
      apply: ``(params, rng_key, observation [B, ...]) -> output``, a pytree of ``[B, ...]``. The
          key may be None. Floats of another type are cast to float32.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """

    def first_params(rng_key: PRNGKey) -> Params:
        return init(rng_key, dummy_timestep(obs_spec).observation)

    def apply_once(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        return as_float32(apply(params, rng_key, timestep.observation)), state

    def unroll(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        merged = merge_leading_dims(timestep.observation)
        output = as_float32(apply(params, rng_key, merged))
        leading = timestep.step_type.shape
        return jax.tree.map(lambda x: x.reshape(leading + x.shape[1:]), output), state

    return Network(first_params, apply_once, unroll, lambda batch_size: ())


class SequenceCore(hk.Module):
    """A recurrent core over whole sequences, such as one with a parallel scan.

    An ``hk.RNNCore`` is a function of one step instead; `recurrent` takes both. One step is a
    sequence of length 1.
    """

    @abc.abstractmethod
    def initial_state(self, batch_size: int) -> AgentState:
        """Returns the state before an episode, ``[B, ...]``, all zeros."""

    @abc.abstractmethod
    def __call__(
        self, features: PyTree, first: Array, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        """Returns the outputs and the state after the last step.

        Args:
          features: arrays ``[T, B, ...]``.
          first: bool ``[T, B]``, where an episode begins. Nothing before it may reach its outputs.
          state: ``[B, ...]``, before the first step.
        """


Core = hk.RNNCore | SequenceCore


def unrolled(
    core: Core, features: PyTree, first: Array, state: AgentState
) -> tuple[PyTree, AgentState]:
    """Runs either kind of core as `SequenceCore` says; call it inside a Haiku transform."""
    if isinstance(core, hk.RNNCore):
        return hk.dynamic_unroll(hk.ResetCore(core), (features, first), state, reverse=False)
    whole: Any = core  # mypy does not see that it is a SequenceCore
    return whole(features, first, state)


def recurrent(
    encode: Callable[[PyTree], PyTree],
    core: Callable[[], Core],
    decode: Callable[[PyTree, PyTree], PyTree],
    obs_spec: PyTree,
) -> Network:
    """Makes a recurrent network from Haiku functions; the core's state is reset at FIRST steps.

    Args:
      encode: maps an observation ``[N, ...]`` to features ``[N, D]``.
      core: returns the recurrent core.
      decode: maps the core's output ``[N, D]`` and the observation ``[N, ...]`` to the network's
          output.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """

    def forward(timestep: TimeStep, state: AgentState) -> tuple[PyTree, AgentState]:
        features = hk.BatchApply(encode)(timestep.observation)
        hidden, state = unrolled(core(), features, timestep.first(), state)
        return as_float32(hk.BatchApply(decode)(hidden, timestep.observation)), state

    transformed = hk.transform(forward)
    state_function = hk.transform(lambda batch_size: core().initial_state(batch_size))

    def initial_state(batch_size: int) -> AgentState:
        return state_function.apply({}, None, batch_size)

    def init(rng_key: PRNGKey) -> Params:
        timestep = jax.tree.map(lambda x: x[None], dummy_timestep(obs_spec))
        return transformed.init(rng_key, timestep, initial_state(1))

    def unroll(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        return transformed.apply(params, rng_key, timestep, state)

    def apply(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        output, state = unroll(rng_key, params, jax.tree.map(lambda x: x[None], timestep), state)
        return jax.tree.map(lambda x: x[0], output), state

    return Network(init, apply, unroll, initial_state)


def as_float32(output: PyTree) -> PyTree:
    """Returns an output with all floats as float32: a loss in bfloat16 would have 8 bits."""

    def cast(x: Any) -> Any:
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, output)


def dummy_timestep(obs_spec: PyTree, batch_size: int = 1, extras_spec: PyTree = ()) -> TimeStep:
    """Returns FIRST steps with zero observations and extras, ``[B, ...]``, for shapes."""
    observation, extras = jax.tree.map(
        lambda spec: jnp.zeros((batch_size, *spec.shape), spec.dtype), (obs_spec, extras_spec)
    )
    return TimeStep(
        step_type=jnp.zeros(batch_size, jnp.int32),
        reward=jnp.zeros(batch_size, jnp.float32),
        discount=jnp.ones(batch_size, jnp.float32),
        observation=observation,
        extras=extras,
    )
