"""An environment that gives numbers with its steps, for tests of what reaches the logs."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Informing(gymnasium.Env):
    """Counts episodes and steps; with seed s, episodes end by turns after 2 and after 3 + s % 2.

    Only the info of the last step of an episode has a ``score``, 100 * seed + the number of the
    episode. Every second episode, from the second on, has a ``bonus`` of 7.
    """

    def __init__(self, crash: bool = False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._episode, self._crash = -1, crash

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._seed = seed
        self._episode, self._time = self._episode + 1, 0
        return self._observation(), {"score": -1.0}

    def step(self, action):
        self._time += 1
        if self._crash and self._episode == 1:
            raise ArithmeticError("told to fail")
        over = self._time == (3 + self._seed % 2 if self._episode % 2 else 2)
        return self._observation(), 1.0, over, False, self._info(over)

    def _observation(self):
        return np.array([self._time], np.float32)

    def _info(self, over):
        info = {
            "won": np.bool_(self._episode % 2),
            "steps": {"made": np.float32(self._time)},
            "text": "not a number",
            "array": np.zeros(3),
            "nan": float("nan"),
            "huge": 10**400,
            "object": object(),
        }
        if over:
            info["score"] = 100 * self._seed + self._episode
            info |= {"bonus": np.array(7)} if self._episode % 2 else {}
        return info


class Strange(Informing):
    """Gives None where Gymnasium requires a dict."""

    def _info(self, over):
        return None


class Verbose(Informing):
    """Gives more numbers than one read of a socket takes."""

    def _info(self, over):
        return {f"number {i}": i for i in range(25_000)}
