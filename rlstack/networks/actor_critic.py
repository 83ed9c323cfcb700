"""Networks with a policy and a value, or only a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack import distributions
from rlstack.configs.network import NetworkConfig
from rlstack.networks.base import ActorCriticOutput, Network, PhasicOutput
from rlstack.networks.configured import (
    TwoCores,
    features_of,
    feed_forward_of,
    head_of,
    recurrent_of,
)
from rlstack.networks.precision import in_own_precision
from rlstack.networks.ragged.entity_layout import is_entity_spec
from rlstack.networks.torsos import critic_entry, has_critic_state, require_critic_entry
from rlstack.types import PyTree

_SHARED = (
    "actor_critic: shared must be False if the observation has an entry {}, which the policy must "
    "not see; got True. Set --network.shared False."
)


def actor_critic(
    obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a policy and a value, with separate torsos or a shared one.

    The output is an `ActorCriticOutput`. The modules are named ``policy_torso`` and ``value_torso``
    (or ``torso``), ``core``, ``policy_head`` and ``value_head``; configs of optimizers refer to
    these names. With options ``cfg.critic``, the value has a torso and a core (``value_core``) of
    its own. Observations of entities use `ragged_transformer` with ``cfg.entities``.

    If the observation is a dict with the entry ``cfg.critic_observation``, by default
    ``critic_state``, only the value depends on this entry (Pinto et al. 2018, arXiv:1710.06542), as
    in MAPPO (Yu et al. 2022, arXiv:2103.01955): its torso sees what ``cfg.critic_input`` says. With
    a recurrent core, the core is then the policy's alone, and the value has none, unless
    ``cfg.critic.core`` gives it one.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      action_spec: pytree of ``dm_env.specs`` of one action.
      cfg: the architecture; None takes the defaults.

    Raises:
      ValueError: cfg has noisy layers, an option that observations of entities do not have, an
        entry for the critic that the observation does not have, or a shared torso where only the
        value sees a part of the observation.
    """
    cfg = cfg or NetworkConfig()
    if is_entity_spec(obs_spec):
        from rlstack.networks.ragged.transformer import ragged_transformer

        cfg.require_for_entities()
        return ragged_transformer(obs_spec, action_spec, cfg.entities)
    _check("actor_critic", cfg, action_spec)
    return _with_heads(obs_spec, cfg, functools.partial(_heads, action_spec, cfg))


