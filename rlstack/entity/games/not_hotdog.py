"""NotHotdog: classify one thing as a hotdog or not."""

from __future__ import annotations

import numpy as np

from rlstack.entity.environment import Actions, CategoricalMask, Observation
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace

_CLASSIFY = {"classify": CategoricalMask(actor_types=("Player",))}


class NotHotdog:
    """A Player classifies one thing, which is a hotdog in half of the episodes.

    Observation: the Player (step), and the thing: an Object (is_hotdog) or, for half of the
    hotdogs, a Hotdog without features. Actions: the Player's ``classify``; ``unused_action`` never
    has an actor. Reward: 1 for the right answer, else 0. End: after one step. Best return: 1;
    random policy: 0.5.
    """

    def __init__(self, seed: int = 0):
        self.obs_space = ObsSpace(
            {
                "Player": EntityType(("step",)),
                "Object": EntityType(("is_hotdog",)),
                "Hotdog": EntityType(),
            }
        )
        self.action_space: ActionSpace = {
            "classify": Categorical(("not hotdog", "hotdog")),
            "unused_action": Categorical(("never",)),
        }
        self._rng = np.random.default_rng(seed)
        self._is_hotdog = self._is_plain = False

    def __str__(self) -> str:
        return "Hotdog" if self._is_plain else f"Object (is_hotdog {int(self._is_hotdog)})"

    def reset(self) -> Observation:
        """Draws the thing."""
        self._is_hotdog = self._rng.random() < 0.5
        self._is_plain = self._is_hotdog and self._rng.random() < 0.5
        return self._observe(0)

    def act(self, actions: Actions) -> Observation:
        """Rewards the right answer."""
        right = actions["classify"].indices[0] == self._is_hotdog
        return self._observe(1, float(right))

    def _observe(self, step: int, reward: float = 0.0) -> Observation:
        thing = {"Hotdog": 1} if self._is_plain else {"Object": [(float(self._is_hotdog),)]}
        return Observation(
            features={"Player": [(step,)], **thing},
            actions=_CLASSIFY,
            reward=reward,
            done=step > 0,
        )
