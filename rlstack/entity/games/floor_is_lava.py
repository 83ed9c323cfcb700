"""FloorIsLava: jump to the one neighbouring cell that is not lava."""

from __future__ import annotations

import numpy as np

from rlstack.entity.environment import Actions, CategoricalMask, Observation, grid
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace

DIRECTIONS = {
    "n": (0, 1),
    "ne": (1, 1),
    "e": (1, 0),
    "se": (1, -1),
    "s": (0, -1),
    "sw": (-1, -1),
    "w": (-1, 0),
    "nw": (-1, 1),
}
_STEPS = tuple(DIRECTIONS.values())
_MOVE = {"move": CategoricalMask(actor_types=("Player",))}


class FloorIsLava:
    """A player jumps to one of the eight neighbouring cells.

    Observation: the Player, at random integer coordinates from -1000 to 1000, and a random 1 to 8
    of its neighbouring cells, of which a random one is HighGround and the others are Lava; all have
    (x, y). Action: the Player's ``move`` in one of eight directions. Reward: 1 on HighGround, else
    0. End: after one step. Best return: 1; random policy: 0.125.
    """

    def __init__(self, seed: int = 0):
        place = ("x", "y")
        self.obs_space = ObsSpace(
            {
                "Player": EntityType(place),
                "Lava": EntityType(place, capacity=7),
                "HighGround": EntityType(place),
            }
        )
        self.action_space: ActionSpace = {"move": Categorical(tuple(DIRECTIONS))}
        self._rng = np.random.default_rng(seed)
        self._player = self._high_ground = (0, 0)
        self._lava: list[tuple[int, int]] = []

    def __str__(self) -> str:
        x, y = self._player
        marks = dict.fromkeys(self._lava, "~") | {self._high_ground: "^", self._player: "@"}
        return grid(5, 5, {(i - x + 2, j - y + 2): mark for (i, j), mark in marks.items()})

    def reset(self) -> Observation:
        """Draws the position and the neighbouring cells."""
        x, y, shown = self._rng.integers((-1000, -1000, 1), (1000, 1000, 8), endpoint=True).tolist()
        order = self._rng.permutation(8)[:shown].tolist()
        cells = [(x + _STEPS[i][0], y + _STEPS[i][1]) for i in order]
        self._player, self._high_ground, self._lava = (x, y), cells[0], cells[1:]
        return self._observe(0.0, done=False)

    def act(self, actions: Actions) -> Observation:
        """Jumps."""
        dx, dy = _STEPS[actions["move"].indices[0]]
        x, y = self._player
        self._player = (x + dx, y + dy)
        return self._observe(float(self._player == self._high_ground), done=True)

    def _observe(self, reward: float, done: bool) -> Observation:
        return Observation(
            features={
                "Player": [self._player],
                "Lava": self._lava,
                "HighGround": [self._high_ground],
            },
            actions=_MOVE,
            reward=reward,
            done=done,
        )
