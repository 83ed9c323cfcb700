"""Gymnasium and dm_env environments behind one internal interface.

Worker processes import this module, so it must not import JAX. It uses Gymnasium only if the
environment's own code has imported it.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import dm_env
import numpy as np
from dm_env import specs
from numpy.typing import DTypeLike

from rlstack.checks import EnvError
from rlstack.envs.nest import Nest, Tree
from rlstack.envs.values import counted_from_zero, start_of, with_start
from rlstack.imports import versions
from rlstack.specs import with_open_bounds

if TYPE_CHECKING:
    import gymnasium
    from gymnasium import spaces

    LeafSpace: TypeAlias = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary

EnvBuilder: TypeAlias = "Callable[..., dm_env.Environment | gymnasium.Env]"
Announce: TypeAlias = Callable[[list[np.ndarray] | None, bool], None]
Options: TypeAlias = dict[str, Any]  # keyword arguments of a builder

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """The result of one step of one environment, not yet checked."""

    observation: Tree  # has the structure of the observation spec
    reward: object  # a number
    discount: object  # a number: 0 at a termination, 1 at a truncation
    last: bool
    info: Mapping[str, Any] = {}  # the environment's data about the step, by name
    # Whether the step is FIRST although none was LAST: a seat that is not in its game, or joins it.
    first: bool = False


class SingleEnv(Protocol):
    """One environment, without auto-reset.

    Attributes:
      observation_spec: tree of specs; dtypes of 64 bits become those of 32 bits.
      action_spec: tree of specs, with dtypes narrowed in the same way; discrete actions count from
        0.
      extras_spec: tree of specs of what each step shows besides, narrowed too; () for nothing.
    """

    observation_spec: Tree
    action_spec: Tree
    extras_spec: Tree

    @property
    def has_levels(self) -> bool:
        """Whether `reset` can begin a level: by its number, or else by a seed."""

    @property
    def announce(self) -> Announce | None:
        """A function that receives the next action; None if the environment does not need it.

        Its arguments are the leaves of the action (None for a reset) and whether all environments
        of the pool step together. It is called before any environment of the pool steps. It is for
        environments that wait for each other, such as the agents of one game.
        """

    @property
    def interrupt(self) -> Callable[[], None] | None:
        """A function that makes the step in progress raise; called from another thread.

        Environments with ``announce`` must have it.
        """

    def reset(self, seed: int | None, index: int | None = None) -> Tree:
        """Starts an episode and returns the observation.

        Args:
          seed: the seed of the environment's random numbers; None leaves them as they are.
          index: the number of the episode, or its level, if it is given and the environment has a
            method ``reset_with_index(index)``, which then starts it; the seed is not used.
        """

    def step(self, action: list[np.ndarray]) -> Outcome:
        """Takes the leaves of one action and returns the result."""

    def extras(self) -> Tree:
        """Returns the extras of the newest step, also of a reset; called if there are some."""

    def close(self) -> None:
        """Frees the environment's resources."""


def make_env(builder: EnvBuilder, options: Options, seed: int, where: str) -> SingleEnv:
    """Builds one environment and adapts it.

    Args:
      builder: returns a ``gymnasium.Env`` or a ``dm_env.Environment``.
      options: keyword arguments of the builder; ``seed`` is added if it has such a parameter.
      seed: seed of this environment.
      where: the name of the environment in error messages.

    Raises:
      EnvError: the builder returned another type of object, or a space that arrays cannot
          represent.
    """
    seeded = takes_seed(builder)
    if seeded and "seed" not in options:
        options = {**options, "seed": seed}
    env = builder(**options)
    # If Gymnasium has not been imported, this cannot be a Gymnasium environment.
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(env, gymnasium.Env):
        if wrong := versions.unknown("gymnasium"):
            raise EnvError(f"{where}: {wrong}")
        return _GymnasiumEnv(env, where)
    if isinstance(env, dm_env.Environment):
        if not seeded:
            _log.warning("%s: a dm_env builder without a 'seed' parameter cannot be seeded", where)
        return _DmEnv(env, where)
    raise EnvError(
        f"{where}: the builder must return a gymnasium.Env or a dm_env.Environment; "
        f"got {type(env).__name__}.{_if_in_jax(env)}"
    )


def _if_in_jax(env: object) -> str:
    """Returns advice on an environment in JAX, which has step(state, ...); "" for others."""
    try:
        takes_state = "state" in inspect.signature(env.step).parameters  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return ""
    return " Its step takes a state: environments in JAX need --env.type jax." * takes_state


