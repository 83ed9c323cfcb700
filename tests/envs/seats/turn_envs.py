"""An environment whose agents act in turn as PettingZoo has them, without PettingZoo."""

import numpy as np
from gymnasium import spaces


class Bidding:
    """Agents bid in turn: a bid is the bidder's reward, and the next agents each lose it.

    With ``leaves``, agent c is terminated by the second bid of a, with a reward of 100. The game
    is over after ``bids`` bids: terminated, or truncated with ``limit``.
    """

    possible_agents = ("a", "b", "c")

    def __init__(self, agents=2, bids=4, leaves=False, limit=False):
        self.possible_agents = self.possible_agents[:agents]
        self._bids, self._leaves, self._limit = bids, leaves, limit
        self.seeds = []

    def observation_space(self, agent):
        seen = {"observation": spaces.Box(0, 99, (2,), np.float32)}
        return spaces.Dict({**seen, "action_mask": spaces.Box(0, 1, (10,), np.int8)})

    def action_space(self, agent):
        return spaces.Discrete(10)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.agents, self._made, self._of_a = list(self.possible_agents), 0, 0
        self._rewards = dict.fromkeys(self.agents, 0.0)  # since each agent's last action
        self._over, self._gone = False, set()
        self.agent_selection = "a"

    def observe(self, agent):
        mask = np.zeros(10, np.int8)
        if agent == self.agent_selection and not self._over:
            mask[:] = 1
        number = self.possible_agents.index(agent)
        return {"observation": np.array([number, self._made], np.float32), "action_mask": mask}

    def last(self):
        agent = self.agent_selection
        ended = self._over or agent in self._gone
        truncated = ended and self._limit and agent not in self._gone
        info = {"bids": self._made}
        return self.observe(agent), self._rewards[agent], ended and not truncated, truncated, info

    def step(self, action):
        agent = self.agent_selection
        if action is None:
            assert self._over or agent in self._gone
            self.agents.remove(agent)
        else:
            assert self.action_space(agent).contains(action)
            self._bid(agent, float(action))
        if self.agents:
            waiting = [other for other in self.agents if other in self._gone or self._over]
            self.agent_selection = waiting[0] if waiting else self._after(self._bidder)

    def _after(self, agent):
        order = self.possible_agents
        at = order.index(agent)
        return next(x for x in [*order[at + 1 :], *order] if x in self.agents)

    def _bid(self, agent, amount):
        self._made += 1
        self._bidder = agent
        self._rewards[agent] = 0.0
        for other in self.agents:
            self._rewards[other] += amount if other == agent else -amount
        self._of_a += agent == "a"
        if self._leaves and agent == "a" and self._of_a == 2:
            self._gone.add("c")
            self._rewards["c"] += 100.0
        self._over = self._made >= self._bids

    def close(self):
        self.agents = []


class Joining(Bidding):
    """Agent c joins after the second bid, and takes its turn after b; before, it is unknown."""

    def __init__(self, bids=5):
        super().__init__(agents=3, bids=bids)

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.agents = ["a", "b"]

    def observe(self, agent):
        if agent not in self.agents:
            raise KeyError(agent)
        return super().observe(agent)

    def _bid(self, agent, amount):
        super()._bid(agent, amount)
        if self._made == 2:
            self.agents.append("c")
