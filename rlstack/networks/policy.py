"""A policy alone, for agents without values."""

from __future__ import annotations

import jax

from rlstack.networks.actor_critic import policy_head
from rlstack.networks.base import Network, feed_forward, recurrent
from rlstack.networks.config import NetworkConfig
from rlstack.networks.torsos import observation_features
from rlstack.types import PyTree


def policy_network(
    obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network whose output is the parameters of the action distribution, ``[B, n]``.

    The modules are named ``torso``, ``core`` and ``policy_head``.
    """
    cfg = cfg or NetworkConfig()

    def encode(observation: PyTree) -> jax.Array:
        return cfg.make_torso("torso")(observation_features(obs_spec, observation))

    if cfg.core != "none":
        return recurrent(
            encode, cfg.make_core, lambda hidden, _: policy_head(action_spec, hidden), obs_spec
        )
    return feed_forward(lambda observation: policy_head(action_spec, encode(observation)), obs_spec)
