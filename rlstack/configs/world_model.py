"""The sizes of a world model that is learned from sequences."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from rlstack.checks import Checked

Size = Literal["tiny", "1m", "12m", "25m", "50m", "100m", "200m"]

# Units of the dense layers (Hafner et al. 2025, table of model sizes; the others follow from them).
_UNITS = {"1m": 64, "12m": 256, "25m": 384, "50m": 512, "100m": 768, "200m": 1024}


class Sizes(NamedTuple):
    """All sizes of a world model."""

    recurrent: int
    hidden: int
    categoricals: int
    classes: int
    units: int
    layers: int
    depth: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class WorldModelConfig(Checked):
    """The sizes of a world model, and of the policy and the critic that see its states."""

    size: Size = "12m"
    """All sizes by one word, named after the params of the whole agent; tiny is for tests and small
    tasks on a CPU. Each size that is given below replaces its own."""
    recurrent: int | None = None
    """Numbers of the recurrent state."""
    hidden: int | None = None
    """Units of the dense layers of the recurrent model, and of those that predict categories."""
    categoricals: int | None = None
    """Categorical variables of the random state."""
    classes: int | None = None
    """Classes of each of these variables."""
    units: int | None = None
    """Units of the dense layers of encoder, decoder, heads, policy and critic."""
    layers: int | None = None
    """Dense layers of the encoder, the decoder, the policy and the critic; the heads of rewards and
    ends have one."""
    depth: int | None = None
    """Channels of images at full size, of which the smaller ones have a multiple."""
    blocks: int | None = None
    """Blocks of the recurrent state, each of which sees itself and the inputs only; 1 is dense."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in Sizes._fields:
            self.require(field, (getattr(self, field) or 1) >= 1, "at least 1")
        sizes = self.sizes()
        self.require("classes", sizes.classes >= 2, "at least 2")
        if sizes.recurrent % sizes.blocks:
            raise ValueError(
                f"WorldModelConfig: recurrent must be a multiple of blocks; got {sizes.recurrent} "
                f"and {sizes.blocks}."
            )

    def sizes(self) -> Sizes:
        """Returns the sizes, with those of ``size`` filled in."""
        if self.size == "tiny":
            usual = Sizes(
                recurrent=64,
                hidden=32,
                categoricals=8,
                classes=8,
                units=32,
                layers=2,
                depth=4,
                blocks=4,
            )
        else:
            units = _UNITS[self.size]
            usual = Sizes(
                recurrent=8 * units,
                hidden=units,
                categoricals=32,
                classes=units // 16,
                units=units,
                layers=3,
                depth=units // 16,
                blocks=8,
            )
        given = {field: getattr(self, field) for field in Sizes._fields}
        return usual._replace(**{field: x for field, x in given.items() if x is not None})
