"""Networks of single seats for joint rows, and mixers of their values.

A joint row is a game of S seats; see `rlstack.envs.seats.joint`. Networks of one seat are built for
the specs of one seat, so any network can be one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.checks import ActionKindError
from rlstack.configs.network import NetworkConfig
from rlstack.networks.base import Apply, Network
from rlstack.networks.policy_and_critic import PolicyAndCritic, deterministic_policy_and_critic
from rlstack.networks.q_network import q_network_without_noise
from rlstack.networks.torsos import DENSE, observation_features
from rlstack.specs import ALIVE, CRITIC_STATE, REWARDS, SEAT
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep


class SeatSpecs(NamedTuple):
    """The specs of one seat of a joint row."""

    observation: dict[str, PyTree]
    action: specs.Array
    number: int  # S


def seat_specs(obs_spec: PyTree, action_spec: PyTree, where: str) -> SeatSpecs:
    """Returns what one seat sees and does: its own number, and not the state of the game.

    Args:
      obs_spec: the observation of a joint row.
      action_spec: its action: ``[S]`` choices from 0 of the same size, or ``[S, A]`` numbers.
      where: the name of the caller, for the error message.

    Raises:
      ActionKindError: the specs are not those of joint rows.
    """
    wrong = ActionKindError(
        f"{where}: the action must be that of all seats of a game, [S] choices of the same size or "
        "[S, A] numbers with the same bounds, and observations must have an axis of the seats, "
        f"[S, ...]; got {action_spec} for {obs_spec}. Use --env.options joint True in a game of "
        "several seats."
    )
    if not isinstance(action_spec, specs.BoundedArray) or not action_spec.shape:
        raise wrong
    number, chooses = action_spec.shape[0], np.issubdtype(action_spec.dtype, np.integer)
    low, high = (
        np.broadcast_to(x, action_spec.shape) for x in (action_spec.minimum, action_spec.maximum)
    )
    alike = (low == low[0]).all() and (high == high[0]).all()
    seen = _of_seats(obs_spec)
    fits = all(spec.shape[:1] == (number,) for spec in jax.tree.leaves(seen))
    if not (alike and fits and len(action_spec.shape) == 2 - chooses) or (chooses and low.any()):
        raise wrong
    own: dict[str, PyTree] = jax.tree.map(_of_one, seen)
    own.setdefault(SEAT, specs.DiscreteArray(number, np.int32, SEAT))
    return SeatSpecs(own, _of_one(action_spec), number)


def require_joint(extras: PyTree, where: str) -> None:
    """Raises a ValueError unless the specs of extras are those of joint rows."""
    if not isinstance(extras, Mapping) or not {ALIVE, REWARDS} <= extras.keys():
        raise ValueError(
            f"{where}: the environment must have joint rows, whose extras say which seats are "
            "alive, and their rewards. Use --env.options joint True in a game of several seats."
        )


def seat_q_network(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network of the action values of each seat, ``[B, S, N]``, with shared params.

    Raises:
      ActionKindError: the specs are not those of joint rows with choices.
      ValueError: as for `q_network_without_noise`.
    """
    one = seat_specs(obs_spec, action_spec, "seat_q_network")
    return shared_by_seats(q_network_without_noise(one.observation, one.action, cfg), one.number)


