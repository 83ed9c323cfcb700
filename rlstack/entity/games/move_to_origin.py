"""MoveToOrigin: fly a spaceship with two thrusters to the origin."""

from __future__ import annotations

import math

import numpy as np

from rlstack.entity.environment import Actions, CategoricalMask, Observation, grid
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, Categorical, EntityType, ObsSpace

_THRUST = (0.01, 0.001, 0.0, -0.001, -0.01)
_ACTIONS = {
    "horizontal_thruster": CategoricalMask(actor_types=("Spaceship",)),
    "vertical_thruster": CategoricalMask(actor_types=("Spaceship",)),
}


class MoveToOrigin:
    """A spaceship starts at rest at a random point of the unit circle.

    Observation: the Spaceship (x, y, x_velocity, y_velocity, step). Actions: one for each axis; it
    adds 0.01, 0.001, 0, -0.001 or -0.01 to the velocity, which is then added to the position.
    Reward: the decrease of the distance to the origin, so that the return is 1 minus the final
    distance. End: after ``num_steps``. Best return: about 1; a scripted policy that brakes in time:
    0.999; random policy: -0.256.
    """

    def __init__(self, num_steps: int = 32, seed: int = 0):
        require_in_range("MoveToOrigin", num_steps=(num_steps, 1))
        self.obs_space = ObsSpace(
            {"Spaceship": EntityType(("x", "y", "x_velocity", "y_velocity", "step"))}
        )
        self.action_space: ActionSpace = {
            "horizontal_thruster": Categorical(
                ("right", "slow right", "hold", "slow left", "left")
            ),
            "vertical_thruster": Categorical(("up", "slow up", "hold", "slow down", "down")),
        }
        self._num_steps, self._step = num_steps, 0
        self._rng = np.random.default_rng(seed)
        self._x = self._y = self._dx = self._dy = 0.0

    def __str__(self) -> str:
        def cell(value: float) -> int:
            return min(20, max(0, round(10 * value + 10)))

        marks = {(10, 10): "+", (cell(self._x), cell(self._y)): "A"}
        return grid(21, 21, marks)

    def reset(self) -> Observation:
        """Draws a point of the unit circle."""
        angle = self._rng.random() * 2 * math.pi
        self._x, self._y = math.cos(angle), math.sin(angle)
        self._dx = self._dy = 0.0
        self._step = 0
        return self._observe(0.0)

    def act(self, actions: Actions) -> Observation:
        """Thrusts, then moves."""
        before = math.hypot(self._x, self._y)
        self._dx += _THRUST[actions["horizontal_thruster"].indices[0]]
        self._dy += _THRUST[actions["vertical_thruster"].indices[0]]
        self._x += self._dx
        self._y += self._dy
        self._step += 1
        return self._observe(before - math.hypot(self._x, self._y))

    def _observe(self, reward: float) -> Observation:
        return Observation(
            features={"Spaceship": [(self._x, self._y, self._dx, self._dy, self._step)]},
            actions=_ACTIONS,
            reward=reward,
            done=self._step >= self._num_steps,
        )