def takes_seed(builder: Callable[..., object]) -> bool:
    """Returns whether a builder has a ``seed`` parameter."""
    try:
        return "seed" in inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return False


def _by_index(env: Any) -> Callable[..., Any] | None:
    """Returns the method ``reset_with_index`` of an environment, None if it has none.

    Only its own class counts. Older wrappers pass on the method of the environment within, which
    would be reset without them.
    """
    return env.reset_with_index if hasattr(type(env), "reset_with_index") else None


class _DmEnv:
    """A ``dm_env.Environment`` as a ``SingleEnv``."""

    def __init__(self, env: dm_env.Environment, where: str):
        self._env, self._where = env, where
        declared: Any = env
        self._action = Nest(env.action_spec())
        self.observation_spec = _checked_tree(env.observation_spec(), f"{where}: observation")
        self.action_spec = _checked_tree(env.action_spec(), f"{where}: action", acting=True)
        self.extras_spec: Tree = ()
        if hasattr(declared, "extras_spec"):
            self.extras_spec = _checked_tree(declared.extras_spec(), f"{where}: extras")
            self.extras: Callable[[], Tree] = declared.extras
        self.announce: Announce | None = self._announce if hasattr(env, "announce") else None
        self.interrupt = getattr(env, "interrupt", None)
        self._has_metrics = hasattr(env, "last_metrics")
        self.has_levels = _by_index(env) is not None

    def reset(self, seed: int | None, index: int | None = None) -> Tree:
        del seed  # the builder has received it
        by_index = None if index is None else _by_index(self._env)
        timestep = self._env.reset() if by_index is None else by_index(index)
        if timestep.step_type != dm_env.StepType.FIRST:
            raise EnvError(f"{self._where}: reset must give FIRST; got {timestep.step_type}.")
        return timestep.observation

    def step(self, action: list[np.ndarray]) -> Outcome:
        timestep = self._env.step(self._cast(action))
        # Seats of a game announce their actions.
        wrong = not isinstance(timestep, dm_env.TimeStep)
        if wrong or (timestep.first() and self.announce is None):
            raise EnvError(
                f"{self._where}: step must return a dm_env.TimeStep that is MID or LAST; "
                f"got {timestep!r:.200}."
            )
        info = self._env.last_metrics if self._has_metrics else {}
        if timestep.first():
            return Outcome(timestep.observation, 0.0, 1.0, last=False, first=True)
        return Outcome(
            timestep.observation, timestep.reward, timestep.discount, timestep.last(), info
        )

    def _cast(self, action: list[np.ndarray]) -> Tree:
        cast = [a.astype(s.dtype)[()] for a, s in zip(action, self._action.leaves, strict=True)]
        return self._action.unflatten(cast)

    def _announce(self, action: list[np.ndarray] | None, together: bool) -> None:
        self._env.announce(None if action is None else self._cast(action), together)

    def close(self) -> None:
        self._env.close()


def _checked_tree(tree: Tree, where: str, *, acting: bool = False) -> Tree:
    nest = Nest(tree)
    found = zip(nest.leaves, nest.paths, strict=True)
    return nest.unflatten([_checked(s, f"{where}{path}", acting=acting) for s, path in found])


def _checked(spec: object, where: str, *, acting: bool = False) -> specs.Array:
    """Returns ``spec`` with dtypes of 32 bits; raises EnvError unless it is an array spec."""
    if not isinstance(spec, specs.Array) or isinstance(spec, specs.StringArray):
        raise EnvError(f"{where}: specs must be dm_env.specs arrays of numbers; got {spec!r:.200}.")
    if acting and isinstance(spec, specs.DiscreteArray):
        made = specs.DiscreteArray(spec.num_values, np.int64, spec.name)
        spec = with_start(made, start_of(spec))
    return narrow_spec(spec, where)


def _declared(env: gymnasium.Env, name: str) -> Any:
    """Returns an attribute of an environment, or of one that it wraps; None if none has it."""
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return None


