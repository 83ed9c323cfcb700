"""gymnax's environments (https://github.com/RobertTLange/gymnax) as `JaxEnv`.

gymnax's ``step`` resets an environment in the step that ends an episode, so the last observation is
lost. The adapter calls ``step_env``, which does not reset. From gymnax 1.0, its ``done`` is a
termination, and ``is_truncated`` tells the time limit. Before, ``done`` was also true at the time
limit, so ``step_env`` is called again without one: ``done`` is then a termination. XLA computes
what both calls share once.

Classic control is drawn by the same environment of Gymnasium, which is put into gymnax's state.
Grids are drawn from what the agent sees. gymnax draws these itself, with seaborn and pandas.
"""

from __future__ import annotations

import colorsys
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.imports.deferred import deferred
from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.libraries.infos import with_infos, without_names
from rlstack.jax_envs.libraries.limits import check_limit, check_version, not_installed
from rlstack.references import nearest
from rlstack.types import PRNGKey, PyTree

_LIMIT = "max_steps_in_episode"
_NEVER = 2**30  # steps
# gymnax and Flax import these modules, and environments do not need them: they draw pictures, with
# pandas and SciPy, or are networks. They take 2.2 of the 2.4 s in which gymnax is imported.
_UNUSED = "matplotlib", "matplotlib.colors", "matplotlib.pyplot", "seaborn", "flax.linen"
_SCATTER = "scatter inputs have incompatible types"  # in MinAtar, which writes numbers as bools


def make_gymnax(name: str, options: Mapping[str, Any]) -> Any:
    """Returns an environment of gymnax.

    Args:
      name: the environment's id.
      options: fields of the environment's params, and keyword arguments of ``gymnax.make``;
        ``extras``, see `rlstack.jax_envs.libraries.infos.WithInfos`.

    Raises:
      ValueError: gymnax is not installed, has no such id, or does not take these options.
      EnvError: the adapter does not know the installed version of gymnax, or a time limit does not
        end the environment's episodes.
    """
    try:
        with deferred(*_UNUSED):
            import gymnax
            from gymnax.registration import registered_envs
    except ImportError as error:
        raise not_installed(name, "gymnax", "jax-envs", error) from error
    check_version(name, "gymnax")
    if name not in registered_envs:
        raise ValueError(
            f"JAX environment: the name must be an id of gymnax or module:callable; got {name!r}"
            + nearest(name, registered_envs)
        )
    shown, options = options, without_names(options)
    fields = {field.name for field in dataclasses.fields(gymnax.make(name)[1])}
    arguments = {key: value for key, value in options.items() if key not in fields}
    try:
        env, params = gymnax.make(name, **arguments)
    except TypeError as error:
        raise ValueError(
            f"JAX environment {name}: options must be fields of its params "
            f"({', '.join(sorted(fields))}) or arguments of gymnax.make; {error}."
        ) from error
    if name.endswith("-MinAtar"):
        warnings.filterwarnings("ignore", _SCATTER, FutureWarning)  # users cannot mend it
    changes = {key: value for key, value in options.items() if key in fields}
    params = params.replace(**changes)
    if _LIMIT in fields:
        kind = tuple(sorted((key, repr(value)) for key, value in options.items() if key != _LIMIT))
        check_limit(name, kind, GymnaxEnv(name, env, _with_limit(params, 1)))
    return with_infos(GymnaxEnv(name, env, params), shown, name)


