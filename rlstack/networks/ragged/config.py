"""The config of a ragged transformer."""

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
    """Names of the features with an entity's position and heading."""

    position_features: tuple[str, ...] = ("x", "y")
    """Names of the two features with an entity's position. Types without them have no position."""
    angle_feature: str = ""
    """Name of the feature with an entity's heading, in radians. If set, positions are rotated
    into the frame of the observing entity."""
    vector_features: tuple[str, ...] = ()
    """Names of two features with an entity's heading as a vector, instead of angle_feature."""

    def __post_init__(self) -> None:
        self.require("position_features", len(self.position_features) == 2, "two names")
        self.require("vector_features", len(self.vector_features) in (0, 2), "two names or none")
        one = not (self.angle_feature and self.vector_features)
        self.require("vector_features", one, "empty where there is an angle_feature")

    @property
    def is_turned(self) -> bool:
        """Whether positions are rotated by a heading."""
        return bool(self.angle_feature or self.vector_features)


@dataclasses.dataclass(frozen=True)
class RelativePositionsConfig(_Oriented):
    """Relative positions in attention: learned codes of the displacement between two entities.

    The displacement is the attending entity's position minus the attended one's, divided by
    ``scale``. It falls into a bucket. Each bucket has one code that is added to the keys and one
    that is added to the values. With a heading, displacements are rotated into the frame of the
    attending entity; a grid has none.
    """

    kind: BucketKind = "none"
    """How displacements are divided into buckets: by grid cell, direction (radial), distance, or
    direction and distance (polar). none turns relative positions off."""
    extent: tuple[int, int] = (1, 1)
    """grid: number of cells to each side, along x and y. Farther entities count as at the edge."""
    sectors: int = 8
    """radial, polar: number of directions."""
    rings: int = 2
    """distance, polar: number of distances, from 0 to scale. Farther entities count as at scale."""
    scale: float = 1.0
    """grid: side length of a cell. distance, polar: distance of the outermost ring."""
    interpolate: bool = False
    """Whether to interpolate between the codes of neighbouring buckets. Not for grid."""
    per_type_values: bool = False
    """Whether the codes added to the values differ by the type of the attended entity."""
    value_gate: Gate = "none"
    """Function of the attended entity's embedding that multiplies the codes added to the values."""
    project_keys: bool = False
    """Whether to add a linear function of displacement and distance to the codes of the keys."""
    project_values: bool = False
    """Whether to add a linear function of displacement and distance to the codes of the values."""

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
        """The number of buckets."""
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
    """Positions relative to one reference entity."""

    reference: str = ""
    """The type of the reference entity, of which there is at most one. If empty, positions stay
    absolute. They also stay absolute in steps without such an entity."""
    distance_feature: bool = False
    """Whether to add the distance from the reference as a feature, to types with a position."""
    keep_reference: bool = True
    """Whether the reference keeps its own absolute position and heading. Otherwise they become 0,
    and the network cannot depend on where the reference stands."""


@dataclasses.dataclass(frozen=True)
class RaggedTransformerConfig(Checked):
    """A transformer over the entities of a step."""

    d_model: int = 32
    """Width of an entity's embedding."""
    num_layers: int = 2
    """Number of transformer blocks. With 0 the embeddings go straight to the heads."""
    num_heads: int = 2
    """Number of attention heads. It must divide d_model."""
    d_qk: int = 16
    """Width of the queries and keys with which actors select entities."""
    pooling: Pooling = "none"
    """Replaces attention by the mean, the maximum, or both, of the visible entities."""
    separate_value: bool = False
    """Whether the value function has its own embeddings and blocks."""
    relative_positions: RelativePositionsConfig = RelativePositionsConfig()
    """Positions of entities relative to each other, as a part of attention."""
    translation: TranslationConfig = TranslationConfig()
    """Positions of all entities relative to one of them, as input features."""
    packing: PackingMode = "auto"
    """Whether the entities of several environments share one row of attention.
    auto does so where it saves enough padding."""

    def __post_init__(self) -> None:
        for field, known in (("pooling", get_args(Pooling)), ("packing", get_args(PackingMode))):
            self.require_one_of(field, known)
        self.require_at_least(1, "d_model", "num_heads", "d_qk")
        self.require_at_least(0, "num_layers")
        splits = self.d_model % self.num_heads == 0
        self.require("d_model", splits, f"a multiple of the {self.num_heads} heads")
        mixes = self.pooling == "none" or self.relative_positions.kind == "none"
        self.require("pooling", mixes, "none with relative positions, which are of attention")
