"""Two networks of one agent: a policy that acts and a critic that judges its actions.

Agents that keep them apart (SAC, TD3, DDPG) take a factory ``(obs_spec, action_spec) ->
PolicyAndCritic``. The factories here build both of a `NetworkConfig`; a user's own gives any two
feed-forward `Network`\\ s that take what is said below. How many critics there are is the agent's
choice: it makes an `ensemble` of the one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack import distributions
from rlstack.networks.base import Network, feed_forward
from rlstack.networks.config import NetworkConfig
from rlstack.networks.q_network import q_network
from rlstack.networks.torsos import observation_features
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep


class PolicyAndCritic(NamedTuple):
    """An agent's two networks, each with params of its own."""

    # Observation to the parameters of the action distribution, [B, n]. Of a deterministic policy:
    # to the action before tanh, [B, D].
    policy: Network
    # Continuous actions: CriticInput to its value, [B]. Discrete: observation to the values of all
    # actions, [B, A].
    critic: Network


class CriticInput(NamedTuple):
    """What a critic of continuous actions sees as its observation."""

    observation: PyTree  # [B, ...]
    action: Array  # [B, D] float32, in [-1, 1] whatever the environment's bounds are


def policy_and_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds the networks of a stochastic policy, for one discrete or one continuous action.

    Raises:
      ValueError: the config wants a recurrent core or noisy layers.
    """
    cfg = _checked(cfg, "policy_and_critic")
    size = distributions.num_parameters(action_spec)
    discrete = isinstance(action_spec, specs.DiscreteArray)
    critic = (q_network if discrete else _action_critic)(obs_spec, action_spec, cfg)
    return PolicyAndCritic(_policy(obs_spec, size, cfg), critic)


def deterministic_policy_and_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds the networks of a deterministic policy, for one continuous action.

    Raises:
      ValueError: the config wants a recurrent core or noisy layers.
    """
    cfg = _checked(cfg, "deterministic_policy_and_critic")
    policy = _policy(obs_spec, int(np.prod(action_spec.shape)), cfg)
    return PolicyAndCritic(policy, _action_critic(obs_spec, action_spec, cfg))


def ensemble(network: Network, size: int) -> Network:
    """Makes one network of ``size`` feed-forward ones that differ in their params alone.

    Params are stacked, ``[size, ...]``; outputs ``[B, ...]`` become ``[B, size, ...]``.
    """

    def init(rng_key: PRNGKey) -> Params:
        return jax.vmap(network.init)(jax.random.split(rng_key, size))

    def along(axis: int, run: Any) -> Any:
        def run_all(
            rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
        ) -> tuple[Any, AgentState]:
            keys = None if rng_key is None else jax.random.split(rng_key, size)
            outputs = jax.vmap(
                lambda key, member: run(key, member, timestep, state)[0],
                in_axes=(None if keys is None else 0, 0),
                out_axes=axis,
            )(keys, params)
            return outputs, state

        return run_all

    return Network(init, along(1, network.apply), along(2, network.unroll), network.initial_state)


def _checked(cfg: NetworkConfig | None, where: str) -> NetworkConfig:
    cfg = cfg or NetworkConfig(hidden_sizes=(256, 256), activation="relu")
    if cfg.core != "none":
        raise ValueError(
            f"{where}: the networks must be feed-forward, since transitions carry no recurrent "
            f"state; got core={cfg.core!r}. Use --network.core none, or an agent of sequences "
            "such as ppo."
        )
    if cfg.noisy_sigma:
        raise ValueError(
            f"{where}: noisy layers are for networks of action values; got noisy_sigma="
            f"{cfg.noisy_sigma}. Leave it at 0: these policies explore by themselves or by noise."
        )
    return cfg


def _policy(obs_spec: PyTree, size: int, cfg: NetworkConfig) -> Network:
    def forward(observation: PyTree) -> jax.Array:
        features = cfg.make_torso("torso")(observation_features(obs_spec, observation))
        # Near zero, so that the first policy prefers nothing.
        init = hk.initializers.Orthogonal(0.01)
        return hk.Linear(size, w_init=init, name="policy_head")(features)

    return feed_forward(forward, obs_spec)


def _action_critic(obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig) -> Network:
    def forward(seen: CriticInput) -> jax.Array:
        features = observation_features(obs_spec, seen.observation)
        if cfg.torso == "mlp":
            flat = features.reshape((features.shape[0], -1))
            hidden = cfg.make_torso("torso")(jnp.concatenate([flat, seen.action], axis=-1))
        else:
            # The action joins after the convolutions, and a layer more lets the two interact.
            joined = jnp.concatenate([cfg.make_torso("torso")(features), seen.action], axis=-1)
            init = hk.initializers.Orthogonal(np.sqrt(2))
            hidden = jax.nn.relu(hk.Linear(cfg.hidden_sizes[-1], w_init=init)(joined))
        init = hk.initializers.Orthogonal(1.0)
        return hk.Linear(1, w_init=init, name="value_head")(hidden)[..., 0]

    return feed_forward(forward, CriticInput(obs_spec, action_spec))
