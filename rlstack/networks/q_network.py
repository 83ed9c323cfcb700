"""Action values, plain or duelling."""

from __future__ import annotations

import haiku as hk
import jax
import numpy as np
from dm_env import specs

from rlstack.networks.base import Network, feed_forward, recurrent
from rlstack.networks.config import NetworkConfig
from rlstack.networks.torsos import observation_features
from rlstack.types import PyTree


def q_network(
    obs_spec: PyTree, action_spec: specs.DiscreteArray, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network whose output is the action values, ``[B, A]``.

    With ``cfg.duelling`` they are a state value plus mean-free advantages (Wang et al. 2016,
    equation 9, arXiv:1511.06581).

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      action_spec: one discrete action.
      cfg: the torso and, where wanted, the recurrent core.

    Raises:
      TypeError: the action is not a single discrete one.
    """
    if not isinstance(action_spec, specs.DiscreteArray):
        raise TypeError(
            f"q_network: the action must be one discrete choice; got {action_spec}. "
            "Agents of a policy, such as ppo, take continuous and structured actions."
        )
    cfg = cfg or NetworkConfig(activation="relu")

    def encode(observation: PyTree) -> jax.Array:
        return cfg.make_torso("torso")(observation_features(obs_spec, observation))

    def values(features: jax.Array) -> jax.Array:
        def head(size: int, name: str) -> jax.Array:
            return hk.Linear(size, w_init=hk.initializers.Orthogonal(1.0), name=name)(features)

        action_values = head(int(np.asarray(action_spec.num_values)), "value_head")
        if not cfg.duelling:
            return action_values
        advantages = action_values - action_values.mean(axis=-1, keepdims=True)
        return head(1, "state_value_head") + advantages

    if cfg.core != "none":
        return recurrent(encode, cfg.make_core, lambda hidden, _: values(hidden), obs_spec)
    return feed_forward(lambda observation: values(encode(observation)), obs_spec)
