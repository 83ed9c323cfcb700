"""The config of the networks that ship with rlstack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import haiku as hk
import jax

from rlstack.checks import Checked
from rlstack.networks.ragged.config import RaggedTransformerConfig
from rlstack.networks.torsos import ImpalaTorso, MLPTorso, NatureTorso

Torso = Literal["mlp", "nature", "impala"]
Activation = Literal["tanh", "relu", "elu", "silu"]
Core = Literal["none", "lstm", "gru"]


@dataclasses.dataclass(frozen=True)
class NetworkConfig(Checked):
    """The architecture of an agent's default network."""

    torso: Torso = "mlp"
    """Layers before the heads: dense layers (mlp), or the convolutions of Nature DQN (nature) or of
    IMPALA (impala) for images."""
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

    def make_torso(self, name: str) -> Callable[[jax.Array], jax.Array]:
        """Makes the configured torso; call it inside a Haiku transform."""
        if self.torso == "nature":
            return NatureTorso(self.hidden_sizes[-1], self.noisy_sigma, name=name)
        if self.torso == "impala":
            return ImpalaTorso(hidden_size=self.hidden_sizes[-1], noise=self.noisy_sigma, name=name)
        return MLPTorso(self.hidden_sizes, self.activation, self.noisy_sigma, name=name)

    def make_core(self) -> hk.RNNCore:
        """Makes the configured recurrent core; call it inside a Haiku transform."""
        if self.core == "lstm":
            return hk.LSTM(self.core_size, name="core")
        return hk.GRU(self.core_size, name="core")
