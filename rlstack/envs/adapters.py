"""Gymnasium and dm_env environments behind one internal interface.

Worker processes import this file, so it imports neither JAX nor, unless the environment did,
Gymnasium.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import dm_env
import numpy as np
from dm_env import specs

from rlstack.envs.nest import Nest

_log = logging.getLogger(__name__)


class EnvError(ValueError):
    """An environment breaks the rules of its own interface; trying again will not help."""


class Outcome(NamedTuple):
    """What one step of one environment gave."""

    observation: Any  # in the structure of the observation spec
    reward: Any
    discount: Any  # 0 at a termination, 1 at a truncation
    last: bool


class SingleEnv(Protocol):
    """One environment, without auto-reset.

    Attributes:
      observation_spec: pytree of specs, float64 shown as float32.
      action_spec: pytree of specs, float64 shown as float32, integers counted from 0.
      announce: takes the leaves of the next step's action, None for a reset, before any environment
        of a pool is stepped, and whether all of them step together; None where the environment
        has no use for it. It is for environments that wait for one another, such as those of the
        agents of one game.
      interrupt: makes a step in progress raise, from another thread; comes with ``announce``.
    """

    observation_spec: Any
    action_spec: Any
    announce: Callable[[list[np.ndarray] | None, bool], None] | None
    interrupt: Callable[[], None] | None

    def reset(self, seed: int | None) -> Any:
        """Starts an episode, seeded where ``seed`` is given, and returns the observation."""

    def step(self, action: list[np.ndarray]) -> Outcome:
        """Takes the leaves of one action."""

    def close(self) -> None:
        """Frees what the environment holds."""


def make_env(builder: Callable[..., Any], options: dict[str, Any], seed: int, where: str):
    """Builds one environment and returns it as a ``SingleEnv``.

    Args:
      builder: returns a ``gymnasium.Env`` or a ``dm_env.Environment``.
      options: keywords for it; ``seed`` is added where it has such a parameter.
      seed: seed of this environment.
      where: how messages name the environment.

    Raises:
      EnvError: the builder returned something else, or a space that no array can hold.
    """
    seeded = takes_seed(builder)
    if seeded and "seed" not in options:
        options = {**options, "seed": seed}
    env = builder(**options)
    # An environment can only be Gymnasium's if somebody imported Gymnasium.
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(env, gymnasium.Env):
        return _GymnasiumEnv(env, where)
    if isinstance(env, dm_env.Environment):
        if not seeded:
            _log.warning("%s: a dm_env builder without a 'seed' parameter cannot be seeded", where)
        return _DmEnv(env, where)
    raise EnvError(
        f"{where}: the builder must return a gymnasium.Env or a dm_env.Environment; "
        f"got {type(env).__name__}."
    )


def takes_seed(builder: Callable[..., Any]) -> bool:
    """Whether a builder has a ``seed`` parameter."""
    try:
        return "seed" in inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return False


class _DmEnv:
    """A ``dm_env.Environment`` as a ``SingleEnv``."""

    def __init__(self, env: dm_env.Environment, where: str):
        self._env, self._where = env, where
        observed, acted = Nest(env.observation_spec()), Nest(env.action_spec())
        self._acted, self._act_specs = acted, acted.leaves
        self.observation_spec = observed.unflatten([_narrow(s, where) for s in observed.leaves])
        self.action_spec = acted.unflatten([self._from_zero(s) for s in acted.leaves])
        self.announce = self._announce if hasattr(env, "announce") else None
        self.interrupt = getattr(env, "interrupt", None)

    def _from_zero(self, spec: specs.Array) -> specs.Array:
        if isinstance(spec, specs.DiscreteArray):
            return specs.DiscreteArray(spec.num_values, np.int32, spec.name)
        return _narrow(spec, self._where)

    def reset(self, seed: int | None) -> Any:
        del seed  # given to the builder
        timestep = self._env.reset()
        if timestep.step_type != dm_env.StepType.FIRST:
            raise EnvError(f"{self._where}: reset must give FIRST; got {timestep.step_type}.")
        return timestep.observation

    def step(self, action: list[np.ndarray]) -> Outcome:
        timestep = self._env.step(self._cast(action))
        if not isinstance(timestep, dm_env.TimeStep) or timestep.first():
            raise EnvError(
                f"{self._where}: step must return a dm_env.TimeStep that is MID or LAST; "
                f"got {timestep!r:.200}."
            )
        return Outcome(timestep.observation, timestep.reward, timestep.discount, timestep.last())

    def _cast(self, action: list[np.ndarray]) -> Any:
        cast = [a.astype(s.dtype)[()] for a, s in zip(action, self._act_specs, strict=True)]
        return self._acted.unflatten(cast)

    def _announce(self, action: list[np.ndarray] | None, together: bool) -> None:
        self._env.announce(None if action is None else self._cast(action), together)

    def close(self) -> None:
        self._env.close()


def _narrow(spec: Any, where: str) -> specs.Array:
    """Returns ``spec`` with float64 as float32, checked to be an array spec."""
    if not isinstance(spec, specs.Array) or isinstance(spec, specs.StringArray):
        raise EnvError(f"{where}: specs must be dm_env.specs arrays of numbers; got {spec!r:.200}.")
    if spec.dtype != np.float64:
        return spec
    if isinstance(spec, specs.BoundedArray):
        return specs.BoundedArray(
            spec.shape,
            np.float32,
            np.asarray(spec.minimum, np.float32),
            np.asarray(spec.maximum, np.float32),
            spec.name,
        )
    return specs.Array(spec.shape, np.float32, spec.name)


class _GymnasiumEnv:
    """A ``gymnasium.Env`` as a ``SingleEnv``."""

    announce = interrupt = None

    def __init__(self, env: Any, where: str):
        self._env, self._where = env, where
        self._observed = Nest(_leaf_spaces(env.observation_space, f"{where}: observation_space"))
        self._acted = Nest(_leaf_spaces(env.action_space, f"{where}: action_space"))
        self.observation_spec = self._observed.unflatten(
            [_space_spec(s, False) for s in self._observed.leaves]
        )
        self.action_spec = self._acted.unflatten([_space_spec(s, True) for s in self._acted.leaves])
        self._casts = [_action_cast(s) for s in self._acted.leaves]
        self._shifts = [_start(s) for s in self._observed.leaves]
        self._shifted = any(np.any(s) for s in self._shifts)

    def reset(self, seed: int | None) -> Any:
        result = self._env.reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(
                f"{self._where}: reset() must return (observation, info); got {_brief(result)}."
            )
        return self._observation(result[0])

    def step(self, action: list[np.ndarray]) -> Outcome:
        cast = [to(a) for to, a in zip(self._casts, action, strict=True)]
        result = self._env.step(self._acted.unflatten(cast))
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{self._where}: step() must return the 5 values (observation, reward, terminated, "
                f"truncated, info); got {_brief(result)}."
            )
        observation, reward, terminated, truncated, _ = result
        if type(terminated) is bool and type(truncated) is bool:  # the common case, checked fast
            return Outcome(
                self._observation(observation),
                reward,
                0.0 if terminated else 1.0,
                terminated or truncated,
            )
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                raise EnvError(f"{self._where}: {name} must be a bool; got {_brief(flag)}.")
        return Outcome(
            self._observation(observation),
            reward,
            0.0 if terminated else 1.0,
            bool(terminated or truncated),
        )

    def _observation(self, value: Any) -> Any:
        """Counts discrete observations from 0, as their specs do."""
        if not self._shifted:
            return value
        leaves = self._observed.flatten(value, f"{self._where}: observation")
        moved = [np.asarray(v) - s for v, s in zip(leaves, self._shifts, strict=True)]
        return self._observed.unflatten(moved)

    def close(self) -> None:
        self._env.close()


def _leaf_spaces(space: Any, where: str) -> Any:
    """Returns a Gymnasium space as a nest of spaces that are single arrays."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {k: _leaf_spaces(v, f"{where}[{k!r}]") for k, v in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_leaf_spaces(v, f"{where}[{i}]") for i, v in enumerate(space.spaces))
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return space
    raise EnvError(
        f"{where}: must be Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these; "
        f"got {space!r:.200}. Way out: a wrapper that flattens it."
    )


