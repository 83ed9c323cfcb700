"""Partially observed environments, in which a good policy needs memory.

A function of this module is a builder:
``SyncEnv("rlstack.envs.partial:cartpole_without_velocities", 8)``.
"""

from __future__ import annotations

import math

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["cartpole_without_velocities"]

# Barto, Sutton and Anderson (1983), with the constants of Gymnasium's CartPole-v1.
_GRAVITY, _FORCE, _SECONDS = 9.8, 10.0, 0.02
_POLE_MASS, _TOTAL_MASS = 0.1, 1.1
_HALF_LENGTH = 0.5
_POLE_MOMENT = _POLE_MASS * _HALF_LENGTH
_X_LIMIT, _ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360
_START = 0.05  # each number of the first state is uniform in [-_START, _START]


def cartpole_without_velocities(length: int = 500) -> gymnasium.Env:
    """Builds CartPole-v1 with only the cart's position and the pole's angle in the observation.

    The task of Wierstra et al. (2007), "Solving deep memory POMDPs with recurrent policy
    gradients", with the dynamics and initial states of Gymnasium's CartPole-v1: the same seed and
    actions give the same states. The reward is 1 per step. An episode terminates when the cart
    leaves the track or the pole falls, and is truncated after ``length`` steps.

    Args:
      length: the time limit, in steps.

    Returns:
      An environment of observations ``[2]`` float32 (position, angle) and two actions (push to the
      left, to the right).

    Raises:
      ValueError: length is less than 1.
    """
    return _CartPole(length)


class _CartPole(gymnasium.Env):
    """CartPole with plain Python floats, which are several times faster than arrays of size 4."""

    def __init__(self, length: int):
        if length < 1:
            raise ValueError(
                f"cartpole_without_velocities: length must be at least 1; got {length}."
            )
        high = np.array([2 * _X_LIMIT, 2 * _ANGLE_LIMIT], np.float32)
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._time = length, 0
        self._state = (0.0, 0.0, 0.0, 0.0)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Draws an initial state near the middle of the track, almost at rest."""
        super().reset(seed=seed)
        self._time = 0
        # One draw of four numbers, as in Gymnasium, so that the initial states are the same.
        self._state = tuple(self.np_random.uniform(-_START, _START, 4).tolist())
        return self._observe(), {}

    def step(self, action: int):
        """Pushes the cart for 0.02 s (explicit Euler integration)."""
        x, x_dot, angle, angle_dot = self._state
        cosine, sine = math.cos(angle), math.sin(angle)
        force = _FORCE if action == 1 else -_FORCE
        pushed = (force + _POLE_MOMENT * (angle_dot * angle_dot) * sine) / _TOTAL_MASS
        angle_acceleration = (_GRAVITY * sine - cosine * pushed) / (
            _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * (cosine * cosine) / _TOTAL_MASS)
        )
        acceleration = pushed - _POLE_MOMENT * angle_acceleration * cosine / _TOTAL_MASS
        x, angle = x + _SECONDS * x_dot, angle + _SECONDS * angle_dot
        self._state = (
            x,
            x_dot + _SECONDS * acceleration,
            angle,
            angle_dot + _SECONDS * angle_acceleration,
        )
        self._time += 1
        fell = not (-_X_LIMIT <= x <= _X_LIMIT and -_ANGLE_LIMIT <= angle <= _ANGLE_LIMIT)
        return self._observe(), 1.0, fell, self._time >= self._length, {}

    def _observe(self) -> np.ndarray:
        return np.array((self._state[0], self._state[2]), np.float32)