def phasic_actor_critic(
    obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a policy with a value of its own, beside a separate network of values.

    The output is a `PhasicOutput`: that of `actor_critic`, and a value of the policy's torso, whose
    module is ``auxiliary_value_head``. Arguments and errors are those of `actor_critic`.

    Raises:
      ValueError: cfg has a shared torso or a recurrent core, or observations are of entities.
    """
    cfg = cfg or NetworkConfig()
    if is_entity_spec(obs_spec) or cfg.shared or cfg.core != "none":
        raise ValueError(
            "phasic_actor_critic: the networks of policy and value must be separate and "
            f"feed-forward; got shared={cfg.shared}, core={cfg.core!r}"
            f"{' and observations of entities' * is_entity_spec(obs_spec)}. Set --network.shared "
            "False and --network.core none, or use the agent PPO."
        )
    _check("phasic_actor_critic", cfg, action_spec)

    def heads(of_policy: jax.Array, of_value: jax.Array) -> PhasicOutput:
        output = _heads(action_spec, cfg, of_policy, of_value)
        auxiliary = head_of(cfg, 1, 1.0, "auxiliary_value_head")(of_policy)[..., 0]
        return PhasicOutput(*output, auxiliary)

    return _with_heads(obs_spec, cfg, heads)


def _with_heads(
    obs_spec: PyTree, cfg: NetworkConfig, heads: Callable[[jax.Array, jax.Array], PyTree]
) -> Network:
    """Builds the layers before the heads, which take the features of policy and value."""
    require_critic_entry(cfg, obs_spec)
    entry, of_critic = critic_entry(cfg), cfg.of_critic()
    centralised = has_critic_state(obs_spec, entry)
    if not centralised:
        cfg.require_unused(f"observations without an entry {entry}", "critic_input")
    if centralised and cfg.shared:
        raise ValueError(_SHARED.format(entry))
    if cfg.has_critic and cfg.shared:
        raise ValueError(
            "actor_critic: shared must be False if the critic has options of its own; got True. "
            "Set --network.shared False, or leave the options network.critic out."
        )

    def shared(observation: PyTree, is_training: bool) -> jax.Array:
        return features_of(cfg, obs_spec, observation, "torso", is_training)

    def policy_features(observation: PyTree, is_training: bool) -> jax.Array:
        return features_of(cfg, obs_spec, observation, "policy_torso", is_training)

    def value_features(observation: PyTree, is_training: bool) -> jax.Array:
        features = in_own_precision(of_critic.dtype, features_of)
        name, reader = "value_torso", cfg.critic_input
        return features(of_critic, obs_spec, observation, name, is_training, reader)

    def both(observation: PyTree, is_training: bool) -> tuple[jax.Array, jax.Array]:
        return policy_features(observation, is_training), value_features(observation, is_training)

    if cfg.has_critic and of_critic.core != "none":
        cores = functools.partial(TwoCores, cfg)
        return recurrent_of(cfg, both, lambda hidden: heads(*hidden), obs_spec, cores=cores)
    if cfg.core != "none":
        if centralised or cfg.has_critic:
            return recurrent_of(cfg, policy_features, heads, obs_spec, beside=value_features)
        return recurrent_of(cfg, shared, lambda hidden: heads(hidden, hidden), obs_spec)

    def forward(observation: PyTree, is_training: bool) -> ActorCriticOutput:
        if cfg.shared:
            features = shared(observation, is_training)
            return heads(features, features)
        return heads(*both(observation, is_training))

    return feed_forward_of(cfg, forward, obs_spec)


def _heads(
    action_spec: PyTree, cfg: NetworkConfig, of_policy: jax.Array, of_value: jax.Array
) -> ActorCriticOutput:
    """Maps the features of policy and value, each ``[B, D]``, to the output."""
    value_head = head_of(cfg.of_critic(), 1, 1.0, "value_head")
    return ActorCriticOutput(policy_head(action_spec, of_policy, cfg), value_head(of_value)[..., 0])


def policy_network(
    obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network that returns the parameters of the action distribution, ``[B, n]``.

    The modules are named ``torso``, ``core`` and ``policy_head``. Observations of entities use
    `ragged_policy` with ``cfg.entities``. The policy does not see ``cfg.critic_observation``.
    Arguments and errors are those of `actor_critic`.
    """
    cfg = cfg or NetworkConfig()
    if is_entity_spec(obs_spec):
        from rlstack.networks.ragged.transformer import ragged_policy

        cfg.require_for_entities()
        return ragged_policy(obs_spec, action_spec, cfg.entities)
    _check("policy_network", cfg, action_spec)
    cfg.require_unused("a policy without a value", "shared", "critic", "critic_input")
    require_critic_entry(cfg, obs_spec)

    def encode(observation: PyTree, is_training: bool) -> jax.Array:
        return features_of(cfg, obs_spec, observation, "torso", is_training)

    def head(features: jax.Array) -> jax.Array:
        return policy_head(action_spec, features, cfg)

    if cfg.core != "none":
        return recurrent_of(cfg, encode, head, obs_spec)

    def forward(observation: PyTree, is_training: bool) -> jax.Array:
        return head(encode(observation, is_training))

    return feed_forward_of(cfg, forward, obs_spec)


def _check(where: str, cfg: NetworkConfig, action_spec: PyTree) -> None:
    """Raises a ValueError if the network would ignore an option."""
    if cfg.noisy_sigma:
        raise ValueError(
            f"{where}: noisy layers are for networks of action values; got noisy_sigma="
            f"{cfg.noisy_sigma}. Set it to 0, or use an agent such as dqn."
        )
    cfg.require_unused("a policy", "duelling", "num_atoms", "num_cosines")
    cfg.require_unused("observations that are not of entities", "entities")
    if not any(np.issubdtype(spec.dtype, np.floating) for spec in jax.tree.leaves(action_spec)):
        cfg.require_unused("discrete actions", "policy_log_std")


def policy_head(action_spec: PyTree, features: jax.Array, cfg: NetworkConfig) -> jax.Array:
    """Maps features ``[B, D]`` to the parameters of the action distribution, ``[B, n]``.

    The initial weights are near zero (gain 0.01), so that the first policy is near uniform. Log
    standard deviations are learned parameters that do not depend on the state and start at
    ``policy_log_std`` (Andrychowicz et al. 2021, arXiv:2006.05990, choices C56 and C59).
    """

    def leaf_parameters(spec: specs.Array, name: str) -> jax.Array:
        size = distributions.num_parameters(spec)
        continuous = np.issubdtype(spec.dtype, np.floating)
        num_outputs = size // 2 if continuous else size
        outputs = head_of(cfg, num_outputs, 0.01, name)(features)
        if not continuous:
            return outputs
        init = hk.initializers.Constant(cfg.policy_log_std)
        deviation = hk.get_parameter(f"{name}_log_std", (num_outputs,), init=init)
        return jnp.concatenate([outputs, jnp.broadcast_to(deviation, outputs.shape)], axis=-1)

    leaves = jax.tree.leaves(action_spec)
    names = [f"policy_head_{i}" if i else "policy_head" for i in range(len(leaves))]
    return jnp.concatenate(
        [leaf_parameters(*pair) for pair in zip(leaves, names, strict=True)], axis=-1
    )
