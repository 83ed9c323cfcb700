"""Parallel environments as PettingZoo has them, without PettingZoo."""

import numpy as np
from gymnasium import spaces


class Dying:
    """Agent i is rewarded with its action and dies in step i + 1; the last one is truncated."""

    possible_agents = ("a", "b", "c")

    def __init__(self, wide=False):
        self.agents, self._time, self.seeds, self._wide = [], 0, [], wide

    def observation_space(self, agent):
        return spaces.Box(0.0, 9.0, (2,) if self._wide and agent == "b" else (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(4, start=1)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.agents, self._time = list(self.possible_agents), 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        assert all(self.action_space(agent).contains(action) for agent, action in actions.items())
        self._time += 1
        playing, dead = self.agents, self.possible_agents[self._time - 1]
        found = (
            self._observe(),
            {agent: float(actions[agent]) for agent in playing},
            {agent: agent == dead and dead != "c" for agent in playing},
            {agent: agent == dead == "c" for agent in playing},
            {agent: {"time": self._time} for agent in playing},
        )
        self.agents = [agent for agent in playing if agent != dead]
        return found

    def _observe(self):
        return {agent: np.full(1, self._time + 1, np.float32) for agent in self.agents}

    def close(self):
        self.agents = []


class Joining(Dying):
    """Agent c joins in the second step; all are truncated after the third."""

    def reset(self, seed=None, options=None):
        self.agents, self._time = ["a", "b"], 0
        return self._observe(), {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self._time += 1
        playing, over = self.agents, self._time == 3
        self.agents = list(self.possible_agents) if self._time >= 2 else playing
        rewards = {agent: float(actions[agent]) for agent in playing}
        ends = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, over)
        found = self._observe(), rewards, *ends, {}
        self.agents = [] if over else self.agents
        return found


class Surveyed(Dying):
    """Has a state: the time."""

    state_space = spaces.Box(0.0, 9.0, (1,), np.float32)

    def state(self):
        return np.full(1, self._time, np.float32)
