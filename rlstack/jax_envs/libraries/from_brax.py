"""Brax's environments (https://github.com/google/brax) as `JaxEnv`.

Brax's own training adds wrappers, which reset an environment in the step that ends an episode and
set ``done`` at a time limit too. So the last observation is lost, and its agents find in ``info``
whether there was a limit. The adapter takes the environment without wrappers: its ``done`` is a
termination, and the adapter counts the steps to the limit.

Pictures are drawn by MuJoCo, also without a display.
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
from rlstack.jax_envs.libraries.infos import with_infos, without_names
from rlstack.jax_envs.libraries.limits import check_version, not_installed
from rlstack.references import nearest
from rlstack.types import Array, PRNGKey, PyTree

_log = logging.getLogger(__name__)

_STEPS = 1000  # steps of an episode, as in Brax's training
_HEIGHT, _WIDTH = 360, 480  # in pixels; MuJoCo's buffer is at least 480 x 640
_CAMERA = "track"  # the camera of most of these models, which follows the body
_MAX_GEOMS = 10_000


class BraxState(NamedTuple):
    """The state of one episode."""

    brax: PyTree  # the environment's state, a `brax.envs.State`
    time: Array  # [] int32, steps so far


def make_brax(name: str, options: Mapping[str, Any]) -> Any:
    """Returns an environment of Brax.

    Args:
      name: the environment's name in Brax, such as ``ant``.
      options: ``episode_length``, after which episodes are truncated; and arguments of the
        environment, such as ``backend``; ``extras``, names of entries of Brax's ``metrics`` or
        ``info``, see `rlstack.jax_envs.libraries.infos.WithInfos`.

    Raises:
      ValueError: Brax is not installed, has no such name, or does not take these options.
      EnvError: the adapter does not know the installed version of Brax.
    """
    try:
        from brax import envs
    except ImportError as error:
        raise not_installed(f"brax/{name}", "Brax", "brax", error) from error
    check_version(f"brax/{name}", "brax")
    if name not in envs._envs:
        raise ValueError(
            "JAX environment: the name after brax/ must be an environment of Brax; got "
            f"{name!r}{nearest(name, envs._envs, 'brax/')}"
        )
    arguments = without_names(options)
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
    return with_infos(BraxEnv(env, limit), options, f"brax/{name}")


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
        return self.step_with_info(rng_key, state, action)[0]

    def step_with_info(
        self, rng_key: PRNGKey, state: BraxState, action: PyTree
    ) -> tuple[Outcome, Mapping[str, Any]]:
        """Returns the result of `step`, and Brax's info and metrics."""
        del rng_key
        after, time = self._env.step(state.brax, action), state.time + 1
        terminated = jnp.asarray(after.done, bool)
        truncated = (time >= self._limit) & ~terminated
        state = BraxState(after, time)
        outcome = Outcome(state, after.obs, after.reward, terminated, truncated)
        return outcome, {**after.info, **after.metrics}


class BraxRenderer:
    """Draws the bodies of a model, seen by the model's own camera if there is one."""

    def __init__(self, model: Any) -> None:
        """Makes an OpenGL context: EGL's, which needs no display, or MuJoCo's default.

        Args:
          model: a ``mujoco.MjModel``.

        Raises:
          ImportError, RuntimeError, OSError: OpenGL cannot be used here.
        """
        import mujoco

        self._mujoco, self._model, self._data = mujoco, model, mujoco.MjData(model)
        self._gl = _context(mujoco)
        self._gl.make_current()
        self._target = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._target)
        self._scene, self._option = mujoco.MjvScene(model, _MAX_GEOMS), mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA.value, _CAMERA)
        if number >= 0:
            self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED.value
            self._camera.fixedcamid = number
        else:
            mujoco.mjv_defaultFreeCamera(model, self._camera)

    def __call__(self, positions: np.ndarray, velocities: np.ndarray) -> np.ndarray:
        """Returns a picture, uint8 [H, W, 3].

        Args:
          positions: the generalised positions, as ``q`` of Brax.
          velocities: the generalised velocities, as ``qd`` of Brax.
        """
        mujoco, data = self._mujoco, self._data
        data.qpos[:], data.qvel[:] = positions, velocities
        mujoco.mj_forward(self._model, data)
        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(
            self._model, data, self._option, None, self._camera, everything, self._scene
        )
        frame = mujoco.MjrRect(0, 0, _WIDTH, _HEIGHT)
        mujoco.mjr_render(frame, self._scene, self._target)
        pixels = np.empty((_HEIGHT, _WIDTH, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, frame, self._target)
        return np.ascontiguousarray(pixels[::-1])  # OpenGL counts rows from below

    def __del__(self) -> None:
        # The buffers are freed in the context that is current, so it must be their own.
        if hasattr(self, "_target") and not sys.is_finalizing():
            self._gl.make_current()
            self._target.free()
            self._gl.free()


def _context(mujoco: Any) -> Any:
    """Returns an OpenGL context.

    MuJoCo's own choice is made when it is imported, and without MUJOCO_GL it is one that needs a
    display.
    """
    try:
        from mujoco.egl import GLContext

        return GLContext(_WIDTH, _HEIGHT)
    except (ImportError, AttributeError, RuntimeError, OSError):  # there is no EGL here
        from mujoco import gl_context

        return gl_context.GLContext(_WIDTH, _HEIGHT)
