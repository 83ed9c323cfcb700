"""Environments with levels; worker processes import them, so without JAX."""

import gymnasium
import numpy as np

LEVELS = 6


class Seeded(gymnasium.Env):
    """A level is a seed: an episode shows and pays in each of its two steps what the seed draws."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._start(self.np_random.random())

    def _start(self, value):
        self._value, self._left = np.full(1, value, np.float32), 2
        return self._value, {}

    def step(self, action):
        assert action in (0, 1)
        self._left -= 1
        return self._value, float(self._value[0]), not self._left, False, {}


class Numbered(Seeded):
    """A level is a number, which the episode shows and pays as a share of all levels."""

    def reset_with_index(self, index):
        return self._start(index / LEVELS)


def shown(level):
    """What an episode of `Seeded` shows."""
    return np.float32(np.random.default_rng(level).random())
