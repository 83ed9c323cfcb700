"""Environments that start episodes by number; worker processes import them, so without JAX."""

import dm_env
import gymnasium
import numpy as np
from dm_env import specs


class Numbered(gymnasium.Env):
    """Shows the number of its episode, -1 for one without, and ends after as many steps plus 1."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self._start(-1)

    def reset_with_index(self, index):
        return self._start(index)

    def _start(self, index):
        self._observation, self._left = np.full(1, index, np.float32), max(index, 0) + 1
        return self._observation, {}

    def step(self, action):
        self._left -= 1
        return self._observation, 1.0, not self._left, False, {}


class NumberedDm(dm_env.Environment):
    def __init__(self, seed=0):
        pass

    def observation_spec(self):
        return specs.Array((1,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(2)

    def reset(self):
        return dm_env.restart(np.full(1, -1, np.float32))

    def reset_with_index(self, index):
        return dm_env.restart(np.full(1, index, np.float32))

    def step(self, action):
        return dm_env.termination(1.0, np.zeros(1, np.float32))
