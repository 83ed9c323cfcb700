"""An environment that takes its time, for programs of many actors."""

from __future__ import annotations

import os
from typing import Any

from rlstack.envs.faulty import Faulty


class Slow(Faulty):
    """An environment whose step sleeps 10 ms; its first one is noted in a file."""

    def __init__(self, started: str, seed: int = 0) -> None:
        super().__init__("sleep", length=1000, seconds=0.01, seed=seed)
        self._started: str | None = started

    def step(self, action: int) -> Any:
        """Sleeps."""
        if self._started is not None:
            with open(self._started, "a") as file:
                file.write(f"{os.getpid()}\n")
            self._started = None
        return super().step(action)
