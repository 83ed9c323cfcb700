"""Distributions of action values: a number of atoms an action, or a value at any fraction."""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.networks.base import Network, feed_forward
from rlstack.networks.config import NetworkConfig
from rlstack.networks.noisy import linear
from rlstack.networks.q_network import count_actions, encoded, heads
from rlstack.networks.torsos import observation_features
from rlstack.types import Array, PyTree


def distributional_q_network(
    obs_spec: PyTree, action_spec: specs.DiscreteArray, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network whose output is ``cfg.num_atoms`` numbers an action, ``[B, A, N]``.

    What they mean (logits of atoms, values at quantiles) is the agent's business. Arguments and
    errors are those of `rlstack.networks.q_network`.
    """
    cfg = cfg or NetworkConfig(activation="relu")
    num_actions = count_actions("distributional_q_network", action_spec)
    return encoded(obs_spec, cfg, lambda features: heads(cfg, num_actions, cfg.num_atoms, features))


class AtFractions(NamedTuple):
    """What an implicit network takes as its observation."""

    observation: PyTree  # [B, ...]
    fractions: Array  # [B, N] float32 in [0, 1], the quantiles wanted


def implicit_q_network(
    obs_spec: PyTree, action_spec: specs.DiscreteArray, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network from `AtFractions` to the quantiles of each action's value, ``[B, A, N]``.

    Dabney et al. (2018), https://arxiv.org/abs/1806.06923, section 3.1 and equation 4: features of
    the observation times an embedding of the fraction by cosines, and layers of the product. The
    product is taken of the torso's output, and one more layer of that size follows.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation, without fractions.
      action_spec: one discrete action.
      cfg: the torso; a recurrent core is not taken.

    Raises:
      TypeError: the action is not a single discrete one.
      ValueError: cfg asks for a recurrent core.
    """
    cfg = cfg or NetworkConfig(activation="relu")
    num_actions = count_actions("implicit_q_network", action_spec)
    if cfg.core != "none":
        raise ValueError(
            f"implicit_q_network: the network must be feed-forward; got core={cfg.core!r}. "
            "Use --network.core none."
        )
    size, activation = cfg.hidden_sizes[-1], getattr(jax.nn, cfg.activation)
    gain = hk.initializers.Orthogonal(np.sqrt(2))

    def forward(asked: AtFractions) -> jax.Array:
        inputs = observation_features(obs_spec, asked.observation)
        features = cfg.make_torso("torso")(inputs)[:, None]
        angles = np.pi * jnp.arange(cfg.num_cosines) * asked.fractions[..., None]
        embed = linear(size, noise=cfg.noisy_sigma, name="fraction_embedding")
        embedding = jax.nn.relu(embed(jnp.cos(angles)))
        mix = linear(size, noise=cfg.noisy_sigma, w_init=gain, name="quantile_layer")
        quantiles = heads(cfg, num_actions, 1, activation(mix(features * embedding)))
        return jnp.moveaxis(quantiles[..., 0], 1, -1)

    return feed_forward(forward, AtFractions(obs_spec, specs.Array((1,), np.float32)))
