"""RockPaperScissors: an entity that the value function sees and the policy does not."""

from __future__ import annotations

import numpy as np

from rlstack.entity.environment import Actions, CategoricalMask, Observation
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace

_CHOICES = ("rock", "paper", "scissors")
_THROW = {"throw": CategoricalMask(actor_types=("Player",))}


class RockPaperScissors:
    """A Player throws against an Opponent that has thrown already.

    Observation: a Player without features and the Opponent (is_rock, is_paper, is_scissors), which
    throws rock, paper or scissors with probability 0.5, 0.3 or 0.2. The value function sees the
    Opponent; the policy sees it only with ``cheat``. Action: the Player's ``throw``. Reward: 2 for
    a win, else 0. End: after one step. Best return: 1, by paper, or 2 with ``cheat``; random
    policy: 2/3.
    """

    def __init__(self, cheat: bool = False, seed: int = 0):
        self.obs_space = ObsSpace(
            {
                "Player": EntityType(),
                "Opponent": EntityType(("is_rock", "is_paper", "is_scissors")),
            }
        )
        self.action_space: ActionSpace = {"throw": Categorical(_CHOICES)}
        self._visible = {"Opponent": [cheat]}
        self._cheat = cheat
        self._rng = np.random.default_rng(seed)
        self._opponent, self._is_over = 0, False

    def __str__(self) -> str:
        shown = self._cheat or self._is_over
        return f"opponent: {_CHOICES[self._opponent] if shown else '?'}"

    def reset(self) -> Observation:
        """Draws the opponent's throw."""
        drawn = self._rng.random()
        self._opponent = 0 if drawn < 0.5 else 1 if drawn < 0.8 else 2
        return self._observe(0.0, done=False)

    def act(self, actions: Actions) -> Observation:
        """Throws."""
        wins = actions["throw"].indices[0] == (self._opponent + 1) % 3
        return self._observe(2.0 if wins else 0.0, done=True)

    def _observe(self, reward: float, done: bool) -> Observation:
        self._is_over = done
        return Observation(
            features={"Player": 1, "Opponent": [[i == self._opponent for i in range(3)]]},
            actions=_THROW,
            visible=self._visible,
            reward=reward,
            done=done,
        )
