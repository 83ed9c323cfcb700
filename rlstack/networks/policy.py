"""A policy alone, for agents without values."""

from __future__ import annotations

import jax

from rlstack.networks.actor_critic import policy_head
from rlstack.networks.base import Network, feed_forward, recurrent
from rlstack.networks.config import NetworkConfig
from rlstack.networks.ragged.layout import is_entity_spec
from rlstack.networks.ragged_transformer import ragged_policy
from rlstack.networks.torsos import observation_features
from rlstack.types import PyTree


def policy_network(
    obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network whose output is the parameters of the action distribution, ``[B, n]``.

    The modules are named ``torso``, ``core`` and ``policy_head``. Observations of entities go
    through `ragged_policy`, which is built of ``cfg.entities``.

    Raises:
      ValueError: cfg asks for noisy layers, which agents of a policy do not explore by.
    """
    cfg = cfg or NetworkConfig()
    if is_entity_spec(obs_spec):
        cfg.require_no_core()
        return ragged_policy(obs_spec, action_spec, cfg.entities)
    if cfg.noisy_sigma:
        raise ValueError(
            "policy_network: noisy layers are for networks of action values; got noisy_sigma="
            f"{cfg.noisy_sigma}. Leave it at 0, or use an agent such as dqn."
        )

    def encode(observation: PyTree) -> jax.Array:
        return cfg.make_torso("torso")(observation_features(obs_spec, observation))

    def head(features: jax.Array) -> jax.Array:
        return policy_head(action_spec, features, cfg.policy_log_std)

    if cfg.core != "none":
        return recurrent(encode, cfg.make_core, lambda hidden, _: head(hidden), obs_spec)
    return feed_forward(lambda observation: head(encode(observation)), obs_spec)
