"""Rock, paper, scissors between two seats: a game whose equilibrium is mixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dm_env import specs

from rlstack.envs.seats.protocol import GameStep


class RockPaperScissors:
    """Two seats throw at the same time; the loser pays the winner.

    A win by rock pays ``rock``, any other win 1. Observation: ``[1]`` float32, always 1. Action: 0
    rock, 1 paper, 2 scissors. Reward: what is paid. An episode is one throw. Both seats are alike.

    The only equilibrium is to throw rock, paper and scissors with the probabilities 1, ``rock`` and
    1, divided by their sum; its value is 0.
    """

    seats = ("first", "second")
    action_names = ("rock", "paper", "scissors")

    def __init__(self, rock: float = 1.0):
        if not rock > 0:
            raise ValueError(f"RockPaperScissors: rock must be positive; got {rock}.")
        self.observation_spec = specs.BoundedArray((1,), np.float32, 1.0, 1.0, "constant")
        self.action_spec = specs.DiscreteArray(3, np.int32, "throw")
        self._payoffs = payoffs(rock)
        self._thrown: list[int] = []

    def __str__(self) -> str:
        """Returns what was thrown."""
        return " against ".join(self.action_names[throw] for throw in self._thrown) or "not thrown"

    def reset(self) -> list[np.ndarray]:
        """Starts a game. Both seats observe that nothing has been thrown."""
        self._thrown = []
        return self._observe()

    def step(self, actions: Sequence[np.ndarray]) -> GameStep:
        """Pays the winner."""
        self._thrown = [int(action) for action in actions]
        reward = float(self._payoffs[self._thrown[0], self._thrown[1]])
        return GameStep(self._observe(), [reward, -reward], [0.0, 0.0], last=True)

    def _observe(self) -> list[np.ndarray]:
        return [np.ones(1, np.float32), np.ones(1, np.float32)]


def payoffs(rock: float = 1.0) -> np.ndarray:
    """Returns what the first throw (rows) wins against the second (columns), ``[3, 3]``."""
    return np.array([[0.0, -1.0, rock], [1.0, 0.0, -1.0], [-rock, 1.0, 0.0]])


def equilibrium(rock: float = 1.0) -> np.ndarray:
    """Returns the probabilities of rock, paper and scissors in equilibrium, ``[3]``."""
    weights = np.array([1.0, rock, 1.0])
    return weights / weights.sum()


def exploitability(probabilities: np.ndarray, rock: float = 1.0) -> float:
    """Returns what the best answer to a mixed policy wins on average; 0 in equilibrium.

    The game is symmetric with value 0, so this is the exploitability of a pair of equal policies,
    divided by two (NashConv / 2).

    Args:
      probabilities: the probabilities of rock, paper and scissors, ``[3]``.
      rock: the payoff of a win by rock.
    """
    return float((payoffs(rock) @ np.asarray(probabilities, np.float64)).max())
