"""Item processors: users' own functions that change items where they are drawn.

A processor is a function ``(rng, item, episode) -> item`` of the items of a batch, for example one
that gives goals in hindsight (`rlstack.replay.hindsight`). ``rng.random(shape)`` returns numbers in
[0, 1). ``item`` is the trajectory ``[T+1, B, ...]``, and the result has the same structure and
shapes. `Episode` has the other steps of the episode in which each item begins. The config names a
function that makes the processor from ``item_processor_options``, such as a class:

    class EpisodeEnds:
        def __call__(self, rng, item, episode):
            left = episode.xp.minimum(episode.after, 10) / 10  # [B]
            reward = item.timestep.reward * left
            return item._replace(timestep=item.timestep._replace(reward=reward))

The process that holds the items calls it with arrays of numpy. A compiled loop traces it with those
of JAX. ``episode.xp`` is the module of either, so that one function serves both. It must draw all
random numbers from ``rng``, and must not write to its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from rlstack.checks import WrongKindError, place_of
from rlstack.configs.replay import ReplayConfig
from rlstack.references import check_callable, load_hook, name_of
from rlstack.replay.memory import ring_shape
from rlstack.replay.step_counter import StepCounter, restore_into
from rlstack.replay.storage import StepRing
from rlstack.types import Array, PyTree, StartSpec, StepType, TimeStep, Trajectory, Transition

_FIELD = "ReplayConfig: item_processor"
_WANTED = "(rng, item, episode) -> item"


class Rng(Protocol):
    """Draws random numbers, as ``numpy.random.Generator`` does."""

    def random(self, size: tuple[int, ...]) -> Array:
        """Returns numbers in [0, 1), of this shape."""


class Episode:
    """The steps of the episodes in which the items of a batch begin.

    Attributes:
      xp: the module of the arrays, ``numpy`` or ``jax.numpy``.
      before: ``[B]`` ints, the number of steps of each episode that the replay holds from before
        the item's first step.
      after: ``[B]`` ints, the number of those from after it, at least T unless the episode ends in
        the item. If the episode goes on, more may follow later.
    """

    def __init__(self, xp: Any, before: Array, after: Array, read: Callable[[Array], TimeStep]):
        """Only replays call this; ``read`` returns steps by their distance from the first one."""
        self.xp, self.before, self.after = xp, before, after
        self._read = read

    def at(self, offset: Array) -> TimeStep:
        """Returns other steps of the episodes.

        Args:
          offset: ``[B]`` or ``[k, B]`` ints, the distance of each step from the item's first one.
            Those outside of [-before, after] are moved to the nearest step inside.

        Returns:
          The steps, ``[B, ...]`` or ``[k, B, ...]``.
        """
        return self._read(self.xp.clip(offset, -self.before, self.after))


Processor = Callable[[Rng, Trajectory, Episode], Trajectory]
Change = tuple[np.ndarray, Array]  # a leaf of a batch, and its new values


def make_processor(cfg: ReplayConfig) -> Processor:
    """Makes the item processor of a config, and checks its signature.

    Raises:
      ValueError: the factory cannot be imported.
      WrongKindError: it does not take these options, or what it returned is no item processor.
    """
    hook, options = cfg.item_processor, cfg.item_processor_options
    factory = load_hook(_FIELD, hook)
    rule = f"{_FIELD} {name_of(hook)} must be a function (**options) -> processor"
    if not callable(factory):
        raise WrongKindError(f"{rule}; got {type(factory).__name__}.")
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise WrongKindError(f"{rule}; it does not take the options {options}: {error}.") from None
    except ValueError:  # written in C, without a signature
        pass
    made: Any = factory(**options)
    rule = f"{rule}, a function {_WANTED}; for what it returned"
    if isinstance(made, type):
        raise WrongKindError(f"{rule}, the class {made.__name__}: return an object of it.")
    check_callable(rule, made, None, None, None)
    return made


def check_processor(cfg: ReplayConfig, spec: Transition) -> None:
    """Calls the config's item processor for two items of such steps.

    Args:
      cfg: the rules of the table.
      spec: shapes and dtypes of one environment's step.

    Raises:
      ValueError: the processor does not fit these steps.
    """
    processor, steps = make_processor(cfg), cfg.unroll_length + 1

    def zeros(leaf: Any) -> np.ndarray:
        return np.zeros((1 if isinstance(leaf, StartSpec) else steps, 2, *leaf.shape), leaf.dtype)

    item: Any = jax.tree.map(zeros, spec)
    item.timestep.step_type[1:] = StepType.MID
    episode = Episode(
        np,
        np.zeros(2, np.int64),
        np.full(2, cfg.unroll_length),
        lambda offset: jax.tree.map(lambda x: x[offset, np.arange(2)], item.timestep),
    )
    try:
        made = processor(np.random.default_rng(0), item, episode)
    except Exception as error:
        shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", spec.timestep)
        raise ValueError(
            f"{_FIELD} {name_of(cfg.item_processor)} must take items of the steps {shown}; it "
            f"raised {type(error).__name__}: {error} (in {place_of(error)})"
        ) from error
    checked_item(cfg, item, made)


def checked_item(cfg: ReplayConfig, item: Trajectory, made: Trajectory) -> list[Array]:
    """Returns the leaves of a processor's result.

    Raises:
      WrongKindError: they do not have the structure or the shapes of the item.
    """
    paths, wanted = jax.tree_util.tree_flatten_with_path(item)
    leaves, structure = jax.tree.flatten(made)
    rule = f"{_FIELD} {name_of(cfg.item_processor)} must return an item like the one that it gets"
    if structure != wanted:
        raise WrongKindError(f"{rule}, {wanted}; got {structure}.")
    for (path, old), new in zip(paths, leaves, strict=True):
        if np.shape(new) != old.shape:
            raise WrongKindError(
                f"{rule}; got {np.shape(new)} instead of {old.shape} for "
                f"{jax.tree_util.keystr(path)}."
            )
    return leaves


def last_steps(
    xp: Any, begin_of: Callable[[Array], Array], starts: Array, newest: Array, rows: int
) -> Array:
    """Returns the last step that is held of the episode of each of these steps.

    The first steps of episodes do not decrease from one step to the next, so it is found by
    halving.

    Args:
      xp: the module of the arrays.
      begin_of: returns the first step of the episode of each of some steps, ``[B]``.
      starts: the numbers of the steps, ``[B]``.
      newest: the newest step of the environment of each, ``[B]`` or ``[]``.
      rows: the number of steps held of each environment.
    """
    found = starts
    for power in reversed(range(rows.bit_length())):
        ahead = found + (1 << power)
        inside = (ahead <= newest) & (begin_of(xp.minimum(ahead, newest)) <= starts)
        found = xp.where(inside, ahead, found)
    return found


class Begins:
    """The first step of the episode of each step, read from the step types in a ring.

    Steps from before a gap that were not read before it stand alone: a ring does not say how they
    hang together.
    """

    def __init__(self, rows: int, num_envs: int):
        """Makes the array for the last ``rows`` steps of each environment."""
        self.rows, self._envs = rows, np.arange(num_envs)
        self._values = np.zeros((rows, num_envs), np.int64)
        self._next = np.zeros(num_envs, np.int64)  # the next step to read
        self._begin = np.zeros(num_envs, np.int64)  # the first step of the running episode

    def update(self, ring: StepRing, steps: np.ndarray, unbroken: np.ndarray) -> None:
        """Reads the steps that were added since the last call.

        Args:
          ring: the steps.
          steps: number of steps of each environment, [num_envs].
          unbroken: the first step after each environment's last gap, [num_envs].
        """
        first = np.maximum(self._next, steps - self.rows)
        count = int((steps - first).max())
        if count <= 0:
            return
        at = first + np.arange(count)[:, None]
        begins = ring.step_type[at % ring.rows, self._envs] == StepType.FIRST
        begins |= at <= unbroken
        begins[0] |= first > self._next  # steps before it were overwritten unread
        found = np.where(begins, at, self._begin)
        np.maximum.accumulate(found, axis=0, out=found)
        row, env = np.nonzero(at < steps)
        self._values[at[row, env] % self.rows, env] = found[row, env]
        self._next = np.maximum(self._next, steps)
        self._begin = self._values[(self._next - 1) % self.rows, self._envs]

    def at(self, steps: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the first step of the episode of each of these steps, [n] int64."""
        return self._values[steps % self.rows, env_ids]

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        return [array.copy() for array in (self._values, self._next, self._begin)]

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        for array, saved in zip((self._values, self._next, self._begin), tree, strict=True):
            restore_into(array, saved, "the first steps of episodes")


