"""TreasureHunt: collect treasures, avoid traps."""

from __future__ import annotations

import numpy as np

from rlstack.entity.environment import Actions, GlobalCategoricalMask, Observation, grid
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, EntityType, GlobalCategorical, ObsSpace

BOUND = 10
_SPREAD = 5
_STEPS = ((0, 1), (0, -1), (-1, 0), (1, 0))
_MOVE = {"move": GlobalCategoricalMask()}
_CELLS = tuple(
    (x, y)
    for x in range(-_SPREAD, _SPREAD + 1)
    for y in range(-_SPREAD, _SPREAD + 1)
    if (x, y) != (0, 0)
)


class TreasureHunt:
    """A player walks on a board with coordinates from -10 to 10, among traps and treasures.

    Observation: the player's position, in the global features x and y; Traps and Treasures (x, y).
    The player starts at (0, 0); by default five Traps and five Treasures are on other cells, all
    different, with coordinates from -5 to 5. Action: the global ``move`` by one cell; a move off
    the board does nothing. Reward: 1 for reaching a Treasure, which then disappears. End: on a
    Trap, or with the last Treasure; truncated after ``max_steps``. Best return: 5, in 25 steps by
    shortest paths; random policy: 0.83, in 128 steps.
    """

    def __init__(
        self, num_traps: int = 5, num_treasures: int = 5, max_steps: int = 1000, seed: int = 0
    ):
        require_in_range(
            "TreasureHunt",
            num_traps=(num_traps, 0, 60),
            num_treasures=(num_treasures, 1, 60),
            max_steps=(max_steps, 1),
        )
        place = ("x", "y")
        self.obs_space = ObsSpace(
            {
                "Trap": EntityType(place, capacity=max(1, num_traps)),
                "Treasure": EntityType(place, capacity=num_treasures),
            },
            global_features=place,
        )
        self.action_space: ActionSpace = {
            "move": GlobalCategorical(("up", "down", "left", "right"))
        }
        self._num_traps, self._num_treasures = num_traps, num_treasures
        self._max_steps, self._step = max_steps, 0
        self._rng = np.random.default_rng(seed)
        self._x = self._y = 0
        self._traps: list[tuple[int, int]] = []
        self._treasures: list[tuple[int, int]] = []

    def __str__(self) -> str:
        marks = dict.fromkeys(self._traps, "x") | dict.fromkeys(self._treasures, "$")
        marks[self._x, self._y] = "@"
        side = 2 * BOUND + 1
        return grid(side, side, {(x + BOUND, y + BOUND): mark for (x, y), mark in marks.items()})

    def reset(self) -> Observation:
        """Draws the positions of traps and treasures."""
        count = self._num_traps + self._num_treasures
        cells = [_CELLS[i] for i in self._rng.permutation(len(_CELLS))[:count].tolist()]
        self._traps, self._treasures = cells[: self._num_traps], cells[self._num_traps :]
        self._x = self._y = self._step = 0
        return self._observe(0.0)

    def act(self, actions: Actions) -> Observation:
        """Moves, and takes a treasure on the new cell."""
        dx, dy = _STEPS[actions["move"].indices[0]]
        self._x = min(BOUND, max(-BOUND, self._x + dx))
        self._y = min(BOUND, max(-BOUND, self._y + dy))
        self._step += 1
        cell = (self._x, self._y)
        reward = 0.0
        if cell in self._treasures:
            self._treasures.remove(cell)
            reward = 1.0
        return self._observe(reward)

    def _observe(self, reward: float) -> Observation:
        ended = not self._treasures or (self._x, self._y) in self._traps
        return Observation(
            features={"Trap": self._traps, "Treasure": self._treasures.copy()},
            actions=_MOVE,
            global_features=(self._x, self._y),
            reward=reward,
            done=ended,
            truncated=self._step >= self._max_steps and not ended,
        )
