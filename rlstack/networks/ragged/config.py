"""What a ragged transformer is made of."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from rlstack.checks import Checked

BucketKind = Literal["none", "grid", "radial", "distance", "polar"]
Gate = Literal["none", "linear", "relu", "gelu", "sigmoid"]
Pooling = Literal["none", "mean", "max", "meanmax"]
PackingMode = Literal["auto", "never", "always"]


@dataclasses.dataclass(frozen=True)
class _Oriented(Checked):
    """Names of features that tell where an entity stands and which way it looks."""

    position_features: tuple[str, ...] = ("x", "y")
    """The two features that tell a position; types without them have none."""
    angle_feature: str = ""
    """A feature, in radians, by which the one who looks is turned."""
    vector_features: tuple[str, ...] = ()
    """Two features, a direction, in the place of an angle."""

    def __post_init__(self) -> None:
        self.require("position_features", len(self.position_features) == 2, "two names")
        self.require("vector_features", len(self.vector_features) in (0, 2), "two names or none")
        one = not (self.angle_feature and self.vector_features)
        self.require("vector_features", one, "empty where there is an angle_feature")

    @property
    def is_turned(self) -> bool:
        """Whether somebody's direction counts."""
        return bool(self.angle_feature or self.vector_features)


@dataclasses.dataclass(frozen=True)
class RelativePositionsConfig(_Oriented):
    """How attention knows where entities stand as seen from each other.

    The displacement (the attending entity's position less the attended one's, divided by ``scale``)
    falls into a bucket, and each bucket has a code that enters the attention's logits and one that
    enters its result. Where there is an angle or direction, displacements are as the attending
    entity sees them; not with a grid.
    """

    kind: BucketKind = "none"
    """The buckets: cells of a grid, directions, distances, or both of these; none for no such
    codes."""
    extent: tuple[int, int] = (1, 1)
    """grid: cells to either side, along x and y; what is farther counts as at the edge."""
    sectors: int = 8
    """radial, polar: how many directions."""
    rings: int = 2
    """distance, polar: how many distances, from 0 to the scale; what is farther counts as there."""
    scale: float = 1.0
    """grid: the side of a cell; otherwise the distance of the outermost ring."""
    interpolate: bool = False
    """Whether codes of neighbouring buckets are mixed by nearness. Not for a grid."""
    per_type_values: bool = False
    """Whether codes that enter the result differ by the type of the attended entity."""
    value_gate: Gate = "none"
    """Function of the attended entity's embedding that codes entering the result are multiplied
    by."""
    project_keys: bool = False
    """Whether a linear function of displacement and distance joins the codes in the logits."""
    project_values: bool = False
    """The same for the codes that enter the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, known in (("kind", get_args(BucketKind)), ("value_gate", get_args(Gate))):
            self.require_one_of(field, known)
        cells = len(self.extent) == 2 and min(self.extent) >= 0
        self.require("extent", cells, "two numbers of at least 0")
        self.require_at_least(1, "sectors")
        self.require_at_least(2, "rings")
        self.require("scale", self.scale > 0, "positive")
        fits = self.kind != "grid" or not (self.is_turned or self.interpolate)
        self.require("kind", fits, "other than grid, which is neither turned nor interpolated")

    @property
    def num_buckets(self) -> int:
        """How many codes there are."""
        width, height = self.extent
        return {
            "none": 0,
            "grid": (2 * width + 1) * (2 * height + 1),
            "radial": self.sectors,
            "distance": self.rings,
            "polar": self.sectors * self.rings,
        }[self.kind]


@dataclasses.dataclass(frozen=True)
class TranslationConfig(_Oriented):
    """Whether positions are told as seen from one entity."""

    reference: str = ""
    """The type of that entity, of which there is at most one; empty for positions as they are. At a
    step without it they stay as they are. Its angle or direction, if named, turns them."""
    distance_feature: bool = False
    """Whether types with a position get their distance as one more feature."""
    keep_reference: bool = True
    """Whether the reference keeps its own position and direction; else they are 0, and the network
    cannot tell one place from another."""


@dataclasses.dataclass(frozen=True)
class RaggedTransformerConfig(Checked):
    """A transformer over the entities of a step."""

    d_model: int = 32
    """Width of an entity's embedding."""
    num_layers: int = 2
    """Blocks of attention and dense layers; 0 leaves the embeddings."""
    num_heads: int = 2
    """Heads of attention."""
    d_qk: int = 16
    """Width of queries and keys by which actors select entities."""
    pooling: Pooling = "none"
    """What takes the place of attention: the mean, the maximum or both over what may be seen."""
    separate_value: bool = False
    """Whether the value has embeddings and blocks of its own."""
    relative_positions: RelativePositionsConfig = RelativePositionsConfig()
    """Where entities stand as seen from each other."""
    translation: TranslationConfig = TranslationConfig()
    """Where entities stand as seen from one of them."""
    packing: PackingMode = "auto"
    """Whether several environments share a row of attention; auto where it saves enough."""

    def __post_init__(self) -> None:
        for field, known in (("pooling", get_args(Pooling)), ("packing", get_args(PackingMode))):
            self.require_one_of(field, known)
        self.require_at_least(1, "d_model", "num_heads", "d_qk")
        self.require_at_least(0, "num_layers")
        splits = self.d_model % self.num_heads == 0
        self.require("d_model", splits, f"a multiple of the {self.num_heads} heads")
        mixes = self.pooling == "none" or self.relative_positions.kind == "none"
        self.require("pooling", mixes, "none with relative positions, which are of attention")
