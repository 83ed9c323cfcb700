"""The options of the networks that ship with rlstack."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlstack.checks import Checked
from rlstack.configs.entities import RaggedTransformerConfig

Torso = Literal["mlp", "residual", "sphere", "nature", "impala", "minatar"]
DENSE_TORSOS = ("mlp", "residual", "sphere")  # the others have convolutions

Activation = Literal["tanh", "relu", "elu", "silu", "mish"]

Core = Literal["none", "lstm", "gru", "mingru", "s5", "gtrxl"]

# The order of the axes of images: [height, width, channels], or with the channels first.
ImageAxes = Literal["auto", "hwc", "chw"]

Norm = Literal["none", "layer", "rms", "batch", "batch_renorm"]
NormPlace = Literal["inner", "outer"]

Precision = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class CriticConfig(Checked):
    """What the network of values has of its own; None is as in the policy's network."""

    torso: Torso | None = None
    """Layers before the heads."""
    hidden_sizes: tuple[int, ...] | None = None
    """Sizes of the dense layers."""
    activation: Activation | None = None
    """Activation of the dense layers."""
    norm: Norm | None = None
    """Norm of the dense layers."""
    norm_place: NormPlace | None = None
    """Where the norm is."""
    dropout: float | None = None
    """Share of the outputs of each dense layer that is set to 0 in learning."""
    skip: bool | None = None
    """Whether the input of each dense layer is added to its output."""
    spectral_norm: bool | None = None
    """Whether weights are divided by their largest singular value."""
    core: Core | None = None
    """Recurrent core of the value."""
    core_size: int | None = None
    """Size of that core's state."""
    dtype: Precision | None = None
    """Type in which the layers compute."""


@dataclasses.dataclass(frozen=True)
class NetworkConfig(Checked):
    """The architecture of an agent's default network."""

    torso: Torso = "mlp"
    """Layers before the heads: dense layers (mlp), residual blocks (residual, as in SimBa), blocks
    with features and weights of norm 1 (sphere, as in SimBaV2), or the convolutions of Nature DQN
    (nature), of IMPALA (impala) or of MinAtar (minatar, one layer) for images. If an observation
    has vectors too, these have dense layers, and one more dense layer joins them with the images.
    nature needs images of 36 x 36 pixels or more; minatar is for boards of 10 x 10 or so."""
    image_axes: ImageAxes = "auto"
    """Order of the axes of images, arrays of rank 3 of any dtype: channels last (hwc) or first
    (chw). auto guesses it where the shape tells it, such as of 84 x 84 x 3 or 4 x 84 x 84. Set it
    if an error asks for it."""
    scale_pixels: bool = True
    """Whether arrays that look like pictures (uint8, rank 3) are divided by 255. Turn it off if
    their values are other numbers, such as the object ids of MiniGrid."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the dense layers, or of the blocks, which are equal. Convolutional torsos use the
    last one as their output size."""
    activation: Activation = "tanh"
    """Activation of the dense layers. Those after convolutions and on the sphere have relu."""
    norm: Norm = "none"
    """Norm of each dense layer before the heads: layer, rms, batch, or batch_renorm. Both kinds of
    batch norm use running statistics in acting, evaluation and target networks. PPO and IMPALA take
    batch_renorm only: its log-probabilities in learning begin as those of acting."""
    norm_place: NormPlace = "inner"
    """Where the norm is. inner: between weights and activation, in blocks before the weights.
    outer: of the input, and of the output of each dense layer, as in CrossQ."""
    batch_norm_decay: float = 0.999
    """Largest share of the running statistics of batch norm that an update keeps; the first updates
    keep less."""
    renorm_after: int = 0
    """Updates after which batch_renorm corrects, by at most the factor 3 and the shift 5 of its
    paper; before, it is batch norm. 0 corrects at once and without limits."""
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
    """Whether policy and value share one torso. With a recurrent core they always share it, unless
    critic has options."""
    critic: CriticConfig = CriticConfig()
    """Options of the value network that differ from those of the policy."""
    critic_observation: str | None = None
    """Entry of the observation, or of extras, that the critic sees and the policy does not. None is
    critic_state, for state values beside a policy (PPO, IMPALA), if the observation has it."""
    critic_input: Literal["all", "state"] = "all"
    """What the critic sees if there is such an entry: that entry and the rest of the observation
    (all), or that entry alone (state)."""
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
    """Core between torso and heads, for tasks that need memory: lstm or gru; mingru or s5, which
    learn from all steps of a sequence in parallel; or gtrxl, attention to the last steps."""
    core_size: int = 64
    """Size of the core's state, of each of its layers; of gtrxl, of each step that it remembers."""
    core_layers: int = 1
    """Number of layers of the core, each on top of the one before."""
    core_memory: int = 64
    """Number of earlier steps that each layer of gtrxl attends to."""
    core_heads: int = 4
    """Number of attention heads of gtrxl, a divisor of core_size."""
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
        self.require_at_least(1, "core_memory", "core_heads")
        parts = {"s5": 2, "gtrxl": self.core_heads}.get(self.core, 1)
        rule = f"a multiple of {parts} for the core {self.core}"
        self.require("core_size", self.core_size % parts == 0, rule)
        if "gtrxl" not in (self.core, self.critic.core):
            self.require_unused("cores other than gtrxl", "core_memory", "core_heads")
        self.require("batch_norm_decay", 0 <= self.batch_norm_decay < 1, "in [0, 1)")
        self.require("dropout", 0 <= self.dropout < 1, "in [0, 1)")
        plain = not (self.noisy_sigma and self.has_state)
        self.require("noisy_sigma", plain, "0 with batch norm, dropout or spectral norm")
        precise = self.dtype == "float32" or not (self.has_statistics or self.spectral_norm)
        rule = "float32 with batch norm and spectral norm, whose state needs its digits"
        self.require("dtype", precise, rule)
        self.require_at_least(2, "num_atoms")
        self.require_at_least(0, "renorm_after")
        if self.torso in ("residual", "sphere"):
            equal = len(set(self.hidden_sizes)) == 1
            self.require("hidden_sizes", equal, f"equal sizes for the torso {self.torso}")
            unused = ["norm_place", "skip", "dropout", "spectral_norm", "noisy_sigma"]
            unused += ["norm"] if self.torso == "sphere" else []
            self.require_unused(f"the torso {self.torso}", *unused)
        positive = self.hidden_sizes and min(self.hidden_sizes) >= 1
        self.require("hidden_sizes", bool(positive), "one or more positive sizes")

        self.of_critic()  # checks it

    def of_critic(self) -> NetworkConfig:
        """Returns the options of the network of values; the same object if it has none of its own.

        Raises:
          ValueError: they do not fit those of the policy's network.
        """
        if not self.has_critic:
            return self
        own = {name: value for name, value in vars(self.critic).items() if value is not None}
        if own.get("core", self.core) != "gtrxl":
            own |= {name: getattr(NetworkConfig, name) for name in ("core_memory", "core_heads")}
        return dataclasses.replace(self, critic=CriticConfig(), **own)

    @property
    def has_critic(self) -> bool:
        """Whether the network of values has options of its own."""
        return self.critic != CriticConfig()

    @property
    def convolves(self) -> bool:
        """Whether a network has convolutions."""
        return not {self.torso, self.of_critic().torso} <= set(DENSE_TORSOS)

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
