"""Networks with state (batch norm, spectral norm, running statistics) or dropout.

`feed_forward_with_state` and `recurrent_with_state` take Haiku functions, `network_with_state`
takes the two functions that most other libraries have. `rlstack.stateful_params` explains the two
modes. In a loss a network is in training mode, and its state does not change; the learner then asks
for the new state by ``Network.new_state``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax

from rlstack.networks.base import Core, Network, as_float32, dummy_timestep, unrolled
from rlstack.stateful_params import StatefulParams, TrainingParams
from rlstack.types import AgentState, Params, PRNGKey, PyTree, TimeStep, merge_leading_dims

# (weights, state, rng_key, timestep [T, B, ...], agent state [B, ...], is_training)
#   -> ((output [T, B, ...], agent state), new state)
_Run = Callable[
    [Params, PyTree, PRNGKey | None, TimeStep, AgentState, bool],
    tuple[tuple[PyTree, AgentState], PyTree],
]


def network_with_state(
    init: Callable[[PRNGKey, PyTree], tuple[Params, PyTree]],
    apply: Callable[[Params, PyTree, PRNGKey | None, PyTree, bool], tuple[PyTree, PyTree]],
    obs_spec: PyTree,
) -> Network:
    """Makes a feed-forward network from pure functions of any library.

    Args:
      init: ``(rng_key, observation [B, ...]) -> (weights, state)``.
      apply: ``(weights, state, rng_key, observation [B, ...], is_training) -> (output [B, ...], new
          state)``. In training mode there is a key, and the output may depend on the whole batch.
          In evaluation mode row i of the output must depend only on row i.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """

    def run(
        weights: Params,
        state: PyTree,
        rng_key: PRNGKey | None,
        timestep: TimeStep,
        agent_state: AgentState,
        is_training: bool,
    ) -> tuple[tuple[PyTree, AgentState], PyTree]:
        merged = merge_leading_dims(timestep.observation)
        output, new_state = apply(weights, state, rng_key, merged, is_training)
        leading = timestep.step_type.shape
        output = jax.tree.map(lambda x: x.reshape(leading + x.shape[1:]), as_float32(output))
        return (output, agent_state), new_state

    observation = dummy_timestep(obs_spec).observation
    return _in_two_modes(lambda rng_key: init(rng_key, observation), run, lambda batch_size: ())


def feed_forward_with_state(forward: Callable[[PyTree, bool], PyTree], obs_spec: PyTree) -> Network:
    """Makes a network from a Haiku function with state or dropout.

    Args:
      forward: maps an observation ``[B, ...]`` and ``is_training`` to a pytree of ``[B, ...]``;
          called inside ``hk.transform_with_state``.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """
    transformed = hk.transform_with_state(forward)

    def init(rng_key: PRNGKey, observation: PyTree) -> tuple[Params, PyTree]:
        # In training mode, because hk.BatchNorm has no averages to use before its first batch.
        return transformed.init(rng_key, observation, True)

    return network_with_state(init, transformed.apply, obs_spec)


def recurrent_with_state(
    encode: Callable[[PyTree, bool], PyTree],
    core: Callable[[], Core],
    decode: Callable[[PyTree, PyTree, bool], PyTree],
    obs_spec: PyTree,
) -> Network:
    """Makes a recurrent network from Haiku functions with state or dropout.

    Args:
      encode: maps an observation ``[N, ...]`` and ``is_training`` to features ``[N, D]``.
      core: makes the recurrent core, whose state is reset at FIRST steps.
      decode: maps the core's output ``[N, D]``, the observation ``[N, ...]`` and ``is_training`` to
          the network's output.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """

    def forward(
        timestep: TimeStep, state: AgentState, is_training: bool
    ) -> tuple[PyTree, AgentState]:
        features = hk.BatchApply(lambda x: encode(x, is_training))(timestep.observation)
        hidden, state = unrolled(core(), features, timestep.first(), state)
        output = hk.BatchApply(lambda x, y: decode(x, y, is_training))(hidden, timestep.observation)
        return as_float32(output), state

    transformed = hk.transform_with_state(forward)
    state_function = hk.transform(lambda batch_size: core().initial_state(batch_size))

    def initial_state(batch_size: int) -> AgentState:
        return state_function.apply({}, None, batch_size)

    def init(rng_key: PRNGKey) -> tuple[Params, PyTree]:
        timestep = jax.tree.map(lambda x: x[None], dummy_timestep(obs_spec))
        return transformed.init(rng_key, timestep, initial_state(1), True)

    return _in_two_modes(init, transformed.apply, initial_state)


def _in_two_modes(
    init: Callable[[PRNGKey], tuple[Params, PyTree]],
    run: _Run,
    initial_state: Callable[[int], AgentState],
) -> Network:
    """Makes a network whose mode is that of its params."""

    def first_params(rng_key: PRNGKey) -> StatefulParams:
        return StatefulParams(*init(rng_key))

    def unroll(
        rng_key: PRNGKey | None, params: Any, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        is_training = isinstance(params, TrainingParams)
        key = params.rng_key if is_training else rng_key
        return run(params.weights, params.state, key, timestep, state, is_training)[0]

    def apply(
        rng_key: PRNGKey | None, params: Any, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        output, state = unroll(rng_key, params, jax.tree.map(lambda x: x[None], timestep), state)
        return jax.tree.map(lambda x: x[0], output), state

    def new_state(params: TrainingParams, timestep: TimeStep, state: AgentState) -> PyTree:
        return run(params.weights, params.state, params.rng_key, timestep, state, True)[1]

    return Network(first_params, apply, unroll, initial_state, new_state=new_state)
