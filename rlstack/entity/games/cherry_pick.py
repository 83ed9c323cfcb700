"""CherryPick: take the best half of the cherries."""

from __future__ import annotations

import numpy as np

from rlstack.entity.environment import Actions, Observation, SelectEntityMask
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, EntityType, ObsSpace, SelectEntity

_PICK = {"pick": SelectEntityMask(actor_types=("Player",), actee_types=("Cherry",))}


class CherryPick:
    """A Player takes half of ``num_cherries`` cherries, one after the other.

    Observation: a Player without features and the Cherries (quality) that are left. Qualities are
    standard normal, shifted so that the better half sums to 1. Action: the Player's ``pick`` of a
    Cherry, which then disappears. Reward: its quality. End: when half are taken. Best return: 1,
    by taking the better half in any order; random policy: -11.45 with 32 cherries.
    """

    def __init__(self, num_cherries: int = 32, seed: int = 0):
        require_in_range("CherryPick", num_cherries=(num_cherries, 2))
        if num_cherries % 2:
            raise ValueError(f"CherryPick: num_cherries must be even; got {num_cherries}.")
        self.obs_space = ObsSpace(
            {"Player": EntityType(), "Cherry": EntityType(("quality",), capacity=num_cherries)}
        )
        self.action_space: ActionSpace = {"pick": SelectEntity()}
        self._num_cherries = num_cherries
        self._rng = np.random.default_rng(seed)
        self._qualities: list[float] = []

    def __str__(self) -> str:
        shown = (f"{i}: {quality:+.2f}" for i, quality in enumerate(self._qualities))
        return "\n".join(f"{text:>10}" for text in shown)

    def reset(self) -> Observation:
        """Draws the qualities."""
        half = self._num_cherries // 2
        drawn = self._rng.standard_normal(self._num_cherries)
        shift = (np.sort(drawn)[half:].sum() - 1.0) / half
        self._qualities = (drawn - shift).tolist()
        return self._observe(0.0)

    def act(self, actions: Actions) -> Observation:
        """Removes the chosen cherry; its quality is the reward."""
        _, row = actions["pick"].actees[0]
        return self._observe(self._qualities.pop(row))

    def _observe(self, reward: float) -> Observation:
        return Observation(
            features={"Player": 1, "Cherry": [(quality,) for quality in self._qualities]},
            actions=_PICK,
            reward=reward,
            done=2 * len(self._qualities) <= self._num_cherries,
        )
