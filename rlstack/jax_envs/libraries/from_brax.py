"""Brax's environments (https://github.com/google/brax) as `JaxEnv`.

Brax's own training adds wrappers, which reset an environment in the step that ends an episode and
set ``done`` at a time limit too. So the last observation is lost, and its agents find in ``info``
whether there was a limit. The adapter takes the environment without wrappers: its ``done`` is a
termination, and the adapter counts the steps to the limit.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.libraries.brax_pictures import BraxRenderer
from rlstack.jax_envs.libraries.errors import not_installed
from rlstack.jax_envs.libraries.limits import check_version
from rlstack.references import did_you_mean
from rlstack.types import Array, PRNGKey, PyTree

_log = logging.getLogger(__name__)

_STEPS = 1000  # steps of an episode, as in Brax's training


class BraxState(NamedTuple):
    """The state of one episode."""

    brax: PyTree  # the environment's state, a `brax.envs.State`
    time: Array  # [] int32, steps so far


def make_brax(name: str, options: Mapping[str, Any]) -> BraxEnv:
    """Returns an environment of Brax.

    Args:
      name: the environment's name in Brax, such as ``ant``.
      options: ``episode_length``, after which episodes are truncated; and arguments of the
        environment, such as ``backend``.

    Raises:
      ValueError: Brax is not installed, has no such name, or does not take these options.
      EnvError: the adapter does not know the installed version of Brax.
    """
    try:
        from brax import envs
    except ImportError as error:
        raise not_installed(f"brax/{name}", "Brax", "brax", error) from error
    check_version(f"brax/{name}", "brax")
    known = sorted(envs._envs)
    if name not in known:
        raise ValueError(
            f"JAX environment: Brax must have the name; got brax/{name}."
            + did_you_mean(name, known, "brax/")
        )
    arguments = dict(options)
    limit = arguments.pop("episode_length", _STEPS)
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(
            f"JAX environment brax/{name}: episode_length must be a positive number of steps; "
            f"got {limit!r}."
        )
    try:
        with _mujoco_warnings_logged():
            env = envs.get_environment(name, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"JAX environment brax/{name}: options must be episode_length or arguments of "
            f"Brax's {name}; {error}."
        ) from error
    return BraxEnv(env, limit)


@contextlib.contextmanager
def _mujoco_warnings_logged() -> Iterator[None]:
    """Logs MuJoCo's warnings, which it appends to a file in the working directory otherwise."""
    mujoco = sys.modules.get("mujoco")  # Brax has imported it
    if mujoco is None:
        yield
        return
    mujoco.set_mju_user_warning(lambda message: _log.warning("MuJoCo: %s", message))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)


class BraxEnv:
    """One environment of Brax; see `rlstack.jax_envs.environment.JaxEnv`."""

    def __init__(self, env: Any, episode_length: int) -> None:
        """Stores an environment without wrappers, and the steps after which it is truncated."""
        self._env, self._limit = env, episode_length
        self._renderer: BraxRenderer | None = None
        self._can_draw = True

    @property
    def render_fps(self) -> float:
        """The steps in a second, so that time passes as in the simulation."""
        return 1 / float(self._env.dt)

    def render(self, state: BraxState) -> np.ndarray | None:
        """Returns a picture, uint8 [H, W, 3]; None where OpenGL is missing, which it warns of."""
        if self._renderer is None and self._can_draw:
            try:
                self._renderer = BraxRenderer(self._env.sys.mj_model)
            except (ImportError, AttributeError, RuntimeError, OSError) as error:
                self._can_draw = False
                warnings.warn(
                    f"Brax's environments are not drawn, because OpenGL cannot be used: {error} "
                    "Install EGL (libegl1), or set MUJOCO_GL to what MuJoCo can use.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if self._renderer is None:
            return None
        return self._renderer(state.brax.pipeline_state.q, state.brax.pipeline_state.qd)

    def observation_spec(self) -> PyTree:
        """Returns the specs of what ``reset`` observes."""
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        observation = jax.eval_shape(lambda key: self._env.reset(key).obs, key)
        return jax.tree.map(
            lambda x: specs.Array(x.shape, np.dtype(x.dtype), "observation"), observation
        )

    def action_spec(self) -> PyTree:
        """Returns the spec of actions: Brax scales [-1, 1] to the range of each actuator."""
        return specs.BoundedArray((self._env.action_size,), np.float32, -1.0, 1.0, "action")

    def reset(self, rng_key: PRNGKey) -> tuple[BraxState, PyTree]:
        """Starts an episode."""
        state = self._env.reset(rng_key)
        return BraxState(state, jnp.int32(0)), state.obs

    def step(self, rng_key: PRNGKey, state: BraxState, action: PyTree) -> Outcome:
        """Takes an action; Brax keeps random keys, where it needs any, in its own state."""
        del rng_key
        after, time = self._env.step(state.brax, action), state.time + 1
        terminated = jnp.asarray(after.done, bool)
        truncated = (time >= self._limit) & ~terminated
        return Outcome(BraxState(after, time), after.obs, after.reward, terminated, truncated)
