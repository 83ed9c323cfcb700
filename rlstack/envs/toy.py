"""A small environment with a known answer, for first experiments with memory.

The class is a builder: ``SyncEnv(MemoryCue, 8, options={"delay": 5})``.
"""

from __future__ import annotations

import dm_env
import numpy as np
from dm_env import specs


class Episodic(dm_env.Environment):
    """A dm_env environment that starts an episode in `step` too, before the first and after LAST.

    dm_env requires this. Subclasses implement `_restart` and `_advance`.
    """

    _over = True

    def reset(self) -> dm_env.TimeStep:
        """Starts an episode."""
        self._over = False
        return dm_env.restart(self._restart())

    def step(self, action: int) -> dm_env.TimeStep:
        """Takes an action; starts an episode if none is in progress, and ignores the action."""
        if self._over:
            return self.reset()
        timestep = self._advance(int(action))
        self._over = timestep.last()
        return timestep

    def _restart(self) -> np.ndarray:
        """Returns the first observation of a new episode."""
        raise NotImplementedError

    def _advance(self, action: int) -> dm_env.TimeStep:
        """Returns the next step of the episode."""
        raise NotImplementedError


class MemoryCue(Episodic):
    """Shows a cue once, then no cue for ``delay`` steps, then asks for the cue.

    The right answer scores +1, a wrong one ``-1 / (num_cues - 1)``. The expected score of a policy
    without memory is 0, a policy with memory can score 1. Observation: ``[num_cues + 1]`` float32,
    the cue one-hot on the first step; the last entry is 1 when the answer is due. Earlier actions
    have no effect. An episode has ``delay + 2`` observations before the last.
    """

    def __init__(self, delay: int = 3, num_cues: int = 2, seed: int = 0):
        if delay < 0 or num_cues < 2:
            raise ValueError(
                f"MemoryCue: delay must be at least 0 and num_cues at least 2; got {delay} and "
                f"{num_cues}."
            )
        self._delay, self._num_cues = delay, num_cues
        self._rng = np.random.default_rng(seed)
        self._cue = self._time = 0

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the cue and the flag that asks for the answer."""
        return specs.BoundedArray((self._num_cues + 1,), np.float32, 0.0, 1.0, "cue")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the answer."""
        return specs.DiscreteArray(self._num_cues, np.int32, "answer")

    def _restart(self) -> np.ndarray:
        """Starts an episode with a random cue."""
        self._cue, self._time = int(self._rng.integers(self._num_cues)), 0
        return self._show(self._cue)

    def _advance(self, action: int) -> dm_env.TimeStep:
        """Waits, asks, or scores the answer."""
        self._time += 1
        if self._time <= self._delay:
            return dm_env.transition(0.0, self._show(None))
        if self._time == self._delay + 1:
            return dm_env.transition(0.0, self._show(self._num_cues))
        right = action == self._cue
        return dm_env.termination(1.0 if right else -1.0 / (self._num_cues - 1), self._show(None))

    def _show(self, entry: int | None) -> np.ndarray:
        observation = np.zeros(self._num_cues + 1, np.float32)
        if entry is not None:
            observation[entry] = 1.0
        return observation
