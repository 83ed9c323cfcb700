"""A game with rewards that show which action each seat received."""

import numpy as np
from dm_env import specs

from rlstack.envs.seats.game import GameStep, Seats


class Echo:
    """Rewards are 10 * seat + action; observations are (seat, time, seed of the game)."""

    seats = ("left", "right")
    observation_spec = specs.Array((3,), np.float32)
    action_spec = specs.DiscreteArray(10, np.int32)

    def __init__(self, length=2, seed=0):
        self._length, self._seed, self._time = length, seed, 0

    def reset(self):
        self._time = 0
        return self._observe()

    def step(self, actions):
        self._time += 1
        last = self._time >= self._length
        return GameStep(
            self._observe(),
            [10.0 * seat + float(action) for seat, action in enumerate(actions)],
            [0.0 if last else 1.0] * 2,
            last,
            [{"of_seat": float(seat)} for seat in range(2)],
        )

    def _observe(self):
        return [np.array([seat, self._time, self._seed], np.float32) for seat in range(2)]


class Unequal(Echo):
    """The right seat's future ends a step before the game."""

    def step(self, actions):
        step = super().step(actions)
        return step._replace(discounts=[step.discounts[0], 0.0])


EchoSeats = Seats(Echo)
UnequalSeats = Seats(Unequal)
