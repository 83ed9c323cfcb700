"""Minefield: drive a vehicle to a target and avoid the mines."""

from __future__ import annotations

import math

import numpy as np

from rlstack.entity.environment import Actions, CategoricalMask, Observation, grid
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace

HALF_SIDE = 100.0
TOUCH = 5.0
SPEED = 3.0
TURN = math.pi / 8
_APART = 15.0
_STEER = {"steer": CategoricalMask(actor_types=("Vehicle",))}
_ARROWS = ">/^\\</v\\"  # by heading in eighths of a turn, from +x


class Minefield:
    """A vehicle drives in a square with coordinates from -100 to 100.

    Observation: the Vehicle (x, y, heading, step; the heading in radians from +x towards +y), the
    Target (x, y) and the Mines (x, y). Positions and heading are uniform; of ``max_mines`` drawn
    Mines those closer than 15 to anything else are left out. Action: the Vehicle's ``steer`` turns
    right by pi/8, drives forward by 3, or turns left by pi/8. Reward: 1 within 5 of the Target.
    End: then, or within 5 of a Mine, or after ``num_steps``; the first observation may be the last.
    Best return: about 1, reached by a scripted policy that steers around mines, in 45 steps;
    driving straight at the target: 0.839; random policy: 0.028.
    """

    def __init__(self, max_mines: int = 10, num_steps: int = 200, seed: int = 0):
        require_in_range("Minefield", max_mines=(max_mines, 0), num_steps=(num_steps, 1))
        self.obs_space = ObsSpace(
            {
                "Vehicle": EntityType(("x", "y", "heading", "step")),
                "Target": EntityType(("x", "y")),
                "Mine": EntityType(("x", "y"), capacity=max(1, max_mines)),
            }
        )
        self.action_space: ActionSpace = {"steer": Categorical(("right", "forward", "left"))}
        self._max_mines, self._num_steps, self._step = max_mines, num_steps, 0
        self._rng = np.random.default_rng(seed)
        self._x = self._y = self._heading = 0.0
        self._target = (0.0, 0.0)
        self._mines: list[tuple[float, float]] = []

    def __str__(self) -> str:
        def cell(x: float, y: float) -> tuple[int, int]:
            return round(x / 5) + 20, round(y / 5) + 20

        marks = {cell(*mine): "x" for mine in self._mines}
        marks[cell(*self._target)] = "$"
        arrow = _ARROWS[round(self._heading / (math.pi / 4)) % 8]
        return grid(41, 41, {**marks, cell(self._x, self._y): arrow})

    def reset(self) -> Observation:
        """Draws the positions and the heading."""
        drawn = self._rng.uniform(-HALF_SIDE, HALF_SIDE, (2 + self._max_mines, 2)).tolist()
        self._x, self._y = drawn[0]
        self._target = (drawn[1][0], drawn[1][1])
        self._heading = self._rng.random() * 2 * math.pi
        self._step = 0
        placed = drawn[:2]
        for x, y in drawn[2:]:
            if all(math.hypot(x - a, y - b) >= _APART for a, b in placed):
                placed.append([x, y])
        self._mines = [(x, y) for x, y in placed[2:]]
        return self._observe()

    def act(self, actions: Actions) -> Observation:
        """Turns or drives forward."""
        choice = actions["steer"].indices[0]
        if choice == 1:
            self._x += SPEED * math.cos(self._heading)
            self._y += SPEED * math.sin(self._heading)
        else:
            self._heading += TURN if choice else -TURN
        self._step += 1
        return self._observe()

    def _observe(self) -> Observation:
        x, y = self._x, self._y
        near = TOUCH**2
        arrived = (x - self._target[0]) ** 2 + (y - self._target[1]) ** 2 <= near
        failed = self._step >= self._num_steps or any(
            (x - a) ** 2 + (y - b) ** 2 <= near for a, b in self._mines
        )
        return Observation(
            features={
                "Vehicle": [(x, y, self._heading, self._step)],
                "Target": [self._target],
                "Mine": self._mines,
            },
            actions=_STEER,
            reward=float(arrived),
            done=arrived or failed,
        )
