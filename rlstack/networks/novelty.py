"""The networks of random network distillation, and the value of a second stream of rewards."""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax

from rlstack.configs.network import NetworkConfig
from rlstack.networks.base import Network, feed_forward
from rlstack.networks.configured import features_of, head_of
from rlstack.networks.torsos import Reader
from rlstack.types import PyTree


class NoveltyNetworks(NamedTuple):
    """Feed-forward networks of one observation; the value's output is ``[B]``."""

    target: Network  # ``[B, E]``, random and fixed
    predictor: Network  # ``[B, E]``
    value: Network  # the return of the bonus


def novelty_networks(obs_spec: PyTree, cfg: NetworkConfig, embedding_size: int) -> NoveltyNetworks:
    """Builds the networks of Burda et al. (2019), https://arxiv.org/abs/1810.12894.

    The predictor has two dense layers more than the target, as in the authors' program.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      cfg: the torso.
      embedding_size: E, the number of outputs that are predicted.
    """

    def target(observation: PyTree) -> jax.Array:
        features = features_of(cfg, obs_spec, observation, "target_torso")
        return head_of(cfg, embedding_size, 1.0, "embedding")(features)

    def predictor(observation: PyTree) -> jax.Array:
        features = features_of(cfg, obs_spec, observation, "predictor_torso")
        for _ in range(2):
            features = jax.nn.relu(hk.Linear(cfg.hidden_sizes[-1])(features))
        return head_of(cfg, embedding_size, 1.0, "embedding")(features)

    return NoveltyNetworks(
        feed_forward(target, obs_spec),
        feed_forward(predictor, obs_spec),
        value_network(obs_spec, cfg),
    )


def value_network(obs_spec: PyTree, cfg: NetworkConfig, reader: Reader = "policy") -> Network:
    """Builds the feed-forward value of a stream of rewards, whose output is ``[B]``.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      cfg: the torso.
      reader: "all" to see ``critic_state`` too.
    """

    def value(observation: PyTree) -> jax.Array:
        features = features_of(cfg, obs_spec, observation, "value_torso", reader=reader)
        return head_of(cfg, 1, 1.0, "value_head")(features)[..., 0]

    return feed_forward(value, obs_spec)
