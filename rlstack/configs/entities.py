"""The configs of the ragged transformer."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlstack.checks import Checked

BucketKind = Literal["none", "grid", "radial", "distance", "polar"]
Gate = Literal["none", "linear", "relu", "gelu", "sigmoid"]
Pooling = Literal["none", "mean", "max", "meanmax"]
PackingMode = Literal["auto", "never", "always"]


@dataclasses.dataclass(frozen=True)
class _PoseFeatures(Checked):
    """Names of the features that hold an entity's position and direction."""

    position_features: tuple[str, ...] = ("x", "y")
    """Names of the two features that hold a position. Types without them have no position."""
    angle_feature: str = ""
    """Name of the feature that holds an entity's direction, as an angle in radians. Positions are
    rotated into the frame of the observing entity. Empty for no rotation."""
    vector_features: tuple[str, ...] = ()
    """Names of the two features that hold an entity's direction, as a vector. An alternative to
    angle_feature."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("position_features", len(self.position_features) == 2, "two names")
        self.require("vector_features", len(self.vector_features) in (0, 2), "two names or none")
        one = not (self.angle_feature and self.vector_features)
        self.require("vector_features", one, "empty if angle_feature is set")

    @property
    def is_rotated(self) -> bool:
        """Whether positions are rotated by a direction."""
        return bool(self.angle_feature or self.vector_features)


@dataclasses.dataclass(frozen=True)
class RelativePositionsConfig(_PoseFeatures):
    """How attention uses the relative positions of entities.

    The displacement (the attending entity's position minus the attended one's, divided by
    ``scale``) falls into a bucket. Each bucket has a learned code that is added to the keys and one
    that is added to the values. With an angle or direction feature, displacements are in the frame
    of the attending entity; a grid does not support this.
    """

    kind: BucketKind = "none"
    """Buckets of displacements: cells of a grid (grid), directions (radial), distances (distance),
    or directions and distances (polar). none disables the codes."""
    extent: tuple[int, int] = (1, 1)
    """For grid: number of cells to either side, along x and y. Displacements beyond the edge fall
    into the cells at the edge."""
    sectors: int = 8
    """For radial and polar: number of directions."""
    rings: int = 2
    """For distance and polar: number of distances, from 0 to scale. Larger distances fall into the
    last ring."""
    scale: float = 1.0
    """Side of a grid cell, or distance of the outermost ring, in units of the position features.
    Set it to the distance at which positions still matter."""
    interpolate: bool = False
    """Whether to interpolate the codes of neighbouring buckets, so that they vary smoothly with the
    displacement. Not supported for grid."""
    per_type_values: bool = False
    """Whether each type of attended entity has its own codes for the values."""
    value_gate: Gate = "none"
    """Activation of the gate: a linear function of the entity's embedding, which multiplies the
    codes for the values. none disables the gate."""
    project_keys: bool = False
    """Whether to add a linear function of displacement and distance to the codes for the keys."""
    project_values: bool = False
    """Whether to add a linear function of displacement and distance to the codes for the values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        cells = len(self.extent) == 2 and min(self.extent) >= 0
        self.require("extent", cells, "two numbers of at least 0")
        self.require_at_least(1, "sectors")
        self.require_at_least(2, "rings")
        self.require("scale", self.scale > 0, "positive")
        fits = self.kind != "grid" or not (self.is_rotated or self.interpolate)
        self.require("kind", fits, "other than grid, which is neither rotated nor interpolated")

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        width, height = self.extent
        return {
            "none": 0,
            "grid": (2 * width + 1) * (2 * height + 1),
            "radial": self.sectors,
            "distance": self.rings,
            "polar": self.sectors * self.rings,
        }[self.kind]


@dataclasses.dataclass(frozen=True)
class TranslationConfig(_PoseFeatures):
    """Whether to translate positions to the frame of one entity, the reference."""

    reference: str = ""
    """Entity type of the reference, which must have capacity 1. Its angle or direction, if a
    feature is named, rotates the positions. At steps without the reference, positions are
    unchanged. Empty disables the translation."""
    distance_feature: bool = False
    """Whether to add the distance to the reference as a feature of each type with a position."""
    keep_reference: bool = True
    """Whether the reference keeps its own position and direction. If not, they are 0, which makes
    the policy independent of absolute positions."""


@dataclasses.dataclass(frozen=True)
class RaggedTransformerConfig(Checked):
    """A transformer over the entities of a step."""

    d_model: int = 32
    """Size of an entity's embedding."""
    num_layers: int = 2
    """Number of blocks, each of attention and dense layers. 0 uses the embeddings directly."""
    num_heads: int = 2
    """Number of attention heads; must divide d_model."""
    d_qk: int = 16
    """Size of the queries and keys of actions that select an entity."""
    pooling: Pooling = "none"
    """Replaces attention by the mean (mean), the maximum (max) or both (meanmax) over the visible
    entities. none keeps attention."""
    separate_value: bool = False
    """Whether the value has its own embeddings and blocks instead of those of the policy."""
    relative_positions: RelativePositionsConfig = RelativePositionsConfig()
    """Positions of entities relative to each other, in attention."""
    translation: TranslationConfig = TranslationConfig()
    """Positions of entities relative to one of them, in the features."""
    packing: PackingMode = "auto"
    """Whether short environments share a row of attention, which saves padding: auto (if it saves
    enough), never or always. It does not change results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "d_model", "num_heads", "d_qk")
        self.require_at_least(0, "num_layers")
        splits = self.d_model % self.num_heads == 0
        self.require("d_model", splits, f"a multiple of the {self.num_heads} heads")
        between = self.relative_positions
        codes = between.kind != "none" or between.project_keys or between.project_values
        attends = self.pooling == "none" and self.num_layers > 0
        self.require("pooling", attends or not codes, "none, with layers, for relative positions")
