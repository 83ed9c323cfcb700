"""Count: count the beans."""

from __future__ import annotations

import numpy as np

from rlstack.entity.environment import Actions, CategoricalMask, Observation
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace

NUM_CHOICES = 10


class Count:
    """A Player counts n Beans; n is uniform between 0 and ``masked_choices`` - 1.

    Observation: the Player and the Beans, all without features. Action: the Player's ``count``, one
    of ten numbers. The legal numbers are n and a random subset, of random size, of the numbers
    below ``masked_choices``. Reward: 1 for n, else 0. End: after one step. Best return: 1; random
    policy: 0.75 with 2 masked choices, 0.457 with 5 and 0.293 with 10.
    """

    def __init__(self, masked_choices: int = NUM_CHOICES, seed: int = 0):
        require_in_range("Count", masked_choices=(masked_choices, 1, NUM_CHOICES))
        self.obs_space = ObsSpace(
            {"Player": EntityType(), "Bean": EntityType(capacity=NUM_CHOICES - 1)}
        )
        self.action_space: ActionSpace = {
            "count": Categorical(tuple(str(n) for n in range(NUM_CHOICES)))
        }
        self._masked_choices = masked_choices
        self._rng = np.random.default_rng(seed)
        self._beans = 0
        self._legal: list[bool] = []

    def __str__(self) -> str:
        return "o" * self._beans or "(no beans)"

    def reset(self) -> Observation:
        """Draws the number of beans and the legal answers."""
        m = self._masked_choices
        beans, size = self._rng.integers(0, (m, m + 1)).tolist()
        self._beans = beans
        self._legal = [False] * NUM_CHOICES
        for choice in self._rng.permutation(m)[:size].tolist():
            self._legal[choice] = True
        self._legal[beans] = True
        return self._observe(0.0, done=False)

    def act(self, actions: Actions) -> Observation:
        """Rewards the right answer."""
        return self._observe(float(actions["count"].indices[0] == self._beans), done=True)

    def _observe(self, reward: float, done: bool) -> Observation:
        return Observation(
            features={"Player": 1, "Bean": self._beans},
            actions={"count": CategoricalMask(actor_types=("Player",), mask=[self._legal])},
            reward=reward,
            done=done,
        )
