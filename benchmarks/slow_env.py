"""An environment that sleeps in each step, 10 ms by default, for programs of many actors."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_LENGTH = 1000


class Slow(gymnasium.Env):
    """An environment whose step sleeps; it records its first step in a file.

    Observation: ``[2]`` float32, seed and step. Reward 1; terminates after 1000 steps.
    """

    def __init__(self, started: str, seconds: float = 0.01, seed: int = 0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._seed, self._time, self._seconds = seed, 0, seconds
        self._started: str | None = started

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self._time = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleeps."""
        del action
        if self._started is not None:
            with open(self._started, "a") as file:
                file.write(f"{os.getpid()}\n")
            self._started = None
        self._time += 1
        time.sleep(self._seconds)
        return self._observation(), 1.0, self._time >= _LENGTH, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._seed, self._time], np.float32)
