"""One environment of a run, and pictures of its steps."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rlstack.configs.network import ImageAxes
from rlstack.entity.adapter import EntityEnv
from rlstack.envs import SyncEnv
from rlstack.envs.cpp import library
from rlstack.envs.factory import GymnasiumBuilder, resolve
from rlstack.envs.seats.game import EnvOfSeat
from rlstack.envs.seats.showing import unwrapped
from rlstack.envs.seats.turns import TurnEnv
from rlstack.envs.values import from_zero
from rlstack.programs.build.environments import environment_spec, make_env
from rlstack.programs.build.policies.members import seat_names
from rlstack.programs.config.env_config import EnvConfig, OpponentsConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.pictures.labels import GameLabels, Labels, Names, Numbers
from rlstack.types import EnvSpec, PyTree, TimeStep

Picture = np.ndarray | str  # uint8 [H, W, 3], or text

_FPS = 10.0  # steps per second in environments that set no rate


class Stage:
    """An environment in which policies play, with pictures for people.

    Attributes:
      seats: the names of the seats of a game; one for an environment of one agent.
      titles: names of the seats for display.
      pool: the pool, with one row for each seat.
      labels: names what the policy of the first seat chooses among.
      fps: pictures in a second.
    """

    def __init__(self, experiment: Experiment, seed: int) -> None:
        """Makes the environment of the run's evaluation.

        Raises:
          ValueError: the environment cannot be made.
        """
        cfg = experiment.evaluation_env
        self.seats = seat_names(cfg)
        self.titles = tuple(f"seat {name}" if name.isdecimal() else name for name in self.seats)
        self._image_axes = experiment.network.image_axes
        self._built: list[Any] = []
        builder = _builder(cfg)
        self.pool: Any = None if builder is None else self._in_python(builder, experiment, seed)
        if self.pool is None:
            self._built.clear()
            one = dataclasses.replace(
                cfg,
                num_envs=len(self.seats),
                num_workers=1,
                wait_num=0,
                opponents=OpponentsConfig(),
            )
            self.pool = make_env(one, seed)
        self.labels: Labels = self.labels_of(0)
        metadata: Mapping[str, Any] = getattr(self._env_of(0), "metadata", None) or {}
        self.fps = float(metadata.get("render_fps") or self.pool.render_fps or _FPS)

    @property
    def spec(self) -> EnvSpec:
        """The spec of the environment, whose discrete values count from 0, as those of pools."""
        return from_zero(self.pool.spec)

    @property
    def turn(self) -> int | None:
        """The seat whose turn it is; None in games whose seats act at the same time."""
        env = self._env_of(0)
        return env.turn if isinstance(env, TurnEnv) else None

    def labels_of(self, seat: int) -> Labels:
        """Returns what names the choices of a seat."""
        env = self._env_of(seat)
        if isinstance(env, EntityEnv):
            return GameLabels(env)
        names = getattr(_game_of(env), "action_names", None)
        spec = self.pool.spec.action
        return Numbers(spec) if names is None else Names(spec, names)

    def entity_env(self, seat: int) -> EntityEnv | None:
        """Returns the environment of a seat of an entity game; None for other games."""
        env = self._env_of(seat)
        return env if isinstance(env, EntityEnv) else None

    def picture(self, timestep: TimeStep, seat: int = 0) -> Picture:
        """Returns how the environment looks at its newest step.

        It is what the environment renders; without a renderer, the text of a game, the image that
        the agent sees, or the text of the observation.

        Args:
          timestep: the newest step.
          seat: whose observation is shown, if nothing else can be.
        """
        observation = jax.tree.map(lambda x: np.asarray(x[seat]), timestep.observation)
        return self.picture_of(observation, seat)

    def picture_of(self, observation: PyTree, seat: int = 0) -> Picture:
        """Returns how the environment looks, as `picture`, given the observation of the seat."""
        env = self._env_of(seat)
        if env is None and (shown := self.pool.render(seat)) is not None:
            return shown
        game = _game_of(env)
        if isinstance(env, EntityEnv):
            return str(env.game)
        if game is not None or getattr(env, "render_mode", None) == "rgb_array":
            drawn = getattr(env if game is None else game, "render", lambda: None)()
            if isinstance(drawn, np.ndarray) and drawn.ndim == 3:
                return np.ascontiguousarray(drawn[..., :3], np.uint8)
        if game is not None and type(game).__str__ is not object.__str__:
            return str(game)
        for leaf in jax.tree.leaves(observation):
            if leaf.dtype == np.uint8 and leaf.ndim in (2, 3) and min(leaf.shape[-2:]) > 0:
                return _as_rgb(leaf, self._image_axes)
        return _as_text(observation)

    def close(self) -> None:
        """Closes the environment."""
        self.pool.close()

    def _env_of(self, seat: int) -> Any:
        """Returns the environment of a seat; None if its pool does not show it."""
        return self._built[seat] if self._built else None

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
        in_envpool = cfg.type in ("auto", "cpp") and cfg.name in library.names()

        def made() -> SyncEnv:
            number = len(self.seats)
            return SyncEnv(self._kept(builder), number, "for_loop", seed=seed, options=options)

        try:
            pool = made()
        except Exception:
            if in_envpool:
                return None
            raise
        # Which renderers a game of seats has is known once it is made.
        if "rgb_array" in getattr(_game_of(self._env_of(0)), "render_modes", ()):
            pool.close()
            self._built.clear()
            options.setdefault("render_mode", "rgb_array")
            pool = made()
        if in_envpool and shapes_of(pool.spec) != shapes_of(environment_spec(experiment)):
            pool.close()
            return None
        return pool

    def _kept(self, builder: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the builder with a record of its environments, so that they can be rendered."""

        def build(**options: Any) -> Any:
            self._built.append(builder(**options))
            return self._built[-1]

        def build_seeded(seed: int, **options: Any) -> Any:
            return build(seed=seed, **options)

        kept: Any = build_seeded if _takes(builder, "seed") else build
        kept.seats = getattr(builder, "seats", None)
        return kept


def _builder(cfg: EnvConfig) -> Callable[..., Any] | None:
    """Returns the environment's builder in Python; None if only its own pool can build it."""
    if cfg.type == "jax" or cfg.name.startswith("rust:"):
        return None
    try:
        return resolve(cfg.name)
    except ValueError:
        if ":" in cfg.name:
            raise
        return None  # an environment that only EnvPool has


def _game_of(env: Any) -> Any:
    """Returns the game of the environment of a seat; None for other environments."""
    return unwrapped(env.game) if isinstance(env, EnvOfSeat) else None


def shapes_of(spec: EnvSpec) -> PyTree:
    """Returns the shapes and dtypes of observations and actions."""
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), spec)


def _takes(builder: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return False


def _as_rgb(image: np.ndarray, image_axes: ImageAxes) -> np.ndarray:
    """Returns an image as uint8 [H, W, 3]; of a stack of images, the newest."""
    turns = image.ndim == 3 and image.shape[0] < image.shape[2]  # as in EnvPool
    if image.ndim == 3 and image_axes != "auto":
        turns = image_axes == "chw"
    if turns:
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
