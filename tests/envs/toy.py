"""Small environments with known answers, for tests.

Every class here is a builder: ``SyncEnv(Catch, 8)`` or ``SyncEnv(Catch, 8, options={"rows": 5})``.
"""

from __future__ import annotations

import dm_env
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces

from rlstack.envs.toy import Episodic, MemoryCue

__all__ = [
    "Catch",
    "MaskedDict",
    "MemoryCue",
    "MultiDiscrete",
    "PointMass",
    "TruncatingChain",
]


class Catch(Episodic):
    """A ball falls one row per step; a paddle in the last row moves left, stays or moves right.

    It follows the Catch of bsuite and DeepMind. The reward at the end is +1 for a catch and -1 for
    a miss; the best policy scores 1. Observation: ``[rows, columns]`` float32, 1 at ball and
    paddle.
    """

    def __init__(self, rows: int = 10, columns: int = 5, seed: int = 0):
        if rows < 2 or columns < 1:
            raise ValueError(
                f"Catch: rows must be at least 2 and columns at least 1; got {rows} and {columns}."
            )
        self._rows, self._columns = rows, columns
        self._rng = np.random.default_rng(seed)
        self._ball, self._paddle = (0, 0), 0

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the board."""
        return specs.BoundedArray((self._rows, self._columns), np.float32, 0.0, 1.0, "board")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the three moves: left, stay, right."""
        return specs.DiscreteArray(3, np.int32, "move")

    def _restart(self) -> np.ndarray:
        """Drops a ball from a random column."""
        self._ball = (0, int(self._rng.integers(self._columns)))
        self._paddle = self._columns // 2
        return self._board()

    def _advance(self, action: int) -> dm_env.TimeStep:
        """Moves the paddle, then lets the ball fall by one row."""
        self._paddle = min(max(self._paddle + action - 1, 0), self._columns - 1)
        row, column = self._ball[0] + 1, self._ball[1]
        self._ball = (row, column)
        if row < self._rows - 1:
            return dm_env.transition(0.0, self._board())
        return dm_env.termination(1.0 if column == self._paddle else -1.0, self._board())

    def _board(self) -> np.ndarray:
        board = np.zeros((self._rows, self._columns), np.float32)
        board[self._ball] = 1.0
        board[self._rows - 1, self._paddle] = 1.0
        return board


class TruncatingChain(Episodic):
    """Gives reward 1 at every step until a time limit of ``length`` steps truncates the episode.

    The observation is always ``[1.0]``, independent of time. So the only consistent value is
    ``1 / (1 - discount)``. An agent that treats the truncation as a termination learns a lower
    value.
    """

    def __init__(self, length: int = 10):
        if length < 1:
            raise ValueError(f"TruncatingChain: length must be at least 1; got {length}.")
        self._length, self._time = length, 0

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of a constant."""
        return specs.BoundedArray((1,), np.float32, 0.0, 1.0, "constant")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of two actions without effect."""
        return specs.DiscreteArray(2, np.int32, "ignored")

    def _restart(self) -> np.ndarray:
        """Starts counting steps."""
        self._time = 0
        return np.ones(1, np.float32)

    def _advance(self, action: int) -> dm_env.TimeStep:
        """Gives reward 1."""
        del action
        self._time += 1
        observation = np.ones(1, np.float32)
        if self._time < self._length:
            return dm_env.transition(1.0, observation)
        return dm_env.truncation(1.0, observation)


class PointMass(gymnasium.Env):
    """A point in the square [-1, 1]^2 moves by ``0.1 * action`` and should reach the origin.

    The reward is minus the distance to the origin after the move; truncated after ``length`` steps.
    Observation: position, ``[2]`` float32. Action: ``[2]`` float32 in [-1, 1].
    """

    def __init__(self, length: int = 20):
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._length, self._time = length, 0
        self._position = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Draws a random position."""
        super().reset(seed=seed)
        self._time = 0
        self._position = self.np_random.uniform(-1.0, 1.0, 2)
        return self._position.astype(np.float32), {}

    def step(self, action: np.ndarray):
        """Moves the point."""
        self._time += 1
        self._position = np.clip(self._position + 0.1 * np.clip(action, -1.0, 1.0), -1.0, 1.0)
        reward = -float(np.linalg.norm(self._position))
        done = self._time >= self._length
        return self._position.astype(np.float32), reward, False, done, {}


class MaskedDict(gymnasium.Env):
    """Shows a target action; at each step some other actions are illegal.

    Observation: a dict of ``target``, one-hot ``[num_actions]`` float32 over the legal actions,
    and ``action_mask``, ``[num_actions]`` int8, 1 where an action is legal. The target scores 1,
    another legal action 0. An illegal one scores -1, or raises with ``strict``.
    """

    def __init__(self, num_actions: int = 4, length: int = 8, strict: bool = False):
        if num_actions < 2:
            raise ValueError(f"MaskedDict: num_actions must be at least 2; got {num_actions}.")
        self.observation_space = spaces.Dict(
            {
                "target": spaces.Box(0.0, 1.0, (num_actions,), np.float32),
                "action_mask": spaces.Box(0, 1, (num_actions,), np.int8),
            }
        )
        self.action_space = spaces.Discrete(num_actions)
        self._num_actions, self._length, self._strict = num_actions, length, strict
        self._time = self._target = 0
        self._mask = np.ones(num_actions, np.int8)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Draws the first mask and target."""
        super().reset(seed=seed)
        self._time = 0
        return self._draw(), {}

    def step(self, action: int):
        """Scores the action and draws the next mask and target."""
        legal = bool(self._mask[action])
        if self._strict and not legal:
            raise ValueError(f"MaskedDict: action {action} is illegal under mask {self._mask}.")
        reward = float(action == self._target) if legal else -1.0
        self._time += 1
        return self._draw(), reward, self._time >= self._length, False, {}

    def _draw(self) -> dict[str, np.ndarray]:
        self._target = int(self.np_random.integers(self._num_actions))
        self._mask = self.np_random.integers(0, 2, self._num_actions).astype(np.int8)
        self._mask[self._target] = 1
        target = np.zeros(self._num_actions, np.float32)
        target[self._target] = 1.0
        return {"target": target, "action_mask": self._mask.copy()}


class MultiDiscrete(gymnasium.Env):
    """Shows several numbers; the reward is the fraction of them that the action repeats.

    Observation: the numbers divided by the sizes of their ranges, ``[k]`` float32. Steps are
    independent. An episode terminates after ``length`` steps.
    """

    def __init__(self, sizes: tuple[int, ...] = (3, 2, 4), length: int = 5):
        self.observation_space = spaces.Box(0.0, 1.0, (len(sizes),), np.float32)
        self.action_space = spaces.MultiDiscrete(np.asarray(sizes))
        self._sizes = np.asarray(sizes)
        self._length, self._time = length, 0
        self._numbers = np.zeros(len(sizes), np.int64)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Draws the first numbers."""
        super().reset(seed=seed)
        self._time = 0
        return self._draw(), {}

    def step(self, action: np.ndarray):
        """Scores the action and draws the next numbers."""
        reward = float(np.mean(action == self._numbers))
        self._time += 1
        return self._draw(), reward, self._time >= self._length, False, {}

    def _draw(self) -> np.ndarray:
        self._numbers = self.np_random.integers(0, self._sizes)
        return (self._numbers / self._sizes).astype(np.float32)
