"""One environment with auto-reset and checks, and the table of rows it writes to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from dm_env import specs

from rlstack.envs.adapters import EnvError, Outcome, make_env
from rlstack.envs.nest import Nest

FIRST, MID, LAST = 0, 1, 2  # rlstack.types.StepType, which workers cannot import: it needs JAX


class EnvCrash(RuntimeError):  # noqa: N818 (it crashed; the message has the error)
    """An environment raised an exception; the message names it, the cause is chained."""


class Rows:
    """One row for each environment: what it shows.

    Attributes:
      step_type: ``[N]`` int32.
      reward: ``[N]`` float32.
      discount: ``[N]`` float32.
      leaves: the observation's leaves, each ``[N, ...]``.
    """

    def __init__(self, observed: list[specs.Array], size: int):
        self.step_type = np.zeros(size, np.int32)
        self.reward = np.zeros(size, np.float32)
        self.discount = np.ones(size, np.float32)
        self.leaves = [np.zeros((size, *s.shape), s.dtype) for s in observed]


class Episode:
    """One environment that resets itself on the step after LAST.

    Attributes:
      observed: the observation's structure and specs.
      acted: the action's structure and specs.
    """

    def __init__(
        self, builder: Callable[..., Any], options: dict[str, Any], env_id: int, seed: int
    ):
        """Builds the environment; ``seed`` also seeds its first reset.

        Raises:
          EnvError: it breaks the rules.
          EnvCrash: the builder raised.
        """
        self.where = f"Env {env_id} ({_name(builder)})"
        self._env = self._call("the builder", make_env, builder, options, seed, self.where)
        self.observed = Nest(self._env.observation_spec)
        self.acted = Nest(self._env.action_spec)
        self._seed: int | None = seed
        self._over = True

    def reset(self, rows: Rows, at: int) -> None:
        """Starts an episode and writes its FIRST step to row ``at``."""
        self._over = True  # should the reset fail, the next step tries again
        observation = self._call("reset", self._env.reset, self._seed)
        self._seed = None
        self._put(rows, at, observation)
        rows.step_type[at], rows.reward[at], rows.discount[at] = FIRST, 0.0, 1.0
        self._over = False

    def step(self, action: list[np.ndarray], rows: Rows, at: int) -> None:
        """Takes one action's leaves and writes row ``at``; after LAST it resets instead."""
        if self._over:
            self.reset(rows, at)
            return
        outcome: Outcome = self._call("step", self._env.step, action)
        reward = self._scalar("reward", outcome.reward)
        discount = self._scalar("discount", outcome.discount)
        if not 0.0 <= discount <= 1.0:
            raise EnvError(f"{self.where}: the discount must lie in [0, 1]; got {discount}.")
        self._put(rows, at, outcome.observation)
        rows.step_type[at] = LAST if outcome.last else MID
        rows.reward[at], rows.discount[at] = reward, discount
        self._over = outcome.last

    @property
    def announces(self) -> bool:
        """Whether `announce` does anything."""
        return self._env.announce is not None

    def announce(self, action: list[np.ndarray] | None, together: bool) -> None:
        """Tells an environment that waits for others of its next step, None for a reset."""
        if self._env.announce is not None:
            action = None if self._over else action
            self._call("announce", self._env.announce, action, together)

    def interrupt(self) -> None:
        """Makes a step in progress raise, if the environment can."""
        if self._env.interrupt is not None:
            self._call("interrupt", self._env.interrupt)

    def close(self) -> None:
        """Closes the environment; what it raises then is passed on as ``EnvCrash``."""
        self._call("close", self._env.close)

    def _call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except EnvError:
            raise
        except Exception as error:
            text = f"{self.where}: {what} raised {type(error).__name__}: {error}"
            raise EnvCrash(text) from error

    def _scalar(self, name: str, value: Any) -> float:
        if type(value) is float and math.isfinite(value):  # the common case, checked fast
            return value
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = None
        if number is None or np.ndim(value) != 0:
            came = f"{type(value).__name__} {value!r:.80}"
            raise EnvError(f"{self.where}: the {name} must be a scalar; got {came}.")
        if not math.isfinite(number):
            raise EnvError(f"{self.where}: the {name} must be finite; got {number}.")
        return number

    def _put(self, rows: Rows, at: int, observation: Any) -> None:
        try:
            values = self.observed.flatten(observation, f"{self.where}: observation")
        except TypeError as error:
            raise EnvError(str(error)) from error
        for i, (spec, value) in enumerate(zip(self.observed.leaves, values, strict=True)):
            target = rows.leaves[i]
            if (  # the common case, checked fast
                type(value) is np.ndarray
                and value.dtype == target.dtype
                and value.shape == spec.shape
            ):
                target[at] = value
                continue
            try:
                array = np.asarray(value)
            except ValueError:  # ragged
                array = np.empty((), object)
            if array.shape != spec.shape or (
                array.dtype != target.dtype
                and not np.can_cast(array.dtype, target.dtype, "same_kind")
            ):
                raise EnvError(
                    f"{self.where}: observation{self.observed.paths[i]} must be what its space "
                    f"declares, {spec.dtype} of shape {spec.shape}; got {array.dtype} of shape "
                    f"{array.shape}."
                )
            target[at] = array


def build(
    builder: Callable[..., Any], options: dict[str, Any], seeds: dict[int, int]
) -> dict[int, Episode]:
    """Builds the environments with ids and seeds ``seeds``; closes all if one cannot be built.

    Raises:
      EnvError: one breaks the rules, or they differ in their specs.
      EnvCrash: the builder raised.
    """
    episodes: dict[int, Episode] = {}
    try:
        for env_id, seed in seeds.items():
            episodes[env_id] = episode = Episode(builder, options, env_id, seed)
            head = next(iter(episodes.values()))
            if layout(episode) != layout(head):
                raise EnvError(
                    f"{episode.where}: all environments of a pool must have the same specs; "
                    f"got {layout(episode)}, but {head.where} has {layout(head)}."
                )
    except BaseException:
        close_all(episodes)
        raise
    return episodes


def close_all(episodes: dict[int, Episode]) -> None:
    """Closes every environment, also when some raise; raises the first of what they raised."""
    errors = []
    for episode in episodes.values():
        try:
            episode.close()
        except (EnvCrash, EnvError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def layout(episode: Episode) -> list[tuple]:
    """Returns path, shape and dtype of every leaf, to compare environments by."""
    return [
        (path, tuple(spec.shape), str(spec.dtype))
        for nest in (episode.observed, episode.acted)
        for path, spec in zip(nest.paths, nest.leaves, strict=True)
    ]


def _name(builder: Any) -> str:
    name = getattr(builder, "name", None) or getattr(builder, "__name__", None)
    return str(name or type(builder).__name__)
