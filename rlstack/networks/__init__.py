"""Haiku torsos, cores and heads, and the `Network` through which agents call them."""

from rlstack.networks.actor_critic import ActorCriticOutput, actor_critic
from rlstack.networks.base import Network, feed_forward, recurrent
from rlstack.networks.config import NetworkConfig
from rlstack.networks.q_network import q_network
from rlstack.networks.torsos import ImpalaTorso, MLPTorso, NatureTorso, observation_features

__all__ = [
    "ActorCriticOutput",
    "ImpalaTorso",
    "MLPTorso",
    "NatureTorso",
    "Network",
    "NetworkConfig",
    "actor_critic",
    "feed_forward",
    "observation_features",
    "q_network",
    "recurrent",
]
