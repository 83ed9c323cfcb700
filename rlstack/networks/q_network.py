"""Action values, plain or duelling."""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import numpy as np
from dm_env import specs

from rlstack.networks.base import Network, feed_forward, recurrent
from rlstack.networks.config import NetworkConfig
from rlstack.networks.noisy import linear
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
    cfg = cfg or NetworkConfig(activation="relu")
    num_actions = count_actions("q_network", action_spec)
    return encoded(obs_spec, cfg, lambda features: heads(cfg, num_actions, 1, features)[..., 0])


def count_actions(where: str, action_spec: specs.Array) -> int:
    """Returns how many actions a spec has; TypeError unless it is one discrete choice."""
    if not isinstance(action_spec, specs.DiscreteArray):
        raise TypeError(
            f"{where}: the action must be one discrete choice; got {action_spec}. "
            "Agents of a policy, such as ppo, take continuous and structured actions."
        )
    return int(np.asarray(action_spec.num_values))


def encoded(
    obs_spec: PyTree, cfg: NetworkConfig, decode: Callable[[jax.Array], jax.Array]
) -> Network:
    """Builds the configured torso and, where wanted, core under what is made of features."""

    def encode(observation: PyTree) -> jax.Array:
        return cfg.make_torso("torso")(observation_features(obs_spec, observation))

    if cfg.core != "none":
        return recurrent(encode, cfg.make_core, lambda hidden, _: decode(hidden), obs_spec)
    return feed_forward(lambda observation: decode(encode(observation)), obs_spec)


def heads(cfg: NetworkConfig, num_actions: int, num_atoms: int, features: jax.Array) -> jax.Array:
    """Maps features ``[..., D]`` to ``[..., num_actions, num_atoms]``, plain or duelling.

    Duelling is of every atom by itself (Hessel et al. 2018, arXiv:1710.02298, section 3).
    """

    def head(num_rows: int, name: str) -> jax.Array:
        init = hk.initializers.Orthogonal(1.0)
        outputs = linear(num_rows * num_atoms, noise=cfg.noisy_sigma, w_init=init, name=name)
        return outputs(features).reshape((*features.shape[:-1], num_rows, num_atoms))

    of_actions = head(num_actions, "value_head")
    if not cfg.duelling:
        return of_actions
    advantages = of_actions - of_actions.mean(axis=-2, keepdims=True)
    return head(1, "state_value_head") + advantages
