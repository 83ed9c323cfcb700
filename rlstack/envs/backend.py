"""The interface of a backend, the config of a pool, and the checks of actions, ids and results.

A backend is one way to run many environments (EnvPool, a loop, threads, processes). It trusts its
arguments: ``SyncEnv`` and ``AsyncEnv`` check every action and every id before they call it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import ClassVar, Protocol

import jax
import numpy as np
from dm_env import specs
from numpy.typing import ArrayLike

from rlstack.checks import EnvError
from rlstack.envs.adapters import Options
from rlstack.envs.nest import Nest, StepNest
from rlstack.envs.values import Range, brief, is_limited, own, own_spec
from rlstack.specs.masks import no_choice_warning, without_choice
from rlstack.types import Array, EnvSpec, PyTree, TimeStep

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """Runs the environments of a pool.

    Every environment is either *held* (the caller has received its last row) or *in flight*.
    ``reset`` puts all environments in flight, ``send`` puts some in flight, and ``recv`` returns
    the environments that finish first.
    """

    spec: EnvSpec
    action_dtypes: list[np.dtype]  # one per leaf of the action spec; `send` takes these
    action_offsets: list[int]  # one per leaf; added to the spec's action to get the environment's

    def reset(self) -> None:
        """Starts a new episode in every environment; none may be in flight."""

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps the environments ``env_ids`` ([n] int32, None for all) with these action leaves."""

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns the ids and rows of ``wait_num`` environments as soon as they are done."""

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the numbers that came with the last LAST of each of these environments.

        The caller has received that LAST, and no later one. Each number has a name and one value
        for each of the environments that gave it.
        """

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the numbers that came with the last step received of each of these environments.

        The config has ``step_info``. After a FIRST, the numbers are those of an earlier step.
        """

    def stats(self) -> dict[str, int]:
        """Returns counters since construction."""

    def close(self) -> None:
        """Ends threads and processes and frees memory; safe to call twice."""


def spec_fields(shown: StepNest, action: Nest) -> tuple[EnvSpec, list[np.dtype], list[int]]:
    """Returns ``spec``, ``action_dtypes`` and ``action_offsets`` of a backend in Python."""
    observation, extras = shown.unflatten(shown.leaves)
    spec = EnvSpec(observation, action.unflatten(action.leaves), extras)
    return spec, [np.dtype(s.dtype) for s in action.leaves], [0] * len(action.leaves)


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """The options of a pool; each backend ignores the fields of the others."""

    size: int
    "Number of environments."
    wait_num: int
    "Number of rows that one recv returns; equal to size for a synchronous pool."
    seed: int = 0
    "Environment i is seeded with seed + i."
    options: Options = dataclasses.field(default_factory=dict)
    "Keyword arguments of the builder, gymnasium.make or envpool.make."
    num_workers: int | None = None
    "Number of threads or processes; None chooses by the number of cores."
    max_restarts: int = 10
    "Process pools: number of worker restarts within restart_window; one more ends the pool."
    restart_window: float = 300.0
    "Process pools: seconds of work, without hangs and starts, after which a restart is forgotten."
    step_timeout: float = 60.0
    """Seconds without a finished step after which a worker process is replaced, and the other pools
    of Python environments fail."""
    start_timeout: float = 120.0
    """Longest time in seconds for a worker process to build its environments, and for the other
    pools to build one."""
    check_finite: bool = True
    "Whether a reward or observation that is NaN or infinite is an error."
    step_info: bool = False
    "Whether to keep the numbers in the info of every step, not only of the last one of an episode."
    first_index: int | None = None
    """The first episode of environment i is the one of number first_index + i, if the environment
    has a method reset_with_index; None starts it as any other."""
    levels: int = 0
    """Number of levels that actions choose among, see `rlstack.specs`; 0 for an environment
    that chooses by itself."""

    def __post_init__(self) -> None:
        _check_int("size", self.size, 1)
        _check_int("wait_num", self.wait_num, 1)
        _check_int("seed", self.seed, 0)
        _check_int("max_restarts", self.max_restarts, 0)
        _check_int("levels", self.levels, 0)
        if self.num_workers is not None:
            _check_int("num_workers", self.num_workers, 1)
        if self.wait_num > self.size:
            raise ValueError(
                f"Env pool: wait_num must be at most size={self.size}; got {self.wait_num}."
            )
        if self.seed + self.size >= 2**31:
            raise ValueError(
                f"Env pool: seed + size must be less than 2**31; got seed={self.seed} and "
                f"size={self.size}."
            )
        for name in ("restart_window", "step_timeout", "start_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise ValueError(
                    f"Env pool: {name} must be a positive, finite number of seconds; got {seconds}."
                )


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"Env pool: {name} must be an integer of at least {least}; got {value!r}.")


class ActionCheck:
    """Checks one leaf of a batch of actions and converts it to what the environment takes.

    Integers outside the spec are an error. Real numbers outside the bounds are clipped, because
    Gaussian policies overshoot by design. NaN is an error.
    """

    def __init__(self, spec: specs.Array, path: str, dtype: np.dtype, offset: int, copy: bool):
        self._where = f"Env pool: action{path}"
        self._shape = tuple(spec.shape)
        self._dtype = np.dtype(dtype)
        self._offset = offset
        self._copy = copy
        self._integer = np.issubdtype(self._dtype, np.integer) or self._dtype == np.bool_
        self._range: Range | None = Range(spec) if self._integer else None
        low, high = getattr(spec, "minimum", -math.inf), getattr(spec, "maximum", math.inf)
        self._bounded = bool(np.any(np.isfinite(low)) or np.any(np.isfinite(high)))
        if self._range is None:
            self._low, self._high = (np.asarray(x, self._dtype) for x in (low, high))

    def __call__(self, value: PyTree, rows: int) -> np.ndarray:
        """Returns ``value`` as ``[rows, *shape]``, in the environment's dtype and range.

        Raises:
          TypeError: the action is an integer and ``value`` holds real numbers.
          ValueError: wrong shape, an integer out of range, or NaN.
        """
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape != (rows, *self._shape):
            raise ValueError(
                f"{self._where}: must have shape {(rows, *self._shape)}, one row per environment; "
                f"got {array.shape}."
            )
        kind = array.dtype.kind
        if kind not in ("iub" if self._integer else "fiu"):
            rule = "integers" if self._integer else "real numbers"
            raise TypeError(f"{self._where}: must hold {rule}; got dtype {array.dtype}.")
        if self._range is not None:
            if not self._range.holds(array):
                raise self._outside(array, self._range)
            if self._offset:
                return np.add(array, self._offset, dtype=self._dtype)
        elif self._bounded:
            array = np.minimum(np.maximum(array, self._low), self._high)
        # NaN makes the sum of squares NaN, which is the cheapest test.
        if not self._integer and math.isnan(np.vdot(array, array)):
            raise ValueError(
                f"{self._where}: must not hold NaN; got it in row(s) "
                f"{np.unique(np.argwhere(np.isnan(array))[:, 0]).tolist()}."
            )
        if self._copy or array.dtype != self._dtype or not array.flags.carray:
            return np.array(array, self._dtype, order="C")
        return array

    def _outside(self, array: np.ndarray, allowed: Range) -> ValueError:
        row = tuple(np.argwhere(allowed.outside(array))[0])
        return ValueError(
            f"{self._where}: must lie in [{brief(allowed.low)}, {brief(allowed.high)}]; "
            f"got {array[row]} in row {row[0]}."
        )


def action_checks(backend: Backend, copy: bool) -> tuple[Nest, list[ActionCheck]]:
    """Returns the structure of a backend's actions and one check per leaf.

    Args:
      backend: the backend that receives the checked actions.
      copy: whether a checked action must own its memory, because the backend keeps the array.
    """
    nest = Nest(backend.spec.action)
    checks = [
        ActionCheck(spec, path, dtype, offset, copy)
        for spec, path, dtype, offset in zip(
            nest.leaves, nest.paths, backend.action_dtypes, backend.action_offsets, strict=True
        )
    ]
    return nest, checks


def check_ids(env_ids: ArrayLike, size: int) -> np.ndarray:
    """Returns ``env_ids`` as a new int32 vector of distinct ids in [0, size).

    Raises:
      TypeError: the ids are not integers.
      ValueError: the ids are no vector, are empty, are out of range, or repeat.
    """
    ids = np.asarray(env_ids)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(
            f"AsyncEnv.send: env_ids must be a non-empty vector; got shape {ids.shape}."
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(f"AsyncEnv.send: env_ids must be integers; got dtype {ids.dtype}.")
    listed = ids.tolist()
    if min(listed) < 0 or max(listed) >= size:
        raise ValueError(f"AsyncEnv.send: env_ids must lie in [0, {size}); got {listed}.")
    if len(set(listed)) != len(listed):
        raise ValueError(f"AsyncEnv.send: env_ids must name each environment once; got {listed}.")
    return np.array(ids, np.int32)


class MaskCount:
    """Counts the steps whose action mask marks no action as legal, and warns of the first.

    Attributes:
      total: number of such steps; None if the environments have no action mask.
    """

    _warned: ClassVar[set[str]] = set()  # names of environments; each evaluation has a new pool

    def __init__(self, name: str, spec: EnvSpec):
        """Prepares the count for environments of this name."""
        self._name, self._find = name, without_choice(spec)
        self.total = None if self._find is None else 0
        self._batches = 0

    def __call__(self, env_ids: np.ndarray, timestep: TimeStep) -> None:
        """Looks at the steps ``[B, ...]`` of the environments ``env_ids``."""
        if self._find is None or self.total is None:
            return
        self._batches += 1
        found = self._find(timestep)
        if not found.any():
            return
        self.total += int(np.count_nonzero(found))
        if self._name not in self._warned:
            self._warned.add(self._name)
            env_id = env_ids[int(np.argmax(found))]
            _log.warning(no_choice_warning(env_id, self._name, f"step {self._batches - 1:,}"))


class StepCheck:
    """Checks whole batches of steps, so that it takes about a microsecond for each leaf.

    Rewards, observations and extras must be finite, and integers in them within their bounds.
    """

    def __init__(self, name: str, spec: EnvSpec, finite: bool = True):
        """Prepares the check.

        Args:
          name: the name of the environments in errors.
          spec: the spec of the environments.
          finite: whether NaN and infinity are errors.
        """
        nest = StepNest(spec.observation, spec.extras)
        self._name, self._finite = name, finite
        named = list(enumerate(zip(nest.leaves, nest.paths, strict=True)))
        self._real = [
            (i, path)
            for i, (spec, path) in named
            if finite and np.issubdtype(spec.dtype, np.floating)
        ]
        self._limited = [
            (i, path, Range(spec), spec) for i, (spec, path) in named if is_limited(spec)
        ]
        self._checks_leaves = bool(self._real or self._limited)
        self._bare = nest.observation.bare and not nest.extras.leaves

    def __call__(self, env_ids: np.ndarray, timestep: TimeStep) -> None:
        """Checks the steps ``[B, ...]`` of the environments ``env_ids``.

        Raises:
          EnvError: a reward, an observation or an extra is NaN or infinite, or an observation or an
            extra is outside its space.
        """
        if self._finite and not _is_finite(timestep.reward):
            raise self._not_finite(env_ids, timestep.reward, "the reward")
        if not self._checks_leaves:
            return
        shown = timestep.observation, timestep.extras
        leaves = [timestep.observation] if self._bare else jax.tree.leaves(shown)
        for i, path in self._real:
            if not _is_finite(leaves[i]):
                raise self._not_finite(env_ids, leaves[i], path)
        for i, path, allowed, spec in self._limited:
            if not allowed.holds(leaves[i]):
                raise self._outside(env_ids, leaves[i], path, allowed, spec)

    def _not_finite(self, env_ids: np.ndarray, array: Array, what: str) -> EnvError:
        where, value = self._first(env_ids, array, ~np.isfinite(array))
        return EnvError(
            f"{where[0]}: {what} must be finite; got {value}{where[1]}. Mend the environment, or "
            "turn the check off with check_finite=False (--env.check-finite False)."
        )

    def _outside(
        self, env_ids: np.ndarray, array: np.ndarray, what: str, allowed: Range, spec: specs.Array
    ) -> EnvError:
        where, value = self._first(env_ids, own(array, spec), allowed.outside(array))
        theirs = Range(own_spec(spec))
        return EnvError(
            f"{where[0]}: {what} must lie in its space, integers in [{brief(theirs.low)}, "
            f"{brief(theirs.high)}]; got {value}{where[1]}. Mend the environment, or declare the "
            "space that it has."
        )

    def _first(
        self, env_ids: np.ndarray, array: Array, bad: np.ndarray
    ) -> tuple[tuple[str, str], object]:
        """Returns the environment and the index of the first bad number, and the number."""
        first = tuple(np.argwhere(bad)[0].tolist())
        index = f" at index {first[1:]}" if first[1:] else ""
        return (f"Env {env_ids[first[0]]} ({self._name})", index), array[first]


def _is_finite(array: Array) -> bool:
    # The sum of squares is not finite if a term is not; computing it is the cheapest test. It may
    # also be too large for its dtype: then look closely.
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())