def _space_spec(space: Any, acting: bool) -> specs.Array:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return specs.DiscreteArray(int(space.n), np.int32 if acting else space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        dtype = np.int32 if acting else space.dtype
        return specs.BoundedArray(space.shape, dtype, np.zeros_like(space.nvec), space.nvec - 1)
    if isinstance(space, spaces.MultiBinary):
        return specs.BoundedArray(space.shape, space.dtype, 0, 1)
    dtype = np.dtype(np.float32 if space.dtype == np.float64 else space.dtype)
    low, high = space.low, space.high
    if np.isinf(low).all() and np.isinf(high).all():
        return specs.Array(space.shape, dtype)
    if (low == low.flat[0]).all() and (high == high.flat[0]).all():
        low, high = low.flat[0], high.flat[0]
    return specs.BoundedArray(space.shape, dtype, np.asarray(low, dtype), np.asarray(high, dtype))


def _start(space: Any) -> Any:
    return getattr(space, "start", 0)


def _action_cast(space: Any) -> Callable[[np.ndarray], Any]:
    """Returns what makes an action of the spec one of the space, with memory of its own."""
    start, dtype = _start(space), space.dtype
    if not space.shape and np.issubdtype(dtype, np.integer):
        return lambda action: dtype.type(int(action) + int(start))
    if np.any(start):
        return lambda action: np.add(action, start, dtype=dtype)
    return lambda action: np.array(action, dtype)


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {value!r:.80}"
