"""One environment with auto-reset and checks, and the arrays it writes its timesteps to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from dm_env import specs

from rlstack.checks import EnvCrash, EnvError, place_of
from rlstack.envs.adapters import (
    EnvBuilder,
    Options,
    Outcome,
    changed_by_cast,
    make_env,
    too_wide,
)
from rlstack.envs.episode_metrics import numbers_of
from rlstack.envs.nest import Nest, StepNest, Tree
from rlstack.envs.watch import Hangs, Watch
from rlstack.specs import LEVEL, with_level

# The values of rlstack.types.StepType, which worker processes cannot import: it needs JAX.
FIRST, MID, LAST = 0, 1, 2

SpecSignature = list[tuple[str, tuple[int, ...], str]]  # path, shape and dtype of every leaf
Result = TypeVar("Result")


class TimestepBuffer(NamedTuple):
    """The timesteps of N environments; row i belongs to environment i."""

    step_type: np.ndarray  # [N] int32
    reward: np.ndarray  # [N] float32
    discount: np.ndarray  # [N] float32
    leaves: list[np.ndarray]  # the leaves of observation and extras (`StepNest`), each [N, ...]


def empty_buffer(leaves: list[specs.Array], size: int) -> TimestepBuffer:
    """Returns a buffer for ``size`` environments and leaves of these specs."""
    return TimestepBuffer(
        np.zeros(size, np.int32),
        np.zeros(size, np.float32),
        np.ones(size, np.float32),
        [np.zeros((size, *s.shape), s.dtype) for s in leaves],
    )


class AutoResetEnv:
    """One environment with checks, which resets itself on the step after LAST.

    Attributes:
      shown: the structure and specs of observation and extras.
      action: the action's structure and specs.
    """

    def __init__(
        self,
        builder: EnvBuilder,
        options: Options,
        env_id: int,
        seed: int,
        step_info: bool = False,
        index: int | None = None,
        levels: int = 0,
    ):
        """Builds the environment; ``seed`` also seeds its first reset.

        With ``step_info``, `step` returns the numbers of every step's info. With ``index``, the
        first episode is the one of this number, if the environment has ``reset_with_index``. With
        ``levels``, the actions choose the levels of later episodes, see `rlstack.specs`; the
        first one has the level ``seed % levels``.

        Raises:
          EnvError: the environment breaks the rules of its interface.
          EnvCrash: the builder raised an exception.
        """
        self.where = f"Env {env_id} ({builder_name(builder)})"
        self._env = self._call("the builder", make_env, builder, options, seed, self.where)
        action, extras = self._env.action_spec, self._env.extras_spec
        self._level: int | None = None  # of the episode
        self._seed: int | None = seed
        self._index = index
        if levels:
            if not self._env.has_levels:
                raise EnvError(
                    f"{self.where}: with levels, a dm_env environment must have a method "
                    "reset_with_index(level); it has none. Add it, or set env.levels 0."
                )
            action, extras = with_level(action, extras, levels, self.where)
            self._seed = self._index = self._level = seed % levels
        self.shown = StepNest(self._env.observation_spec, extras)
        self.action = Nest(action)
        self._over = True
        self._step_info = step_info

    def reset(self, buffer: TimestepBuffer, row: int) -> None:
        """Starts an episode and writes its FIRST step to ``row`` of the buffer."""
        self._over = True  # if the reset fails, the next step tries again
        observation = self._call("reset", self._env.reset, self._seed, self._index)
        self._seed = self._index = None
        self._put(buffer, row, observation)
        buffer.step_type[row], buffer.reward[row], buffer.discount[row] = FIRST, 0.0, 1.0
        self._over = False

    def step(
        self, action: list[np.ndarray], buffer: TimestepBuffer, row: int
    ) -> dict[str, float] | None:
        """Takes the leaves of one action and writes ``row``; after LAST it resets instead.

        Returns:
          The numbers in the info of this step if it ends an episode, else None. With ``step_info``,
          those of every step but FIRST.
        """
        if self._level is not None:
            *action, level = action
            if self._over:
                self._seed = self._index = self._level = int(level)
        if self._over:
            self.reset(buffer, row)
            return None
        outcome: Outcome = self._call("step", self._env.step, action)
        reward = self._scalar("reward", outcome.reward)
        discount = self._scalar("discount", outcome.discount)
        if not 0.0 <= discount <= 1.0:
            raise EnvError(f"{self.where}: the discount must lie in [0, 1]; got {discount}.")
        self._put(buffer, row, outcome.observation)
        buffer.step_type[row] = LAST if outcome.last else FIRST if outcome.first else MID
        buffer.reward[row], buffer.discount[row] = reward, discount
        self._over = outcome.last
        if not outcome.last and not self._step_info:
            return None
        return numbers_of(outcome.info) if isinstance(outcome.info, Mapping) else {}

    @property
    def announces(self) -> bool:
        """Whether the environment needs its next action before any other environment steps."""
        return self._env.announce is not None

    def announce(self, action: list[np.ndarray] | None, together: bool) -> None:
        """Passes on the next action, None for a reset; see ``SingleEnv.announce``."""
        if self._env.announce is not None:
            if action is not None and self._level is not None:
                action = action[:-1]
            action = None if self._over else action
            self._call("announce", self._env.announce, action, together)

    def interrupt(self) -> None:
        """Makes a step in progress raise, if the environment can."""
        if self._env.interrupt is not None:
            self._call("interrupt", self._env.interrupt)

    def close(self) -> None:
        """Closes the environment.

        Raises:
          EnvCrash: the environment raised an exception.
        """
        self._call("close", self._env.close)

    def _call(self, what: str, function: Callable[..., Result], *args: object) -> Result:
        try:
            return function(*args)
        except (EnvError, KeyboardInterrupt, Hangs):
            raise
        except BaseException as error:  # also a SystemExit, which would end the run without a word
            text = f"{self.where}: {what} raised {type(error).__name__}: {error}"
            raise EnvCrash(f"{text}{_place(error)}") from error

    def _scalar(self, name: str, value: Tree) -> float:
        # Pools check whole batches of rewards for NaN and infinity, unless that is turned off.
        if type(value) is float:  # the common case, checked fast
            return value
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = None
        if number is None or np.ndim(value) != 0:
            came = f"{type(value).__name__} {value!r:.80}"
            raise EnvError(f"{self.where}: the {name} must be a scalar; got {came}.")
        return number

    def _extras(self) -> Tree:
        if self._level is None:
            return self._call("extras", self._env.extras)
        own = self._call("extras", self._env.extras) if self._env.extras_spec else {}
        return {**own, LEVEL: np.int32(self._level)}

    def _put(self, buffer: TimestepBuffer, row: int, observation: Tree) -> None:
        shown = self.shown
        try:
            values = shown.observation.flatten(observation, f"{self.where}: observation")
            if shown.extras.leaves:
                extras = self._extras()
                values = [*values, *shown.extras.flatten(extras, f"{self.where}: extras")]
        except TypeError as error:
            raise EnvError(str(error)) from error
        for i, (spec, value) in enumerate(zip(shown.leaves, values, strict=True)):
            target = buffer.leaves[i]
            if (  # the common case, checked fast
                type(value) is np.ndarray
                and value.dtype == target.dtype
                and value.shape == spec.shape
            ):
                target[row] = value
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
                    f"{self.where}: {shown.paths[i]} must be what its space "
                    f"declares, {spec.dtype} of shape {spec.shape}; got {array.dtype} of shape "
                    f"{array.shape}."
                )
            target[row] = array
            if changed_by_cast(array, target[row]):
                raise too_wide(f"{self.where}: {shown.paths[i]}", target.dtype, array)


def build_all(
    builder: EnvBuilder,
    options: Options,
    seeds: dict[int, int],
    step_info: bool = False,
    first_index: int | None = None,
    levels: int = 0,
    watch: Watch | None = None,
) -> dict[int, AutoResetEnv]:
    """Builds one environment per id and seed in ``seeds``; closes all of them if one fails.

    With ``first_index``, the first episode of environment i has the number ``first_index + i``.
    With ``levels``, actions choose among so many levels.

    Raises:
      EnvError: an environment breaks the rules, or its specs differ from those of the first one.
      EnvCrash: the builder raised an exception.
    """
    envs: dict[int, AutoResetEnv] = {}
    try:
        for env_id, seed in seeds.items():
            if watch is not None:
                watch.at = env_id
            index = None if first_index is None else first_index + env_id
            env = AutoResetEnv(builder, options, env_id, seed, step_info, index, levels)
            envs[env_id] = env
            head = next(iter(envs.values()))
            if spec_signature(env) != spec_signature(head):
                raise EnvError(
                    f"{env.where}: all environments of a pool must have the same specs; "
                    f"got {spec_signature(env)}, but {head.where} has {spec_signature(head)}."
                )
    except BaseException:
        close_all(envs, watch)
        raise
    return envs


def close_all(envs: dict[int, AutoResetEnv], watch: Watch | None = None) -> None:
    """Closes every environment, even if some raise; then raises the first exception."""
    errors = []
    for env_id, env in envs.items():
        if watch is not None:
            watch.at = env_id
        try:
            env.close()
        except (EnvCrash, EnvError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def spec_signature(env: AutoResetEnv) -> SpecSignature:
    """Returns path, shape and dtype of every leaf, to compare environments."""
    return [
        (path, tuple(spec.shape), str(spec.dtype))
        for nest in (env.shown.observation, env.action, env.shown.extras)
        for path, spec in zip(nest.paths, nest.leaves, strict=True)
    ]


def _place(error: BaseException) -> str:
    """Returns the user's line that an error passed, else the line that raised it."""
    place = place_of(error)
    return "" if place.startswith(f"{__file__}:") else f" (in {place})"  # of a wrong call


def builder_name(builder: str | EnvBuilder) -> str:
    """Returns the name of an environment in messages."""
    if isinstance(builder, str):
        return builder
    name = getattr(builder, "name", None) or getattr(builder, "__name__", None)
    return str(name or type(builder).__name__)
