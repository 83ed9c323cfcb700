"""Pictures of Brax's environments, drawn by MuJoCo, also without a display."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_HEIGHT, _WIDTH = 360, 480  # in pixels; MuJoCo's buffer is at least 480 x 640
_CAMERA = "track"  # the camera of most of these models, which follows the body
_MAX_GEOMS = 10_000


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
