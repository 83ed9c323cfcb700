"""Haiku networks, and `Network`, the interface by which agents call any network.

Pure.

May import: rlstack, rlstack.configs, rlstack.distributions, rlstack.imports, rlstack.math,
rlstack.specs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from rlstack.imports.deferred import defer_package, deferred, on_first_use

# Flax would take a seventh of the time of a command's imports, Haiku's tools for tests a fiftieth.
with deferred("haiku.experimental.flax", "haiku.testing"):
    import haiku as _haiku  # noqa: F401

from rlstack.configs.entities import (
    RaggedTransformerConfig,
    RelativePositionsConfig,
    TranslationConfig,
)
from rlstack.configs.network import CriticConfig, NetworkConfig
from rlstack.networks.actor_critic import actor_critic, phasic_actor_critic
from rlstack.networks.base import (
    ActorCriticOutput,
    Network,
    PhasicOutput,
    SequenceCore,
    Standardiser,
    feed_forward,
    from_functions,
    recurrent,
)
from rlstack.networks.layers.convolution import Conv2D
from rlstack.networks.layers.dense import BatchNorm, SpectralLinear
from rlstack.networks.layers.linear import NoisyLinear
from rlstack.networks.policy_and_critic import (
    CriticInput,
    PolicyAndCritic,
    deterministic_policy_and_critic,
    deterministic_policy_and_distributional_critic,
    ensemble,
    policy_and_critic,
    policy_and_distributional_critic,
)
from rlstack.networks.q_network import (
    AtFractions,
    distributional_q_network,
    implicit_q_network,
    q_network,
    q_network_without_noise,
)
from rlstack.networks.stateful import (
    feed_forward_with_state,
    network_with_state,
    recurrent_with_state,
)
from rlstack.networks.torsos import (
    ImpalaTorso,
    MinAtarTorso,
    MLPTorso,
    NatureTorso,
    observation_features,
)

if TYPE_CHECKING:
    from rlstack.networks.adapters import from_equinox, from_flax
    from rlstack.networks.control_model import LatentControl, latent_control
    from rlstack.networks.latent_model import LearnedModel, learned_model
    from rlstack.networks.micro_batches import in_parts
    from rlstack.networks.ragged.transformer import ragged_policy, ragged_transformer
    from rlstack.networks.recurrent_model import WorldModel, world_model

    # What agents are made with; a world model is built later, with the sizes of the agent's config.
    AnyNetwork: TypeAlias = (
        LatentControl | LearnedModel | Network | PolicyAndCritic | Callable[..., WorldModel]
    )

# JAX needs LAPACK for orthogonal initial weights, and takes it from two modules of this package.
# The package itself takes ten times as long to import as these modules.
defer_package("scipy.linalg")

__all__ = [
    "ActorCriticOutput",
    "AtFractions",
    "BatchNorm",
    "Conv2D",
    "CriticConfig",
    "CriticInput",
    "ImpalaTorso",
    "LatentControl",
    "LearnedModel",
    "MLPTorso",
    "MinAtarTorso",
    "NatureTorso",
    "Network",
    "NetworkConfig",
    "NoisyLinear",
    "PhasicOutput",
    "PolicyAndCritic",
    "RaggedTransformerConfig",
    "RelativePositionsConfig",
    "SequenceCore",
    "SpectralLinear",
    "Standardiser",
    "TranslationConfig",
    "WorldModel",
    "actor_critic",
    "deterministic_policy_and_critic",
    "deterministic_policy_and_distributional_critic",
    "distributional_q_network",
    "ensemble",
    "feed_forward",
    "feed_forward_with_state",
    "from_equinox",
    "from_flax",
    "from_functions",
    "implicit_q_network",
    "in_parts",
    "latent_control",
    "learned_model",
    "network_with_state",
    "observation_features",
    "phasic_actor_critic",
    "policy_and_critic",
    "policy_and_distributional_critic",
    "q_network",
    "q_network_without_noise",
    "ragged_policy",
    "ragged_transformer",
    "recurrent",
    "recurrent_with_state",
    "world_model",
]

# What few networks need.
__getattr__ = on_first_use(
    __name__,
    {
        "LatentControl": "control_model",
        "LearnedModel": "latent_model",
        "WorldModel": "recurrent_model",
        "from_equinox": "adapters",
        "from_flax": "adapters",
        "in_parts": "micro_batches",
        "latent_control": "control_model",
        "learned_model": "latent_model",
        "ragged_policy": "ragged.transformer",
        "ragged_transformer": "ragged.transformer",
        "world_model": "recurrent_model",
    },
)