class Processing:
    """Calls an item processor for the batches of a table."""

    def __init__(self, cfg: ReplayConfig, num_envs: int):
        """Makes the processor.

        Raises:
          ValueError, WrongKindError: as `make_processor` says.
        """
        self._cfg, self._processor = cfg, make_processor(cfg)
        self.begins = Begins(ring_shape(cfg, num_envs).rows, num_envs)

    def process(
        self,
        rng: np.random.Generator,
        ring: StepRing,
        counter: StepCounter,
        trajectory: Trajectory,
        starts: np.ndarray,
        env_ids: np.ndarray,
    ) -> tuple[list[Change], np.ndarray]:
        """Calls the processor; the trajectory stays as it is.

        Args:
          rng: the generator of the processor's draws.
          ring: the steps.
          counter: counts the steps of each environment.
          trajectory: the items, ``[T+1, B, ...]``, or ``[n, T+1, B, ...]`` for several batches.
          starts: the first steps of the items, ``[B]`` or ``[n, B]``.
          env_ids: their environments, in the same shape.

        Returns:
          The changes, and the oldest step that was read for each item, in the shape of ``starts``.
        """
        newest = counter.last_steps()
        self.begins.update(ring, newest + 1, counter.unbroken)
        changes: list[Change] = []
        oldest = starts.copy()
        if starts.ndim == 1:
            changes += self._process_one(rng, ring, newest, trajectory, starts, env_ids, oldest)
            return changes, oldest
        for i in range(len(starts)):
            one = jax.tree.map(lambda x, i=i: x[i], trajectory)
            changes += self._process_one(rng, ring, newest, one, starts[i], env_ids[i], oldest[i])
        return changes, oldest

    def _process_one(
        self,
        rng: np.random.Generator,
        ring: StepRing,
        newest: np.ndarray,
        item: Trajectory,
        starts: np.ndarray,
        env_ids: np.ndarray,
        oldest: np.ndarray,
    ) -> list[Change]:
        """Calls the processor for one batch, and lowers ``oldest`` to what it reads."""
        begins, newest = self.begins, newest[env_ids]

        def begin_of(steps: Any) -> np.ndarray:
            return begins.at(steps, env_ids)

        def read(offset: Any) -> TimeStep:
            steps = starts + offset
            np.minimum(oldest, steps.reshape(-1, len(oldest)).min(axis=0), out=oldest)
            return ring.timesteps(steps, env_ids)

        last: Any = last_steps(np, begin_of, starts, newest, begins.rows)
        before = starts - np.maximum(begin_of(starts), newest + 1 - begins.rows)
        made = self._processor(rng, item, Episode(np, before, last - starts, read))
        pairs = zip(jax.tree.leaves(item), checked_item(self._cfg, item, made), strict=True)
        return [(old, new) for old, new in pairs if new is not old]
