"""The options of the scaling of observations and rewards."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlstack.checks import Checked


@dataclasses.dataclass(frozen=True)
class NormalisationConfig(Checked):
    """Normalisation of the agent's observations and rewards; reported returns stay as they are."""

    observations: bool = False
    """Whether float observations are standardised by running statistics."""
    observation_clip: float = 10.0
    """Standardised observations are clipped to plus or minus this."""
    rewards: Literal["none", "reward", "return", "centred"] = "none"
    """How rewards are scaled. reward: divided by their running standard deviation. return: by that
    of discounted returns. centred: first minus their running mean, then as reward; use it only if
    all episodes end by a time limit. Rewards that are all equal are not divided."""
    return_discount: float | None = None
    """Discount of the returns that the option rewards=return uses. None takes the agent's."""
    return_limit: float = 0.0
    """With rewards=return: the largest size that a discounted return so far may have after scaling.
    Rewards are divided further where the deviation leaves a larger one, so that returns fit the
    atoms of a distributional critic. 0 has no limit."""
    reward_scale: float = 1.0
    """Factor on rewards."""
    reward_clip: float = 0.0
    """Scaled rewards are clipped to plus or minus this; 0 does not clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("observation_clip", self.observation_clip > 0, "positive")
        if self.return_discount is not None:
            self.require("return_discount", 0 <= self.return_discount <= 1, "in [0, 1]")
        self.require_at_least(0, "reward_clip", "return_limit")
        scaled = self.rewards == "return" or not self.return_limit
        self.require("return_limit", scaled, f"0 with rewards={self.rewards}")
