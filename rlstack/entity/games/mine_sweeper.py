"""MineSweeper: robots defuse mines, and an orbital cannon shoots at them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rlstack.entity.environment import (
    ActionMask,
    Actions,
    CategoricalMask,
    Observation,
    SelectEntityMask,
    grid,
)
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace, SelectEntity

Cell = tuple[int, int]

_STEPS = ((0, 1), (0, -1), (-1, 0), (1, 0))
_DEFUSE = len(_STEPS)
_FIRE = SelectEntityMask(actor_types=("Orbital Cannon",), actee_types=("Mine", "Robot"))


class MineSweeper:
    """Robots walk to mines on a board and defuse them.

    Observation: Mines and Robots (x, y), which start on different cells, and with
    ``orbital_cannon`` an Orbital Cannon (cooldown). Actions: each Robot's ``Move`` goes up, down,
    left or right, if the board does not end there, or defuses, which removes all Mines at Manhattan
    distance 1 or less. The cannon's cooldown falls by 1 each step. When it is 0, the cannon must
    ``Fire Orbital Cannon`` at a Mine or a Robot, which removes the target before it acts, and the
    cooldown starts again at ``cooldown_period``. In a step the cannon fires first, then the Robots
    act one after the other, then Robots on the cell of a Mine are removed. Reward: 1 when the last
    Mine is removed. End: then, or when no Robot is left; truncated after ``max_steps``. Best
    return: 1, which a scripted policy reaches: its Robots defuse the nearest Mine. Random policy:
    0.12.
    """

    def __init__(
        self,
        width: int = 6,
        height: int = 6,
        num_mines: int = 5,
        num_robots: int = 2,
        orbital_cannon: bool = False,
        cooldown_period: int = 5,
        max_steps: int = 1000,
        seed: int = 0,
    ):
        require_in_range(
            "MineSweeper",
            width=(width, 1),
            height=(height, 1),
            num_mines=(num_mines, 1),
            num_robots=(num_robots, 1, width * height - num_mines),
            cooldown_period=(cooldown_period, 1),
            max_steps=(max_steps, 1),
        )
        place = ("x", "y")
        entities = {
            "Mine": EntityType(place, num_mines),
            "Robot": EntityType(place, num_robots),
        }
        moves = ("up", "down", "left", "right", "defuse")
        self.action_space: ActionSpace = {"Move": Categorical(moves, num_robots)}
        if orbital_cannon:
            entities["Orbital Cannon"] = EntityType(("cooldown",))
            self.action_space = {**self.action_space, "Fire Orbital Cannon": SelectEntity()}
        self.obs_space = ObsSpace(entities)
        self._width, self._height = width, height
        self._num_mines, self._num_robots = num_mines, num_robots
        self._has_cannon, self._cooldown_period = orbital_cannon, cooldown_period
        self._max_steps, self._step, self._cooldown = max_steps, 0, cooldown_period
        self._rng = np.random.default_rng(seed)
        self._mines: list[Cell] = []
        self._robots: list[Cell] = []
        self._masks = {
            (x, y): [y < height - 1, y > 0, x > 0, x < width - 1, True]
            for x in range(width)
            for y in range(height)
        }

    def __str__(self) -> str:
        marks = dict.fromkeys(self._mines, "x")
        for row, cell in enumerate(self._robots):
            marks[cell] = str(row) if row < 10 else "R"
        board = grid(self._width, self._height, marks)
        return f"{board}\ncannon's cooldown: {self._cooldown}" if self._has_cannon else board

    def reset(self) -> Observation:
        """Draws the positions of mines and robots."""
        count = self._num_mines + self._num_robots
        drawn = self._rng.permutation(self._width * self._height)[:count].tolist()
        cells = [(i % self._width, i // self._width) for i in drawn]
        self._mines, self._robots = cells[: self._num_mines], cells[self._num_mines :]
        self._step, self._cooldown = 0, self._cooldown_period
        return self._observe(0.0)

    def act(self, actions: Actions) -> Observation:
        """Fires, then moves and defuses, then removes robots on mines."""
        shot = self._fire(actions) if self._has_cannon else None
        for (_, row), choice in zip(
            actions["Move"].actors, actions["Move"].indices.tolist(), strict=True
        ):
            if row == shot:
                continue
            x, y = self._robots[row]
            if choice == _DEFUSE:
                self._mines = [(a, b) for a, b in self._mines if abs(a - x) + abs(b - y) > 1]
            else:
                dx, dy = _STEPS[choice]
                self._robots[row] = (x + dx, y + dy)
        self._robots = [
            cell for row, cell in enumerate(self._robots) if row != shot and cell not in self._mines
        ]
        self._step += 1
        return self._observe(0.0 if self._mines else 1.0)

    def _fire(self, actions: Actions) -> int | None:
        """Fires the cannon or cools it down; returns the row of the robot that was hit, if any."""
        targets = actions["Fire Orbital Cannon"].actees
        if not targets:
            self._cooldown -= 1
            return None
        self._cooldown = self._cooldown_period
        kind, row = targets[0]
        if kind == "Robot":
            return row
        del self._mines[row]
        return None

    def _observe(self, reward: float) -> Observation:
        mines, robots = self._mines.copy(), self._robots.copy()
        features: dict[str, ArrayLike] = {"Mine": mines, "Robot": robots}
        masks: dict[str, ActionMask] = {}
        if robots:
            legal = [self._masks[cell] for cell in robots]
            masks["Move"] = CategoricalMask(actor_types=("Robot",), mask=legal)
        if self._has_cannon:
            features["Orbital Cannon"] = [(self._cooldown,)]
            if self._cooldown == 0 and (mines or robots):
                masks["Fire Orbital Cannon"] = _FIRE
        ended = not (mines and robots)
        return Observation(
            features=features,
            actions=masks,
            reward=reward,
            done=ended,
            truncated=self._step >= self._max_steps and not ended,
        )
