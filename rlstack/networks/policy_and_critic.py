"""A policy and a critic as two networks, for off-policy actor-critic agents (SAC, TD3, DDPG).

These agents take a factory ``(obs_spec, action_spec) -> PolicyAndCritic``. The factories in this
module build both networks from a `NetworkConfig`, whose ``critic`` says what the critic has of its
own: another size, norm, dropout or precision. With ``critic_observation``, the critic sees an entry
of the observation that the policy does not (Pinto et al. 2018, arXiv:1710.06542). Your own factory
may return any two feed-forward networks with the inputs and outputs documented below. The agent
chooses the number of critics and makes an `ensemble` from the single critic.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack import distributions
from rlstack.configs.network import DENSE_TORSOS, CriticConfig, NetworkConfig
from rlstack.networks.base import Apply, Network
from rlstack.networks.configured import (
    dense_features,
    features_of,
    feed_forward_of,
    head_of,
    torso_of,
)
from rlstack.networks.layers.linear import Linear
from rlstack.networks.q_network import distributional_q_network, q_network
from rlstack.networks.torsos import Reader, require_critic_entry
from rlstack.stateful_params import TrainingParams
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep


class PolicyAndCritic(NamedTuple):
    """The two networks of an agent, with separate params."""

    # From an observation to the parameters of the action distribution, [B, n]; for a deterministic
    # policy, to the action before tanh, [B, D].
    policy: Network
    # Continuous actions: from a CriticInput to its value, [B]. Discrete actions: from an
    # observation to the values of all actions, [B, A]. Distributional critics give N numbers for
    # each value, on a last axis.
    critic: Network


class CriticInput(NamedTuple):
    """The observation of a critic of continuous actions."""

    observation: PyTree  # [B, ...]
    action: Array  # [B, D] float32, scaled to [-1, 1]


def policy_and_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds a stochastic policy and its critic, for one discrete or one continuous action.

    Raises:
      ValueError: cfg has a recurrent core or noisy layers, or names an entry for the critic that
        the observation does not have.
    """
    discrete = isinstance(action_spec, specs.DiscreteArray)
    cfg, critic_cfg = _checked(cfg, obs_spec, "policy_and_critic", discrete=discrete)
    size = distributions.num_parameters(action_spec)
    if discrete:
        critic = q_network(obs_spec, action_spec, critic_cfg, _reader(critic_cfg))
    else:
        critic = _action_critic(obs_spec, action_spec, critic_cfg)
    return PolicyAndCritic(_policy(obs_spec, size, cfg), critic)


def policy_and_distributional_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds a stochastic policy, and a critic that gives ``num_atoms`` numbers for each action.

    For a continuous action the critic's output is ``[B, N]``, for a discrete one ``[B, A, N]``. The
    agent interprets them as logits of atoms or as values at quantiles.

    Raises:
      ValueError: cfg has a recurrent core or noisy layers, or names an entry for the critic that
        the observation does not have.
    """
    discrete = isinstance(action_spec, specs.DiscreteArray)
    where = "policy_and_distributional_critic"
    cfg, critic_cfg = _checked(cfg, obs_spec, where, discrete=discrete, atoms=True)
    size = distributions.num_parameters(action_spec)
    if discrete:
        critic = distributional_q_network(obs_spec, action_spec, critic_cfg, _reader(critic_cfg))
    else:
        critic = _action_critic(obs_spec, action_spec, critic_cfg, critic_cfg.num_atoms)
    return PolicyAndCritic(_policy(obs_spec, size, cfg), critic)


def deterministic_policy_and_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds a deterministic policy and its critic, for one continuous action.

    Raises:
      ValueError: cfg has a recurrent core or noisy layers, or names an entry for the critic that
        the observation does not have.
    """
    cfg, critic_cfg = _checked(cfg, obs_spec, "deterministic_policy_and_critic")
    policy = _policy(obs_spec, int(np.prod(action_spec.shape)), cfg)
    return PolicyAndCritic(policy, _action_critic(obs_spec, action_spec, critic_cfg))


