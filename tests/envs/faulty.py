"""An environment that fails on command, for tests of pools and programs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Faulty(gymnasium.Env):
    """Fails on command: environment ``env`` at step ``at``.

    ``fault`` is one of ``raise``, ``vary`` (raises another text each time), ``leave`` (the process
    ends with exit code 0), ``hang``, ``kill``, ``sleep`` (for ``seconds``, each step),
    ``nan``, ``shape``, ``dtype``, ``reward`` and ``four`` (values from step), or ``none``.
    With ``flag``, a path, the fault happens only while that file does not exist, and creates it.
    Observation: ``[2]`` float32, seed and step. Reward 1; terminates after ``length`` steps.
    """

    def __init__(
        self,
        fault: str = "none",
        at: int = 3,
        env: int | None = None,
        length: int = 10,
        seconds: float = 0.01,
        flag: str | None = None,
        seed: int = 0,
    ):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._fault = fault if env is None or env == seed else "none"
        self._at, self._length, self._seconds, self._flag = at, length, seconds, flag
        self._seed, self._time = seed, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Starts an episode."""
        super().reset(seed=seed)
        self._time = 0
        return self._observation(), {}

    def _observation(self) -> np.ndarray:
        return np.array([self._seed, self._time], np.float32)

    def step(self, action: int) -> Any:
        """Steps, or fails as configured."""
        del action
        self._time += 1
        fault = self._fault if self._time == self._at or self._fault == "sleep" else "none"
        if fault != "none" and self._flag is not None:
            if os.path.exists(self._flag):
                fault = "none"
            else:
                with open(self._flag, "x"):
                    pass
        if fault == "raise":
            raise ArithmeticError("told to fail")
        if fault == "vary":
            raise ArithmeticError(f"told to fail at {time.monotonic_ns()}")
        if fault == "leave":
            raise SystemExit(0)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in ("hang", "sleep"):
            time.sleep(3600.0 if fault == "hang" else self._seconds)
        reward: Any = {"nan": float("nan"), "reward": [1.0, 2.0]}.get(fault, 1.0)
        observation = self._observation()
        if fault == "shape":
            observation = observation[:1]
        elif fault == "dtype":
            observation = observation.astype(complex)
        done = self._time >= self._length
        if fault == "four":
            return observation, reward, done, {}
        return observation, reward, done, False, {}