def seat_policy_and_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds a deterministic policy of one seat, and a critic that sees and does what all do.

    The critic's action is flat, ``[B, S A]``. With ``critic_observation`` it also sees the state of
    the game.

    Raises:
      ActionKindError: the specs are not those of joint rows with numbers.
      ValueError: as for `deterministic_policy_and_critic`; the critic's entry is another one.
    """
    one = seat_specs(obs_spec, action_spec, "seat_policy_and_critic")
    cfg = cfg or NetworkConfig(hidden_sizes=(64, 64), activation="relu")
    cfg.require(
        "critic_observation", cfg.critic_observation in (None, CRITIC_STATE), f"{CRITIC_STATE} here"
    )
    of_policy = dataclasses.replace(
        cfg, critic_observation=None, critic_input=NetworkConfig.critic_input
    )
    size = int(np.prod(action_spec.shape))
    flat = specs.BoundedArray((size,), np.float32, -1.0, 1.0)
    return PolicyAndCritic(
        deterministic_policy_and_critic(one.observation, one.action, of_policy).policy,
        deterministic_policy_and_critic(obs_spec, flat, cfg).critic,
    )


def shared_by_seats(network: Network, number: int) -> Network:
    """Makes a network of joint rows, which applies a network of one seat to all S seats.

    Outputs are ``[B, S, ...]``, and the state is ``[B, S, ...]``. Params are those of the network.
    """

    def merged(tree: PyTree, leading: int) -> PyTree:
        """Turns ``[..., B, S, ...]`` into ``[..., B S, ...]``; ``leading`` counts the axes to B."""
        return jax.tree.map(
            lambda x: x.reshape((*x.shape[: leading - 1], -1, *x.shape[leading + 1 :])), tree
        )

    def parted(tree: PyTree, leading: int) -> PyTree:
        return jax.tree.map(
            lambda x: x.reshape((*x.shape[: leading - 1], -1, number, *x.shape[leading:])), tree
        )

    def rows(timestep: TimeStep) -> TimeStep:
        leading = timestep.step_type.ndim
        of_game = TimeStep(*timestep[:3], observation=(), extras=())
        repeated = jax.tree.map(lambda x: jnp.repeat(x, number, axis=leading - 1), of_game)
        seen = merged(seen_by_seats(timestep, number), leading)
        return repeated._replace(observation=seen)

    def lifted(run: Apply) -> Apply:
        def run_rows(
            rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
        ) -> tuple[PyTree, AgentState]:
            output, state = run(rng_key, params, rows(timestep), merged(state, 1))
            return parted(output, timestep.step_type.ndim), parted(state, 1)

        return run_rows

    def initial_state(batch_size: int) -> AgentState:
        return parted(network.initial_state(batch_size * number), 1)

    def new_state(params: Params, timestep: TimeStep, state: AgentState) -> PyTree:
        return network.new_state(params, rows(timestep), merged(state, 1))  # type: ignore[misc]

    return Network(
        network.init,
        lifted(network.apply),
        lifted(network.unroll),
        initial_state,
        new_state=new_state if network.new_state else None,
    )


def one_for_each_seat(network: Network, number: int) -> Network:
    """Makes a network of joint rows from S copies of a feed-forward network of one seat.

    Params are stacked, ``[S, ...]``; outputs are ``[B, S, ...]``.
    """

    def init(rng_key: PRNGKey) -> Params:
        return jax.vmap(network.init)(jax.random.split(rng_key, number))

    def lifted(run: Apply) -> Apply:
        def run_all(
            rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
        ) -> tuple[PyTree, AgentState]:
            axis = timestep.step_type.ndim

            def of_one(params: Params, observation: PyTree) -> PyTree:
                seen = timestep._replace(observation=observation, extras=())
                return run(rng_key, params, seen, state)[0]

            of_all = jax.vmap(of_one, in_axes=(0, axis), out_axes=axis)
            return of_all(params, seen_by_seats(timestep, number)), state

        return run_all

    return Network(init, lifted(network.apply), lifted(network.unroll), network.initial_state)


def seen_by_seats(timestep: TimeStep, number: int) -> dict[str, PyTree]:
    """Returns what the seats see, ``[..., S, ...]``, in the structure of `seat_specs`."""
    seen = _of_seats(timestep.observation)
    shape = (*timestep.step_type.shape, number)
    numbers = jnp.broadcast_to(jnp.arange(number, dtype=jnp.int32), shape)
    return {SEAT: numbers, **seen}


def state_of_game(obs_spec: PyTree, timestep: TimeStep) -> jax.Array:
    """Returns the state of games as numbers, ``[..., D]``.

    It is the entry ``critic_state`` of joint rows or, without it, what all seats see.
    """

    def chosen(tree: PyTree) -> PyTree:
        entries = _entries(tree)
        return entries[CRITIC_STATE] if CRITIC_STATE in entries else _of_seats(tree)

    leading = timestep.step_type.shape
    merged = jax.tree.map(
        lambda x: x.reshape((-1, *x.shape[len(leading) :])), chosen(timestep.observation)
    )
    features = observation_features(chosen(obs_spec), merged, image_axes=DENSE)
    return features.reshape((*leading, -1))


class Mixer(NamedTuple):
    """A function that makes one value of a game of the values of its seats."""

    init: Callable[[PRNGKey, int], Params]  # (rng_key, D) -> params
    # (params, values of the seats [..., S], state of the game [..., D]) -> values [...]
    apply: Callable[[Params, Array, Array], jax.Array]


def sum_mixer() -> Mixer:
    """Makes the sum of the values, which has no params (Sunehag et al. 2017, arXiv:1706.05296)."""

    def mix(params: Params, values: Array, state: Array) -> jax.Array:
        del params, state
        return jnp.sum(values, axis=-1)

    return Mixer(lambda rng_key, size: {}, mix)


def monotonic_mixer(number: int, size: int, hyper_size: int) -> Mixer:
    """Makes QMIX's mixing network, Rashid et al. (2018), arXiv:1803.11485, section 4.1.

    Two layers, whose weights and biases are functions of the state of the game. The weights are
    absolute values, so the result never falls when the value of a seat rises.

    Args:
      number: S, the number of seats.
      size: number of units of the hidden layer.
      hyper_size: number of hidden units of the functions that give the weights; 0 makes them
          linear.
    """

    def linear(outputs: int, name: str) -> hk.Linear:
        # PyTorch's initial weights, as in PyMARL. With larger ones the mix of many units multiplies
        # the values of seats, and learning diverges.
        return hk.Linear(
            outputs, w_init=hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform"), name=name
        )

    def weights(state: jax.Array, outputs: int, name: str) -> jax.Array:
        if hyper_size:
            state = jax.nn.relu(linear(hyper_size, f"{name}_hidden")(state))
        return jnp.abs(linear(outputs, name)(state))

    def mix(values: jax.Array, state: jax.Array) -> jax.Array:
        first = weights(state, number * size, "mixer_first")
        first = first.reshape((*first.shape[:-1], number, size))
        bias = linear(size, "mixer_bias")(state)
        hidden = jax.nn.elu(jnp.einsum("...s,...sh->...h", values, first) + bias)
        last = weights(state, size, "mixer_last")
        value = jax.nn.relu(linear(size, "mixer_value_hidden")(state))
        return (hidden * last).sum(axis=-1) + linear(1, "mixer_value")(value)[..., 0]

    transformed: Any = hk.without_apply_rng(hk.transform(mix))

    def init(rng_key: PRNGKey, state_size: int) -> Params:
        return transformed.init(rng_key, jnp.zeros((1, number)), jnp.zeros((1, state_size)))

    return Mixer(init, transformed.apply)


def _entries(observation: PyTree) -> Mapping[str, PyTree]:
    return observation if isinstance(observation, Mapping) else {"observation": observation}


def _of_seats(observation: PyTree) -> dict[str, Any]:
    """Returns the entries of an observation, or of its spec, that have an axis of the seats."""
    return {name: x for name, x in _entries(observation).items() if name != CRITIC_STATE}


def _of_one(spec: specs.Array) -> specs.Array:
    """Returns the spec of one seat."""
    if not isinstance(spec, specs.BoundedArray):
        return specs.Array(spec.shape[1:], spec.dtype, spec.name)
    low, high = (np.broadcast_to(x, spec.shape)[0] for x in (spec.minimum, spec.maximum))
    if spec.shape[1:] or not np.issubdtype(spec.dtype, np.integer) or low != 0:
        return specs.BoundedArray(spec.shape[1:], spec.dtype, low, high, spec.name)
    return specs.DiscreteArray(int(high) + 1, spec.dtype, spec.name)
