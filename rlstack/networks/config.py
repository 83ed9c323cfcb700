"""The config of the networks that ship with rlstack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import haiku as hk
import jax

from rlstack.checks import Checked
from rlstack.networks.ragged.config import RaggedTransformerConfig
from rlstack.networks.torsos import (
    EntryTorsos,
    ImpalaTorso,
    MLPTorso,
    NatureTorso,
    is_image_batch,
    observation_entries,
    observation_features,
)
from rlstack.types import PyTree

Torso = Literal["mlp", "nature", "impala"]
Activation = Literal["tanh", "relu", "elu", "silu"]
Core = Literal["none", "lstm", "gru"]


@dataclasses.dataclass(frozen=True)
class NetworkConfig(Checked):
    """The architecture of an agent's default network."""

    torso: Torso = "mlp"
    """Layers before the heads: dense layers (mlp), or the convolutions of Nature DQN (nature) or of
    IMPALA (impala) for images. If an observation has vectors too, these have dense layers, and one
    more dense layer joins them with the images. nature needs images of 36 x 36 pixels or more."""
    scale_pixels: bool = True
    """Whether arrays that look like pictures (uint8, rank 3) are divided by 255. Turn it off if
    their values are other numbers, such as the object ids of MiniGrid."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the dense layers. Convolutional torsos use the last one as their output size."""
    activation: Activation = "tanh"
    """Activation of the dense layers."""
    shared: bool = False
    """Whether policy and value share one torso. With a recurrent core they always share it."""
    duelling: bool = False
    """Whether an action's value is a state value plus an advantage with mean 0 over actions."""
    noisy_sigma: float = 0.0
    """Initial scale of the noise on the weights of dense layers, for exploration by noisy networks
    (0.5 in the paper). Only for networks of action values. 0 makes plain layers."""
    num_atoms: int = 51
    """Number of atoms (C51) or quantiles (QR-DQN) of the distribution of each action's value."""
    num_cosines: int = 64
    """Number of cosines in the embedding of a quantile fraction (IQN)."""
    policy_log_std: float = 0.0
    """Initial log standard deviation of a policy over continuous actions."""
    core: Core = "none"
    """Recurrent core between torso and heads: none, lstm or gru. Set it for tasks that need
    memory."""
    core_size: int = 64
    """Size of the recurrent core's state."""
    entities: RaggedTransformerConfig = RaggedTransformerConfig()
    """The transformer for observations of entities, which replaces torso and core."""

    def __post_init__(self) -> None:
        for field, names in (("torso", Torso), ("activation", Activation), ("core", Core)):
            self.require_one_of(field, get_args(names))
        self.require_at_least(0, "noisy_sigma")
        self.require_at_least(1, "num_cosines", "core_size")
        self.require_at_least(2, "num_atoms")
        positive = self.hidden_sizes and min(self.hidden_sizes) >= 1
        self.require("hidden_sizes", bool(positive), "one or more positive sizes")

    def require_no_core(self) -> None:
        """Raises a ValueError if there is a recurrent core."""
        self.require("core", self.core == "none", "none for observations of entities")

    def encode(self, obs_spec: PyTree, observation: PyTree, name: str) -> jax.Array:
        """Maps an observation ``[B, ...]`` to features ``[B, D]``; call it inside a transform.

        Args:
          obs_spec: pytree of ``dm_env.specs`` of one observation.
          observation: the same structure of arrays ``[B, ...]``.
          name: of the torso's module. See `EntryTorsos` for the modules of several entries.

        Raises:
          ValueError: the torso is for images, and the observation has none that it can take.
        """
        if self.torso == "mlp":
            torso = self.make_torso(name)
            return torso(observation_features(obs_spec, observation, self.scale_pixels))
        entries = observation_entries(obs_spec, observation, self.scale_pixels)
        if not any(map(is_image_batch, entries.values())):
            shapes = ", ".join(str(tuple(x.shape[1:])) for x in entries.values())
            raise ValueError(
                f"NetworkConfig: torso={self.torso!r} needs an observation with an image [height, "
                f"width, channels]; got shape {shapes}. Use --network.torso mlp."
            )
        if len(entries) == 1:
            return self.make_torso(name)(*entries.values())
        return EntryTorsos(
            self.make_torso, self._make_mlp, self.hidden_sizes[-1], self.noisy_sigma, name
        )(entries)

    def make_torso(self, name: str) -> Callable[[jax.Array], jax.Array]:
        """Makes the configured torso; call it inside a Haiku transform."""
        if self.torso == "nature":
            return NatureTorso(self.hidden_sizes[-1], self.noisy_sigma, name=name)
        if self.torso == "impala":
            return ImpalaTorso(hidden_size=self.hidden_sizes[-1], noise=self.noisy_sigma, name=name)
        return self._make_mlp(name)

    def _make_mlp(self, name: str) -> Callable[[jax.Array], jax.Array]:
        return MLPTorso(self.hidden_sizes, self.activation, self.noisy_sigma, name=name)

    def make_core(self) -> hk.RNNCore:
        """Makes the configured recurrent core; call it inside a Haiku transform."""
        if self.core == "lstm":
            return hk.LSTM(self.core_size, name="core")
        return hk.GRU(self.core_size, name="core")