def deterministic_policy_and_distributional_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds a deterministic policy, and a critic that gives ``num_atoms`` numbers, ``[B, N]``.

    Raises:
      ValueError: cfg has a recurrent core or noisy layers, or names an entry for the critic that
        the observation does not have.
    """
    where = "deterministic_policy_and_distributional_critic"
    cfg, critic_cfg = _checked(cfg, obs_spec, where, atoms=True)
    policy = _policy(obs_spec, int(np.prod(action_spec.shape)), cfg)
    critic = _action_critic(obs_spec, action_spec, critic_cfg, critic_cfg.num_atoms)
    return PolicyAndCritic(policy, critic)


def ensemble(network: Network, size: int) -> Network:
    """Makes one network from ``size`` copies of a feed-forward network, each with its own params.

    Params are stacked, ``[size, ...]``; outputs ``[B, ...]`` become ``[B, size, ...]``.
    """

    def init(rng_key: PRNGKey) -> Params:
        return jax.vmap(network.init)(jax.random.split(rng_key, size))

    def members(params: Params) -> Params:
        if isinstance(params, TrainingParams):
            return params._replace(rng_key=jax.random.split(params.rng_key, size))
        return params

    def along(axis: int, run: Apply) -> Apply:
        def run_all(
            rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
        ) -> tuple[PyTree, AgentState]:
            keys = None if rng_key is None else jax.random.split(rng_key, size)
            outputs = jax.vmap(
                lambda key, member: run(key, member, timestep, state)[0],
                in_axes=(None if keys is None else 0, 0),
                out_axes=axis,
            )(keys, members(params))
            return outputs, state

        return run_all

    def new_state(params: TrainingParams, timestep: TimeStep, state: AgentState) -> PyTree:
        assert network.new_state is not None
        return jax.vmap(network.new_state, in_axes=(0, None, None))(
            members(params), timestep, state
        )

    return Network(
        init,
        along(1, network.apply),
        along(2, network.unroll),
        network.initial_state,
        new_state=new_state if network.new_state else None,
    )


def _reader(cfg: NetworkConfig) -> Reader:
    """Returns which entries a critic sees: by default those of the policy."""
    return cfg.critic_input if cfg.critic_observation else "policy"


def _checked(
    cfg: NetworkConfig | None,
    obs_spec: PyTree,
    where: str,
    *,
    discrete: bool = False,
    atoms: bool = False,
) -> tuple[NetworkConfig, NetworkConfig]:
    """Returns the options of the policy and of the critic."""
    cfg = cfg or NetworkConfig(hidden_sizes=(256, 256), activation="relu")
    cfg.require_unused("a policy and critics", "shared", "policy_log_std")
    require_critic_entry(cfg, obs_spec)
    if cfg.critic_observation is None:
        cfg.require_unused("a critic that sees what the policy sees", "critic_input")
    cfg.require_unused("critics", *(() if atoms else ("num_atoms",)), "num_cosines", "entities")
    if not discrete:
        cfg.require_unused("critics of continuous actions", "duelling")
    of_policy = dataclasses.replace(cfg, critic=CriticConfig())
    both = of_policy, cfg.of_critic()
    for part in both:
        if part.core != "none":
            raise ValueError(
                f"{where}: the networks must be feed-forward, because replayed transitions have no "
                f"recurrent state; got core={part.core!r}. Use --network.core none, or an agent "
                "that learns from sequences, such as ppo."
            )
    if cfg.noisy_sigma:
        raise ValueError(
            f"{where}: noisy layers are for networks of action values; got noisy_sigma="
            f"{cfg.noisy_sigma}. Set it to 0; these agents explore by their policy's own noise."
        )
    return both


def _policy(obs_spec: PyTree, size: int, cfg: NetworkConfig) -> Network:
    def forward(observation: PyTree, is_training: bool) -> jax.Array:
        features = features_of(cfg, obs_spec, observation, "torso", is_training)
        # Near zero, so that the initial policy prefers no action.
        return head_of(cfg, size, 0.01, "policy_head")(features)

    return feed_forward_of(cfg, forward, obs_spec)


def _action_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig, num_atoms: int = 0
) -> Network:
    """Builds a critic with outputs ``[B]``, or ``[B, num_atoms]`` if there are atoms."""
    reader = _reader(cfg)

    def forward(inputs: CriticInput, is_training: bool) -> jax.Array:
        if cfg.torso in DENSE_TORSOS:
            seen = dense_features(cfg, obs_spec, inputs.observation, reader)
            flat = seen.reshape((seen.shape[0], -1))
            torso = torso_of(cfg, "torso", is_training)
            hidden = torso(jnp.concatenate([flat, inputs.action], axis=-1))
        else:
            # The action is concatenated after the convolutions; one more layer combines the two.
            seen = inputs.observation
            features = features_of(cfg, obs_spec, seen, "torso", is_training, reader)
            joined = jnp.concatenate([features, inputs.action], axis=-1)
            init = hk.initializers.Orthogonal(np.sqrt(2))
            hidden = jax.nn.relu(Linear(cfg.hidden_sizes[-1], w_init=init)(joined))
        outputs = head_of(cfg, num_atoms or 1, 1.0, "value_head")(hidden)
        return outputs if num_atoms else outputs[..., 0]

    return feed_forward_of(cfg, forward, CriticInput(obs_spec, action_spec))