class _GymnasiumEnv:
    """A ``gymnasium.Env`` as a ``SingleEnv``."""

    announce = interrupt = None
    has_levels = True

    def __init__(self, env: gymnasium.Env, where: str):
        self._env, self._where = env, where
        self._observation = Nest(leaf_spaces(env.observation_space, f"{where}: observation_space"))
        self._action = Nest(leaf_spaces(env.action_space, f"{where}: action_space"))
        self.observation_spec = specs_of(
            env.observation_space, f"{where}: observation_space", acting=False
        )
        self.action_spec = specs_of(env.action_space, f"{where}: action_space", acting=True)
        self.extras_spec: Tree = ()
        self._extras: dict[str, FromZero] = {}
        self._info: Mapping[str, Any] = {}
        if (space := _declared(env, "extras_space")) is not None:
            self._declare_extras(space)
        self._casts = [action_cast(s) for s in self._action.leaves]
        self._from_zero = FromZero(self._observation, f"{where}: observation")

    def reset(self, seed: int | None, index: int | None = None) -> Tree:
        by_index = None if index is None else _by_index(self._env)
        result = self._env.reset(seed=seed) if by_index is None else by_index(index)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(
                f"{self._where}: reset() must return (observation, info); got {_brief(result)}."
            )
        self._info = result[1]
        return self._from_zero(result[0])

    def extras(self) -> Tree:
        lacks = [name for name in self._extras if name not in self._info]
        if lacks:
            raise EnvError(
                f"{self._where}: the info of each reset and step must have the entries of "
                f"extras_space; {', '.join(lacks)} is missing."
            )
        return {name: to(self._info[name]) for name, to in self._extras.items()}

    def _declare_extras(self, space: Any) -> None:
        from gymnasium import spaces

        where = f"{self._where}: extras_space"
        if not isinstance(space, spaces.Dict):
            raise EnvError(f"{where} must be a Dict of the entries of info; got {space!r:.200}.")
        self.extras_spec = specs_of(space, where, acting=False)
        self._extras = {
            name: FromZero(Nest(leaf_spaces(part, where)), f"{self._where}: extras[{name!r}]")
            for name, part in space.spaces.items()
        }

    def step(self, action: list[np.ndarray]) -> Outcome:
        cast = [to(a) for to, a in zip(self._casts, action, strict=True)]
        result = self._env.step(self._action.unflatten(cast))
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{self._where}: step() must return the 5 values (observation, reward, terminated, "
                f"truncated, info); got {_brief(result)}."
            )
        observation, reward, terminated, truncated, info = result
        self._info = info
        if type(terminated) is bool and type(truncated) is bool:  # the common case, checked fast
            return Outcome(
                self._from_zero(observation),
                reward,
                0.0 if terminated else 1.0,
                terminated or truncated,
                info,
            )
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                raise EnvError(f"{self._where}: {name} must be a bool; got {_brief(flag)}.")
        return Outcome(
            self._from_zero(observation),
            reward,
            0.0 if terminated else 1.0,
            bool(terminated or truncated),
            info,
        )

    def close(self) -> None:
        self._env.close()


class FromZero:
    """Makes the discrete values of observations count from 0, as their specs say."""

    def __init__(self, spaces: Nest, where: str):
        """Stores the spaces of the leaves, and the name of an observation in errors."""
        self._spaces, self._where = spaces, where
        self._shifted = any(np.any(start_of(space)) for space in spaces.leaves)

    def __call__(self, observation: Tree) -> Tree:
        """Returns an observation of the environment as rlstack has it.

        Raises:
          EnvError: the observation's structure differs from that of its space.
        """
        if not self._shifted:
            return observation
        try:
            leaves = self._spaces.flatten(observation, self._where)
        except TypeError as error:
            raise EnvError(str(error)) from error
        moved = [_moved(x, space) for x, space in zip(leaves, self._spaces.leaves, strict=True)]
        return self._spaces.unflatten(moved)


def _moved(value: Tree, space: LeafSpace) -> Tree:
    if not np.any(start_of(space)):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return value
    # The pool says what is wrong with an array of another shape, which may broadcast.
    return counted_from_zero(array, space) if array.shape == space.shape else value


