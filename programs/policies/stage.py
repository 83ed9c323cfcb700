"""One environment of a run, with a picture of it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from programs.components.environments import environment_spec, make_env
from programs.env_config import EnvConfig, OpponentsConfig
from programs.experiment import Experiment
from programs.policies.labels import GameLabels, Labels, Numbers
from rlstack.entity.adapter import EntityEnv
from rlstack.envs import SyncEnv, cpp
from rlstack.envs.factory import GymnasiumBuilder, resolve
from rlstack.types import EnvSpec, PyTree, TimeStep

Picture = np.ndarray | str  # uint8 [H, W, 3], or text

_FPS = 10.0  # of environments that say nothing else


class Stage:
    """An environment that a policy plays and people see.

    In games of several agents, the same policy plays all of them, and the first one is shown.

    Attributes:
      pool: its environments: one, or one for each agent of the game.
      labels: names what the policy chooses among.
      fps: pictures in a second.
    """

    def __init__(self, experiment: Experiment, seed: int) -> None:
        """Makes the environment of the run's evaluation.

        Raises:
          ValueError: it cannot be made.
        """
        cfg = experiment.evaluation_env
        self._built: list[Any] = []
        builder = _builder(cfg)
        self.pool: Any = None if builder is None else self._in_python(builder, experiment, seed)
        if self.pool is None:
            self._built.clear()
            one = dataclasses.replace(
                cfg, num_envs=1, num_workers=1, wait_num=0, opponents=OpponentsConfig()
            )
            self.pool = make_env(one, seed)
        env: Any = self._built[0] if self._built else None
        self.labels: Labels = GameLabels(env) if isinstance(env, EntityEnv) else Numbers()
        metadata: Mapping[str, Any] = getattr(env, "metadata", None) or {}
        self.fps = float(metadata.get("render_fps") or _FPS)
        self._env: Any = env

    @property
    def spec(self) -> EnvSpec:
        """The spec of the environment."""
        return self.pool.spec

    def picture(self, timestep: TimeStep) -> Picture:
        """Returns how the environment looks at its newest step.

        It is what the environment renders; without a renderer, the image that the agent sees, or
        the text of a game, or of the observation.
        """
        if isinstance(self._env, EntityEnv):
            return str(self._env.game)
        if getattr(self._env, "render_mode", None) == "rgb_array":
            drawn = self._env.render()
            if isinstance(drawn, np.ndarray) and drawn.ndim == 3:
                return np.ascontiguousarray(drawn[..., :3], np.uint8)
        observation = jax.tree.map(lambda x: np.asarray(x[0]), timestep.observation)
        for leaf in jax.tree.leaves(observation):
            if leaf.dtype == np.uint8 and leaf.ndim in (2, 3) and min(leaf.shape[-2:]) > 0:
                return _as_rgb(leaf)
        return _as_text(observation)

    def close(self) -> None:
        """Closes the environment."""
        self.pool.close()

    def _in_python(
        self, builder: Callable[..., Any], experiment: Experiment, seed: int
    ) -> SyncEnv | None:
        """Makes the environment where it can be rendered; None if only EnvPool has this one.

        Gymnasium may have no package for it, or another version of it, with other shapes.
        """
        cfg = experiment.evaluation_env
        options = dict(cfg.options)
        if isinstance(builder, GymnasiumBuilder) or _takes(builder, "render_mode"):
            options.setdefault("render_mode", "rgb_array")
        seats = int(cfg.options.get("agents", 1)) if _takes(builder, "agents") else 1
        in_envpool = cfg.type in ("auto", "cpp") and cfg.name in cpp.names()
        try:
            pool = SyncEnv(self._kept(builder), seats, "for_loop", seed=seed, options=options)
        except Exception:
            if in_envpool:
                return None
            raise
        if in_envpool and _shapes(pool.spec) != _shapes(environment_spec(experiment)):
            pool.close()
            return None
        return pool

    def _kept(self, builder: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the builder, whose environments are kept so that they can be rendered."""

        def build(**options: Any) -> Any:
            self._built.append(builder(**options))
            return self._built[-1]

        def build_seeded(seed: int, **options: Any) -> Any:
            return build(seed=seed, **options)

        return build_seeded if _takes(builder, "seed") else build


def _builder(cfg: EnvConfig) -> Callable[..., Any] | None:
    """Returns what builds the environment in Python; None if only its own pool can."""
    if cfg.type == "jax" or cfg.name.startswith("rust:"):
        return None
    try:
        return resolve(cfg.name)
    except ValueError:
        if ":" in cfg.name:
            raise
        return None  # an environment that only EnvPool has


def _shapes(spec: EnvSpec) -> PyTree:
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), spec)


def _takes(builder: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return False


def _as_rgb(image: np.ndarray) -> np.ndarray:
    """Returns an image as uint8 [H, W, 3]; of a stack of images, the newest."""
    if image.ndim == 3 and image.shape[0] < image.shape[2]:  # channels first, as in EnvPool
        channels = 3 if image.shape[0] % 3 == 0 else 1
        image = np.moveaxis(image[-channels:], 0, -1)
    if image.ndim == 2:
        image = image[..., None]
    if image.shape[-1] != 3:
        image = np.repeat(image[..., -1:], 3, axis=-1)
    return np.ascontiguousarray(image)


def _as_text(observation: PyTree) -> str:
    def line(name: str, leaf: Any) -> str:
        numbers = [float(f"{x:.4g}") for x in np.asarray(leaf, float).ravel()[:12]]
        rest = ", ..." if np.size(leaf) > 12 else ""
        return f"{name} {json.dumps(numbers)[1:-1]}{rest}".strip()

    leaves = jax.tree_util.tree_leaves_with_path(observation)
    return "\n".join(line(jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
