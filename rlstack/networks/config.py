"""The config of the networks that ship with rlstack."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import haiku as hk
import jax

from rlstack.checks import Checked
from rlstack.networks.base import Network, feed_forward, recurrent
from rlstack.networks.layers.dense import Block, Norm
from rlstack.networks.precision import Precision, in_precision
from rlstack.networks.ragged.config import RaggedTransformerConfig
from rlstack.networks.stateful import feed_forward_with_state, recurrent_with_state
from rlstack.networks.torsos import (
    DENSE,
    EntryTorsos,
    ImageAxes,
    ImpalaTorso,
    MinAtarTorso,
    MLPTorso,
    NatureTorso,
    Reader,
    is_image_batch,
    observation_entries,
    observation_features,
)
from rlstack.types import PyTree

Torso = Literal["mlp", "nature", "impala", "minatar"]
Activation = Literal["tanh", "relu", "elu", "silu"]
Core = Literal["none", "lstm", "gru"]


@dataclasses.dataclass(frozen=True)
class NetworkConfig(Checked):
    """The architecture of an agent's default network."""

    torso: Torso = "mlp"
    """Layers before the heads: dense layers (mlp), or the convolutions of Nature DQN (nature), of
    IMPALA (impala) or of MinAtar (minatar, one layer) for images. If an observation has vectors
    too, these have dense layers, and one more dense layer joins them with the images. nature needs
    images of 36 x 36 pixels or more; minatar is for small boards of 10 x 10 or so."""
    image_axes: ImageAxes = "auto"
    """Order of the axes of images, arrays of rank 3 of any dtype: channels last (hwc) or first
    (chw). auto guesses it where the shape tells it, such as of 84 x 84 x 3 or 4 x 84 x 84. Set it
    if an error asks for it."""
    scale_pixels: bool = True
    """Whether arrays that look like pictures (uint8, rank 3) are divided by 255. Turn it off if
    their values are other numbers, such as the object ids of MiniGrid."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the dense layers. Convolutional torsos use the last one as their output size."""
    activation: Activation = "tanh"
    """Activation of the dense layers. Those after convolutions have relu."""
    norm: Norm = "none"
    """Norm between the weights and the activation of each dense layer before the heads: layer,
    batch, or batch_renorm. Both kinds of batch norm use running statistics in acting, evaluation
    and target networks. PPO and IMPALA take batch_renorm only: its log-probabilities in learning
    begin as those of acting."""
    batch_norm_decay: float = 0.999
    """Largest share of the running statistics of batch norm that an update keeps; the first updates
    keep less."""
    dropout: float = 0.0
    """Share of the outputs of each dense layer before the heads that is set to 0 in learning; never
    in acting or evaluation."""
    skip: bool = False
    """Whether the input of each dense layer before the heads is added to its output. Where the
    sizes differ, it passes through a linear layer first."""
    spectral_norm: bool = False
    """Whether the weights of the dense layers before the heads are divided by their largest
    singular value."""
    shared: bool = False
    """Whether policy and value share one torso. With a recurrent core they always share it."""
    critic_input: Literal["all", "state"] = "all"
    """What the value sees if the observation has an entry critic_state, which the policy never
    sees: that entry and the rest of the observation (all), or that entry alone (state)."""
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
    """Size of the recurrent core's state, of each of its layers."""
    core_layers: int = 1
    """Number of layers of the recurrent core, each on top of the one before."""
    dtype: Precision = "float32"
    """Type in which layers compute. bfloat16 is faster on accelerators and halves the memory of
    activations; on most CPUs it is slower. Params, layer norm, recurrent cores, the last layer,
    outputs and losses are float32 in any case."""
    entities: RaggedTransformerConfig = RaggedTransformerConfig()
    """The transformer for observations of entities, which replaces torso and core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "noisy_sigma")
        self.require_finite("policy_log_std")
        self.require_at_least(1, "num_cosines", "core_size", "core_layers")
        self.require("batch_norm_decay", 0 <= self.batch_norm_decay < 1, "in [0, 1)")
        self.require("dropout", 0 <= self.dropout < 1, "in [0, 1)")
        plain = not (self.noisy_sigma and self.has_state)
        self.require("noisy_sigma", plain, "0 with batch norm, dropout or spectral norm")
        precise = self.dtype == "float32" or not (self.has_statistics or self.spectral_norm)
        rule = "float32 with batch norm and spectral norm, whose state needs its digits"
        self.require("dtype", precise, rule)
        self.require_at_least(2, "num_atoms")
        positive = self.hidden_sizes and min(self.hidden_sizes) >= 1
        self.require("hidden_sizes", bool(positive), "one or more positive sizes")

    @property
    def has_statistics(self) -> bool:
        """Whether the network has batch norm, and so running statistics."""
        return self.norm in ("batch", "batch_renorm")

    @property
    def has_state(self) -> bool:
        """Whether the network has state or dropout, so that its params are `StatefulParams`."""
        return self.has_statistics or self.dropout > 0 or self.spectral_norm

    def require_for_entities(self) -> None:
        """Raises a ValueError if an option does not exist for observations of entities."""
        unused = {field.name for field in dataclasses.fields(self)} - {"entities", "scale_pixels"}
        self.require_unused("observations of entities", *sorted(unused))

    def require_unused(self, what: str, *fields: str) -> None:
        """Raises a ValueError if one of these options is given: ``what`` has no use for it."""
        for field in fields:
            value, usual = getattr(self, field), getattr(NetworkConfig, field)
            self.require(field, value == usual, f"{usual} for {what}, which has no use for it")

    def feed_forward(self, forward: Callable[..., PyTree], obs_spec: PyTree) -> Network:
        """Makes a network of a function of an observation ``[B, ...]`` and ``is_training``."""
        forward = in_precision(self.dtype, forward)
        if self.has_state:
            return feed_forward_with_state(forward, obs_spec)
        return feed_forward(functools.partial(forward, is_training=False), obs_spec)

    def recurrent(
        self,
        encode: Callable[..., PyTree],
        decode: Callable[..., PyTree],
        obs_spec: PyTree,
        beside: Callable[..., PyTree] | None = None,
    ) -> Network:
        """Makes a network with the configured core.

        Args:
          encode: maps an observation ``[N, ...]`` and ``is_training`` to features ``[N, D]``.
          decode: maps the core's output ``[N, D]`` to the network's output.
          obs_spec: pytree of ``dm_env.specs`` of one observation.
          beside: maps an observation ``[N, ...]`` and ``is_training`` to features ``[N, D]`` that
              pass the core; ``decode`` then takes them as a second argument.
        """
        # The core keeps float32: its rounding errors would add up from step to step.
        encode = in_precision(self.dtype, encode)

        def after(hidden: Any, observation: PyTree, is_training: bool = False) -> PyTree:
            return decode(hidden, *([] if beside is None else [beside(observation, is_training)]))

        after = in_precision(self.dtype, after)
        if self.has_state:
            return recurrent_with_state(encode, self.make_core, after, obs_spec)
        plain = functools.partial(encode, is_training=False)
        return recurrent(plain, self.make_core, after, obs_spec)

    def encode(
        self,
        obs_spec: PyTree,
        observation: PyTree,
        name: str,
        is_training: bool = False,
        reader: Reader = "policy",
    ) -> jax.Array:
        """Maps an observation ``[B, ...]`` to features ``[B, D]``; call it inside a transform.

        Args:
          obs_spec: pytree of ``dm_env.specs`` of one observation.
          observation: the same structure of arrays ``[B, ...]``.
          name: of the torso's module. See `EntryTorsos` for the modules of several entries.
          is_training: whether there is dropout, and batch norm uses the batch.
          reader: whose torso it is.

        Raises:
          ValueError: the torso is for images, and the observation has none that it can take, or the
            axes of one cannot be guessed.
        """
        if self.torso == "mlp":
            torso = self.make_torso(name, is_training)
            return torso(self.dense_features(obs_spec, observation, reader))
        entries = observation_entries(
            obs_spec, observation, self.scale_pixels, reader, self.image_axes
        )
        if not any(map(is_image_batch, entries.values())):
            shapes = ", ".join(str(tuple(x.shape[1:])) for x in entries.values())
            raise ValueError(
                f"NetworkConfig: torso={self.torso!r} needs an observation with an image [height, "
                f"width, channels]; got shape {shapes}. Use --network.torso mlp."
            )
        if len(entries) == 1:
            return self.make_torso(name, is_training)(*entries.values())
        return EntryTorsos(
            lambda image: self.make_torso(image, is_training),
            lambda vectors: self._make_mlp(vectors, is_training),
            self.hidden_sizes[-1],
            self.noisy_sigma,
            name,
        )(entries)

    def dense_features(
        self, obs_spec: PyTree, observation: PyTree, reader: Reader = "policy"
    ) -> jax.Array:
        """Returns an observation as one array ``[B, ...]`` for dense layers; see `encode`."""
        axes = DENSE if self.image_axes == "auto" else self.image_axes
        return observation_features(obs_spec, observation, self.scale_pixels, reader, axes)

    def make_torso(self, name: str, is_training: bool = False) -> Callable[[jax.Array], jax.Array]:
        """Makes the configured torso; call it inside a Haiku transform."""
        if self.torso == "mlp":
            return self._make_mlp(name, is_training)
        kinds = {"nature": NatureTorso, "impala": ImpalaTorso, "minatar": MinAtarTorso}
        torso: Any = kinds[self.torso]
        return torso(
            hidden_size=self.hidden_sizes[-1],
            noise=self.noisy_sigma,
            name=name,
            block=self._block(),
            is_training=is_training,
        )

    def _make_mlp(self, name: str, is_training: bool) -> Callable[[jax.Array], jax.Array]:
        return MLPTorso(
            self.hidden_sizes,
            self.activation,
            self.noisy_sigma,
            name,
            block=self._block(),
            is_training=is_training,
        )

    def _block(self) -> Block:
        return Block(self.norm, self.batch_norm_decay, self.dropout, self.skip, self.spectral_norm)

    def make_core(self) -> hk.RNNCore:
        """Makes the configured recurrent core; call it inside a Haiku transform."""
        layer = hk.LSTM if self.core == "lstm" else hk.GRU
        if self.core_layers == 1:
            return layer(self.core_size, name="core")
        return hk.DeepRNN([layer(self.core_size, name="core") for _ in range(self.core_layers)])