class GymnaxEnv:
    """One environment of gymnax; see `rlstack.jax_envs.environment.JaxEnv`."""

    def __init__(self, name: str, env: Any, params: Any) -> None:
        """Stores the name, and the result of ``gymnax.make``."""
        self._name, self._env, self._params = name, env, params
        self._classic: list[ClassicControl | None] = []  # made when the first picture is drawn
        self._tells_limit = hasattr(env, "is_truncated")  # from gymnax 1.0
        self._unlimited = _with_limit(params, _NEVER) if hasattr(params, _LIMIT) else params

    @property
    def render_fps(self) -> float | None:
        """Gymnasium's frames per second for classic control; None for other environments."""
        return CLASSIC[self._name].fps if self._name in CLASSIC else None

    def render(self, state: PyTree) -> np.ndarray | None:
        """Returns a picture of classic control or of a grid, uint8 [H, W, 3]; None of others."""
        if self._name in CLASSIC:
            self._classic = self._classic or [classic_control(self._name, self._params)]
            (draw,) = self._classic
            return None if draw is None else draw(state)
        shape = getattr(self._env.observation_space(self._params), "shape", None) or ()
        if len(shape) not in (2, 3) or 1 in shape:
            return None
        return grid(np.asarray(self._env.get_obs(state, self._params)))

    def observation_spec(self) -> PyTree:
        """Returns the spec of gymnax's observation space, with the dtypes of observations.

        Some spaces name another dtype, also one that JAX has only with 64 bits.
        """
        spec = space_spec(self._env.observation_space(self._params), "observation")
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        seen = jax.eval_shape(self._env.reset_env, key, self._params)[0]
        if jax.tree.structure(spec) != jax.tree.structure(seen):
            return spec  # `BatchedEnv` says what is wrong
        return jax.tree.map(_with_dtype, spec, seen)

    def action_spec(self) -> PyTree:
        """Returns the spec of gymnax's action space."""
        return space_spec(self._env.action_space(self._params), "action")

    def reset(self, rng_key: PRNGKey) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        observation, state = self._env.reset_env(rng_key, self._params)
        return state, observation

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> Outcome:
        """Takes an action; an episode that ends only because of its time limit is truncated."""
        return self.step_with_info(rng_key, state, action)[0]

    def step_with_info(
        self, rng_key: PRNGKey, state: PyTree, action: PyTree
    ) -> tuple[Outcome, Mapping[str, Any]]:
        """Returns the result of `step`, and gymnax's info."""
        step = self._env.step_env
        observation, after, reward, done, info = step(rng_key, state, action, self._params)
        if self._tells_limit:
            terminated = jnp.asarray(done, bool)
            truncated = jnp.asarray(self._env.is_truncated(after, self._params), bool)
        else:
            terminated = jnp.asarray(step(rng_key, state, action, self._unlimited)[3], bool)
            truncated = jnp.asarray(done, bool)
        return Outcome(after, observation, reward, terminated, truncated & ~terminated), info


def _with_limit(params: Any, steps: int) -> Any:
    """Returns the params with another time limit, of the type that it has there."""
    return params.replace(**{_LIMIT: type(getattr(params, _LIMIT))(steps)})


def _with_dtype(spec: specs.Array, seen: jax.ShapeDtypeStruct) -> specs.Array:
    if isinstance(spec, specs.DiscreteArray) or spec.dtype == seen.dtype:
        return spec
    low, high = (np.asarray(x, seen.dtype) for x in (spec.minimum, spec.maximum))
    return specs.BoundedArray(spec.shape, seen.dtype, low, high, spec.name)


def space_spec(space: Any, name: str) -> PyTree:
    """Returns the specs of a space of gymnax, or of a library with spaces like these.

    Raises:
      ValueError: there is no such spec.
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return specs.DiscreteArray(int(space.n), np.int32, name)
    if kind == "Box":
        dtype = np.dtype(space.dtype)
        low, high = np.asarray(space.low, dtype), np.asarray(space.high, dtype)
        return specs.BoundedArray(tuple(space.shape), dtype, low, high, name)
    if kind == "Dict":
        return {key: space_spec(part, key) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(space_spec(part, f"{name}_{i}") for i, part in enumerate(space.spaces))
    raise ValueError(
        f"JAX environment: spaces must be Box, Discrete, Dict or Tuple; got {kind} as {name}."
    )


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
