"""Whether a game of EnvPool has ended by itself in the step of its limit.

EnvPool marks every end in that step as truncated. Where the observation or the reward of the last
step shows that the environment has ended by itself, as a fallen pole does, the end is a
termination. The conditions are those of Gymnasium's environments, which EnvPool follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# Takes observations [B, ...] and rewards [B], and returns which environments have ended, [B].
Ended = Callable[[np.ndarray, np.ndarray], np.ndarray]

_HOLES = {"FrozenLake-v1": (5, 7, 11, 12, 15), "FrozenLake8x8-v1": (19, 29, 35, 41, 42, 46, 49, 52, 54, 59, 63)}  # fmt: skip # noqa: E501


def natural_end(name: str, config: Mapping[str, Any]) -> Ended | None:
    """Returns what tells the ends of an environment; None if only its limit is known.

    Args:
      name: the environment's id in EnvPool.
      config: the environment's options, including defaults.
    """
    kind = name.rpartition("-v")[0]
    if kind in ("CartPole", "phys2d/CartPole"):
        return lambda seen, _: (abs(seen[:, 0]) > 2.4) | (abs(seen[:, 2]) > np.radians(12))
    if kind in ("MountainCar", "MountainCarContinuous"):
        goal = 0.5 if kind == "MountainCar" else 0.45
        return lambda seen, _: (seen[:, 0] >= goal) & (seen[:, 1] >= 0)
    if kind == "Acrobot":
        return lambda seen, _: -seen[:, 0] - _cos_of_sum(seen[:, 0:4]) > 1
    if name in _HOLES:
        return lambda seen, _: np.isin(seen.reshape(len(seen)), _HOLES[name])
    if kind == "Taxi":
        return lambda _, reward: reward == 20
    if kind in ("LunarLander", "LunarLanderContinuous"):
        return lambda _, reward: abs(reward) == 100
    return _of_mujoco(kind, config)


def _of_mujoco(kind: str, config: Mapping[str, Any]) -> Ended | None:
    if config.get("frame_stack", 1) != 1:
        return None
    if kind == "InvertedPendulum":
        return lambda seen, _: _outside(seen[:, 1], config, "z")
    if kind == "InvertedDoublePendulum":  # poles of 0.6 m; their sines come before their cosines
        most = config["healthy_z_max"]
        order = [3, 1, 4, 2]
        return lambda seen, _: 0.6 * (seen[:, 3] + _cos_of_sum(seen[:, order])) <= most
    if not config.get("terminate_when_unhealthy") or not config.get(
        "exclude_current_positions_from_observation"
    ):
        return None
    if kind == "Hopper":
        low = config["healthy_z_min"]
        return lambda seen, _: (seen[:, 0] <= low) | _outside(seen[:, 1], config, "angle")
    if kind == "Walker2d":
        return lambda seen, _: (
            _outside(seen[:, 0], config, "z") | _outside(seen[:, 1], config, "angle")
        )
    if kind in ("Ant", "Humanoid"):
        return lambda seen, _: _outside(seen[:, 0], config, "z")
    return None


def _outside(value: np.ndarray, config: Mapping[str, Any], what: str) -> np.ndarray:
    """Returns where a value is outside of the bounds in which a robot is healthy."""
    return ~((config[f"healthy_{what}_min"] <= value) & (value <= config[f"healthy_{what}_max"]))


def _cos_of_sum(parts: np.ndarray) -> np.ndarray:
    """Returns cos(a + b) of cos a, sin a, cos b and sin b, [B, 4]."""
    return parts[:, 0] * parts[:, 2] - parts[:, 1] * parts[:, 3]