def leaf_spaces(space: spaces.Space, where: str) -> Tree:
    """Returns a Gymnasium space as a tree of spaces of single arrays."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {k: leaf_spaces(v, f"{where}[{k!r}]") for k, v in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(leaf_spaces(v, f"{where}[{i}]") for i, v in enumerate(space.spaces))
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return space
    raise EnvError(
        f"{where}: must be Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these; "
        f"got {space!r:.200}. Flatten it in a wrapper."
    )


def specs_of(space: spaces.Space, where: str, *, acting: bool) -> Tree:
    """Returns a Gymnasium space of observations, or of actions, as a tree of specs."""
    nest = Nest(leaf_spaces(space, where))
    found = zip(nest.leaves, nest.paths, strict=True)
    return nest.unflatten(
        [narrow_spec(space_spec(leaf, acting), f"{where}{path}") for leaf, path in found]
    )


def space_spec(space: LeafSpace, acting: bool) -> specs.Array:
    """Returns the space as a spec; discrete values count from 0, and the spec has their start."""
    from gymnasium import spaces

    # Actions are counted from 0 in int32, whatever the space adds to them.
    integer = np.int64 if acting else space.dtype
    if isinstance(space, spaces.Discrete):
        return with_start(specs.DiscreteArray(int(space.n), integer), start_of(space))
    if isinstance(space, spaces.MultiDiscrete):
        low, high = np.zeros_like(space.nvec), space.nvec - 1
        return with_start(specs.BoundedArray(space.shape, integer, low, high), start_of(space))
    if isinstance(space, spaces.MultiBinary):
        return specs.BoundedArray(space.shape, space.dtype, 0, 1)
    dtype, low, high = np.dtype(space.dtype), np.asarray(space.low), np.asarray(space.high)
    if np.isinf(low).all() and np.isinf(high).all():
        return specs.Array(space.shape, dtype)
    if (low == low.flat[0]).all() and (high == high.flat[0]).all():
        low, high = np.asarray(low.flat[0]), np.asarray(high.flat[0])
    return specs.BoundedArray(space.shape, dtype, low, high)


def action_cast(space: LeafSpace) -> Callable[[np.ndarray], np.ndarray | np.generic]:
    """Returns a function that converts an action of the spec to a new action of the space."""
    start, dtype = start_of(space), space.dtype
    if not space.shape and np.issubdtype(dtype, np.integer):
        return lambda action: dtype.type(int(action) + int(start))
    if np.any(start):
        return lambda action: np.add(action, start, dtype=dtype)
    return lambda action: np.array(action, dtype)


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {value!r:.80}"


# JAX stores numbers of 64 bits in 32 bits. Pools do the same, so that a step has the dtypes that an
# agent's output, replay and a checkpoint have. Gymnasium's discrete spaces are int64 by default.
_NARROWER: dict[np.dtype, np.dtype] = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}


def narrow(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of 32 bits for one of 64 bits, and any other dtype as it is."""
    wide: np.dtype = np.dtype(dtype)
    return _NARROWER.get(wide, wide)


def narrow_spec(spec: specs.Array, where: str) -> specs.Array:
    """Returns the spec with at most 32 bits; bounds outside the dtype's range become its limits.

    Bounds of real numbers that stand for none are infinite, see `with_open_bounds`.

    Args:
      spec: the spec of an observation or an action.
      where: the name of the spec in errors.

    Raises:
      EnvError: a discrete spec has more values than the dtype.
    """
    dtype = narrow(spec.dtype)
    if isinstance(spec, specs.DiscreteArray):
        if spec.num_values - 1 > np.iinfo(dtype).max:
            raise EnvError(
                f"{where}: a discrete space must have at most 2**31 values, because JAX has "
                f"integers of 32 bits; got {spec.num_values}. Encode the number in several parts, "
                "as a MultiDiscrete space does."
            )
        made = specs.DiscreteArray(spec.num_values, dtype, spec.name)
        return with_start(made, start_of(spec))
    if dtype == spec.dtype:
        return with_open_bounds(spec)
    if isinstance(spec, specs.BoundedArray):
        low, high = (_narrow_bound(bound, dtype) for bound in (spec.minimum, spec.maximum))
        bounded = specs.BoundedArray(spec.shape, dtype, low, high, spec.name)
        return with_start(with_open_bounds(bounded), start_of(spec))
    return specs.Array(spec.shape, dtype, spec.name)


def _narrow_bound(bound: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        return np.clip(bound, np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)
    with np.errstate(over="ignore"):  # a bound above float32's largest number is infinite
        return np.asarray(bound, dtype)


def changed_by_cast(array: np.ndarray, cast: np.ndarray) -> bool:
    """Returns whether a cast from integers to other integers has changed a value."""
    if array.dtype.kind not in "iu" or np.can_cast(array.dtype, cast.dtype, "safe"):
        return False
    return bool((array != cast).any())


def too_wide(where: str, dtype: np.dtype, array: np.ndarray) -> EnvError:
    """Returns the error for integers that a cast has changed."""
    limits = np.iinfo(dtype)
    outside = array[(array > limits.max) | (array < limits.min)]
    return EnvError(
        f"{where} must fit {dtype}, because JAX has integers of 32 bits; got {outside.flat[0]}. "
        "Scale it in the environment, or declare a space of floats."
    )
