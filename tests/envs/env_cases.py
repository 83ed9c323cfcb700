"""Scripted environments for the contract suite, as gymnasium and as dm_env."""

from __future__ import annotations

import dm_env
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces


class Script:
    """Cycles through episode ends: terminated after 3, truncated after 2, both after 4."""

    ENDS = ((3, True, False), (2, False, True), (4, True, True))

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.seed, self.episode, self.time = seed, -1, 0

    def reset(self):
        self.episode, self.time = self.episode + 1, 0
        return self.observe()

    def step(self, action):
        self.time += 1
        length, terminated, truncated = self.ENDS[self.episode % 3]
        over = self.time == length
        reward = 10.0 * self.time + int(action)
        return self.observe(), reward, over and terminated, over and truncated

    def observe(self):
        return np.array([self.seed, self.episode, self.time, self.rng.random()])  # float64


class ScriptGym(gymnasium.Env):
    def __init__(self):
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = spaces.Discrete(3, start=0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.script = Script(seed)
        return self.script.reset(), {}

    def step(self, action):
        return (*self.script.step(action), {})


class ScriptNumpyGym(ScriptGym):
    """Its flags are numpy's, as comparisons of arrays give them; its reward is a scalar array."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.float32(reward), np.bool_(terminated), np.bool_(truncated), info


class ScriptDm(dm_env.Environment):
    def __init__(self, seed: int):
        self.script = Script(seed)

    def observation_spec(self):
        return specs.Array((4,), np.float64)

    def action_spec(self):
        return specs.DiscreteArray(3)

    def reset(self):
        return dm_env.restart(self.script.reset())

    def step(self, action):
        observation, reward, terminated, truncated = self.script.step(action)
        if terminated:
            return dm_env.termination(reward, observation)
        if truncated:
            return dm_env.truncation(reward, observation)
        return dm_env.transition(reward, observation)


class Nested(gymnasium.Env):
    """Has dict and tuple spaces and discrete ones that do not start at 0; echoes its action."""

    def __init__(self):
        box = spaces.Box(np.array([-1.0, -2.0]), np.array([1.0, 2.0]), dtype=np.float64)
        self.action_space = spaces.Dict(
            {
                "pick": spaces.Discrete(3, start=5),
                "move": box,
                "many": spaces.MultiDiscrete([2, 3], start=[1, 10]),
            }
        )
        self.observation_space = spaces.Tuple(
            (
                spaces.Discrete(3, start=5),
                spaces.Dict({"move": box, "many": spaces.MultiDiscrete([2, 3], start=[1, 10])}),
                spaces.MultiBinary(2),
            )
        )

    def reset(self, *, seed=None, options=None):
        return self._see(5, np.zeros(2), np.array([1, 10])), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self._see(action["pick"], action["move"], action["many"]), 1.0, False, False, {}

    def _see(self, pick, move, many):
        return (pick, {"move": move, "many": many}, np.array([1, 0], np.int8))
