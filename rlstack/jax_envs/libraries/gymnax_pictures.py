"""Pictures of gymnax's environments.

Classic control is drawn by the same environment of Gymnasium, which is put into gymnax's state.
Grids are drawn from what the agent sees. gymnax draws these itself, with seaborn and pandas.
"""

from __future__ import annotations

import colorsys
import dataclasses
import warnings
from typing import Any, NamedTuple

import numpy as np


class Classic(NamedTuple):
    """The data to draw an environment of classic control with Gymnasium."""

    fps: float  # Gymnasium's steps per second
    fields: tuple[str, ...]  # gymnax's fields that make up Gymnasium's state, in its order


CLASSIC = {
    "Acrobot-v1": Classic(15, ("joint_angle1", "joint_angle2", "velocity_1", "velocity_2")),
    "CartPole-v1": Classic(50, ("x", "x_dot", "theta", "theta_dot")),
    "MountainCar-v0": Classic(30, ("position", "velocity")),
    "MountainCarContinuous-v0": Classic(30, ("position", "velocity")),
    "Pendulum-v1": Classic(30, ("theta", "theta_dot")),
}


class ClassicControl:
    """Draws one of the environments of `CLASSIC` with Gymnasium."""

    def __init__(self, name: str, params: Any) -> None:
        """Makes Gymnasium's environment.

        Args:
          name: the name of the environment.
          params: gymnax's params, a dataclass. Gymnasium's environment gets the params that it also
            has as attributes.

        Raises:
          gymnasium.error.DependencyNotInstalled: Pygame, with which Gymnasium draws, is missing.
        """
        import gymnasium

        env = gymnasium.make(name, render_mode="rgb_array")
        env.reset()
        env.render()
        self._env: Any = env.unwrapped
        for field in dataclasses.fields(params):
            if hasattr(self._env, field.name):
                setattr(self._env, field.name, float(getattr(params, field.name)))
        self._fields = CLASSIC[name].fields

    def __call__(self, state: Any) -> np.ndarray:
        """Returns the picture of a state of gymnax, uint8 [H, W, 3]."""
        self._env.state = np.array([float(getattr(state, name)) for name in self._fields])
        if hasattr(state, "last_u"):  # Pendulum draws the torque
            self._env.last_u = float(np.ravel(state.last_u)[0]) or None
        return np.asarray(self._env.render(), np.uint8)


def classic_control(name: str, params: Any) -> ClassicControl | None:
    """Returns what draws an environment of `CLASSIC`; None, with a warning, without Pygame."""
    from gymnasium.error import DependencyNotInstalled

    try:
        return ClassicControl(name, params)
    except DependencyNotInstalled as error:
        warnings.warn(f"{name} is not drawn: {error}", RuntimeWarning, stacklevel=3)
        return None


def grid(observation: np.ndarray) -> np.ndarray:
    """Returns what an agent sees of a grid as uint8 [H, W, 3].

    Args:
      observation: ``[H, W]``, drawn in grey; or ``[H, W, C]``, where each channel has a colour, and
        a cell has that of its last channel that is not 0.
    """
    seen = np.asarray(observation, np.float32)
    if seen.ndim == 2:
        low, high = float(seen.min()), float(seen.max())
        grey = (255 * (seen - low) / max(high - low, 1e-6)).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    channels = seen.shape[-1]
    hues = [colorsys.hsv_to_rgb(i / channels, 0.7, 0.95) for i in range(channels)]
    colours = np.concatenate([np.zeros((1, 3)), 255 * np.array(hues)]).astype(np.uint8)
    last = ((seen != 0) * np.arange(1, channels + 1)).max(axis=-1)
    return colours[last]
