"""Games for the tests; run as a program, this module plays one of them over a socket."""

import os
import sys
import time

import numpy as np

from rlstack.entity import Categorical, CategoricalMask, EntityType, ObsSpace
from rlstack.entity.games.count import Count
from rlstack.entity.games.mine_sweeper import MineSweeper
from rlstack.entity.inverted import EnvironmentGame, ScoredObservation, act_all

OBS = ObsSpace({"Me": EntityType(("agent", "tick"))}, ("total",))
ACTIONS = {"bid": Categorical(("0", "1", "2"))}
OFFER = {"bid": CategoricalMask(actor_types=("Me",))}


def mine_sweeper(seed=0):
    return EnvironmentGame(MineSweeper(seed=seed))


def count(seed=0):
    return EnvironmentGame(Count(seed=seed))


class Bidding:
    """Agents bid for 4 ticks; the score is what an agent has bid so far, agent 1's doubled.

    how: "all" asks all at once, "each" one after the other, "sparse" asks agent 1 on even ticks.
    costs: whether observations have the metric ``cost``.
    """

    obs_space, action_space = OBS, ACTIONS

    def __init__(self, how="all", num_agents=2, fail="", costs=""):
        self.how, self.num_agents, self.fail, self.costs = how, num_agents, fail, costs

    def see(self, i, tick, scores, **more):
        cost = {"cost": 10.0 * tick + i} if self.costs else {}
        more = {"metrics": cost, **more}
        return ScoredObservation({"Me": [(i, tick)]}, OFFER, [sum(scores)], score=scores[i], **more)

    def play(self, agents):
        self.num_agents = len(agents)
        while True:
            scores = [0.0] * self.num_agents
            for tick in range(4):
                seen = [self.see(i, tick, scores) for i in range(self.num_agents)]
                if self.how == "sparse" and tick % 2:
                    seen[1] = None
                if self.how == "each":
                    answers = []
                    for agent, observation in zip(agents, seen, strict=True):
                        answers.append(agent.act(observation))
                        if answers[-1] is None:
                            return
                else:
                    answers = act_all(agents, seen)
                    if answers is None:
                        return
                if self.fail == "raise" and tick == 2:
                    raise KeyError("lost my marbles")
                if self.fail == "return" and tick == 2:
                    return
                if self.fail == "hang" and tick == 2:
                    time.sleep(1.0)
                if self.fail == "die" and tick == 2:
                    os._exit(3)
                for i, answer in enumerate(answers):
                    if answer is not None:
                        scores[i] += float(np.sum(answer["bid"].indices)) * (i + 1)
            for i, agent in enumerate(agents):
                agent.game_over(self.see(i, 4, scores, truncated=i == 1))


if __name__ == "__main__":
    from rlstack.entity.inverted.client import run

    name, agents, *options = sys.argv[1:]
    run(globals()[name], int(agents), **dict(option.split("=") for option in options))
