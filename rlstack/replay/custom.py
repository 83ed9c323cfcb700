"""Users' own samplers: a function that chooses among the items that a table holds.

A sampler is a function ``(rng, items, batch_size) -> indices``; `Items` has what it can choose by.
The config names a function without arguments that makes it, for example a class:

    class Newest:
        def __call__(self, rng, items, batch_size):
            return len(items) - 1 - rng.integers(0, min(1000, len(items)), batch_size)

The indices are ``[batch_size]`` ints in ``[0, len(items))``, with repetitions if the sampler likes.
A sampler that returns a pair, of the indices and of the probability with which it drew each
(``[batch_size]``, positive), gets importance weights as in prioritized sampling.

A sampler may have three more methods. ``update_priorities(keys, priorities)`` receives the
priorities that the learner gives to items; the keys are those of `Items.keys`. ``save()`` returns
the sampler's own state as a tree of arrays, always of the same structure, and ``load(tree)``
restores it; without them, a resumed run starts with a new sampler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rlstack.checks import WrongKindError
from rlstack.configs.replay import ReplayConfig
from rlstack.references import call_factory, check_callable, name_of
from rlstack.replay.memory import ring_shape
from rlstack.replay.prioritized import importance_weights
from rlstack.replay.samplers import Cells, Sampler
from rlstack.replay.step_counter import StepCounter, restore_into
from rlstack.replay.storage import StepRing
from rlstack.types import PyTree, StepType


class EpisodeReturns:
    """Returns of episodes by step, computed from the rewards in a ring of steps.

    A step's return is NaN until its episode has ended. It stays NaN if the first steps of the
    episode were never seen: after a gap, or if they were overwritten before `update` was called.
    """

    def __init__(self, rows: int, num_envs: int):
        """Makes the array for the last ``rows`` steps of each environment."""
        self._values = np.full((rows, num_envs), np.nan, np.float32)
        self._next = np.zeros(num_envs, np.int64)  # the next step to read
        self._begin = np.zeros(num_envs, np.int64)  # the first step of the running episode
        self._unbroken = np.zeros(num_envs, np.int64)  # the last gap seen
        self._sum = np.full(num_envs, np.nan)  # sum of the running episode's rewards

    def update(self, ring: StepRing, steps: np.ndarray, unbroken: np.ndarray) -> None:
        """Reads the steps that were added since the last call.

        Args:
          ring: the steps.
          steps: number of steps of each environment, [num_envs].
          unbroken: the first step after each environment's last gap, [num_envs].
        """
        rows = len(self._values)
        first = np.minimum(np.maximum(unbroken, steps - rows), steps)
        lost = (first > self._next) | (unbroken != self._unbroken)
        self._next = np.maximum(self._next, first)
        self._begin[lost] = self._next[lost]
        self._unbroken[:] = unbroken
        self._sum[lost] = np.nan
        while (due := np.flatnonzero(self._next < steps)).size:
            at = self._next[due]
            step_type = ring.step_type[at % ring.rows, due]
            begins = step_type == StepType.FIRST
            self._begin[due[begins]] = at[begins]
            self._sum[due[begins]] = 0.0
            self._sum[due] += ring.reward[at % ring.rows, due]
            self._values[at % rows, due] = np.nan
            ends = step_type == StepType.LAST
            for env, end in zip(due[ends].tolist(), at[ends].tolist(), strict=True):
                episode = np.arange(max(self._begin[env], end - rows + 1), end + 1)
                self._values[episode % rows, env] = self._sum[env]
            self._next[due] += 1

    def at(self, steps: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the returns of the episodes of these steps, [n] float32."""
        return self._values[steps % len(self._values), env_ids]

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        return [array.copy() for array in self._state()]

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        for array, saved in zip(self._state(), tree, strict=True):
            restore_into(array, saved, "the returns of all environments")

    def _state(self) -> list[np.ndarray]:
        return [self._values, self._next, self._begin, self._unbroken, self._sum]


_WANTED = "() -> sampler, a function (rng, items, batch_size) -> indices"


class Items:
    """The items that a table holds, oldest first; index i is the same item in every array.

    Do not write to the arrays. They are computed when they are first read.

    Attributes:
      keys: ``[N]`` int64, identify the items for as long as the buffer exists.
      inserted: ``[N]`` int64, the number of items inserted before each; it increases.
    """

    def __init__(
        self, keys: np.ndarray, inserted: np.ndarray, ring: StepRing, sampler: CustomSampler
    ):
        """Only `CustomSampler` calls this."""
        self.keys, self.inserted = keys, inserted
        self._ring, self._sampler = ring, sampler

    def __len__(self) -> int:
        return len(self.keys)

    @functools.cached_property
    def env_ids(self) -> np.ndarray:
        """The environment of each item, ``[N]`` int64."""
        return self.keys % self._sampler.num_envs

    @functools.cached_property
    def _steps(self) -> np.ndarray:
        """The number of each item's first step, after its context, in its environment's stream."""
        return self._sampler.first_steps(self.keys)

    @functools.cached_property
    def params_versions(self) -> np.ndarray:
        """The version of the params that acted in each item, ``[N]`` int64."""
        rows = (self._steps + 1) % self._ring.rows
        return self._ring.params_version[rows, self.env_ids].astype(np.int64)

    @functools.cached_property
    def episode_returns(self) -> np.ndarray:
        """The return of the episode in which each item starts, ``[N]`` float32.

        It is the sum of the stored rewards. It is NaN while the episode goes on, and where its
        first steps are unknown because the environment was restarted in it.
        """
        return self._sampler.episode_returns(self._steps, self.env_ids)


class CustomSampler(Sampler):
    """Draws items with replacement by calling the user's sampler."""

    def __init__(
        self,
        cfg: ReplayConfig,
        cells: int,
        seed: int,
        ring: Callable[[], StepRing],
        counter: StepCounter,
    ):
        """Makes the user's sampler.

        Args:
          cfg: the rules of the table.
          cells: number of items that the table can hold.
          seed: seed of the random generator that the sampler receives.
          ring: returns the table's steps.
          counter: counts the table's steps.

        Raises:
          ValueError: the factory cannot be imported.
          WrongKindError: the factory or the sampler that it returns has the wrong signature.
        """
        super().__init__(cfg, cells, seed)
        self._choose = make_sampler(cfg)
        self._ring, self._counter = ring, counter
        self.num_envs = len(counter.envs)
        self._inserted = np.zeros(cells, np.int64)  # insertion number of the item in each cell
        self._count = self._drawn = 0
        self._held: tuple[np.ndarray, np.ndarray] | None = None  # keys and `inserted`, in order
        self._returns = EpisodeReturns(ring_shape(cfg, self.num_envs).rows, self.num_envs)

    def insert(self, cells: Cells, keys: np.ndarray, valid: np.ndarray | None) -> int:
        """Puts items into their cells, and records their order."""
        added = super().insert(cells, keys, valid)
        before = np.arange(len(keys)) if valid is None else np.cumsum(valid) - valid
        self._inserted[cells] = self._count + before
        self._count += added
        self._held = None
        return added

    def remove(self, cells: np.ndarray) -> None:
        """Empties distinct, filled cells."""
        super().remove(cells)
        self._held = None

    def ready(self, batch_size: int) -> bool:
        """Whether there is an item."""
        return self.size > 0

    def draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Lets the user's sampler choose.

        Raises:
          WrongKindError: the sampler returned something else than indices of items.
        """
        items = self._items()
        chosen = self._choose(self.rng, items, batch_size)
        indices, probabilities = chosen if isinstance(chosen, tuple) else (chosen, None)
        indices = self._checked(np.asarray(indices), batch_size, len(items))
        if probabilities is None:
            return items.keys[indices], np.ones(batch_size, np.float32)
        probabilities = np.asarray(probabilities, np.float64)
        positive = probabilities.shape == (batch_size,) and bool((probabilities > 0).all())
        if not (positive and np.isfinite(probabilities).all()):
            raise self._error(f"[{batch_size}] positive probabilities", probabilities)
        return items.keys[indices], probabilities * len(items)

    def _items(self) -> Items:
        if self._held is None:
            cells = np.flatnonzero(self.key_at[: self._high] >= 0)
            # Stable sorting finds the ordered runs, of which there are few.
            cells = cells[np.argsort(self._inserted[cells], kind="stable")]
            self._held = self.key_at[cells], self._inserted[cells]
        return Items(self._held[0], self._held[1], self._ring(), self)

    def _checked(self, indices: np.ndarray, batch_size: int, size: int) -> np.ndarray:
        fits = indices.shape == (batch_size,) and indices.dtype.kind in "iu"
        if not fits or indices.min() < 0 or indices.max() >= size:
            raise self._error(
                f"[{batch_size}] ints in 0..{size - 1}, the indices of items", indices
            )
        return indices

    def _error(self, wanted: str, came: np.ndarray) -> WrongKindError:
        return WrongKindError(
            f"ReplayConfig: the sampler of sampler_factory {name_of(self._cfg.sampler_factory)} "
            f"must return {wanted}; got {came.dtype}{came.shape} {came.ravel()[:8]!r:.80}."
        )

    def first_steps(self, keys: np.ndarray) -> np.ndarray:
        """Returns the number of each item's first step after its context, [n] int64."""
        return keys // self.num_envs * self._cfg.step_period + self._cfg.context

    def episode_returns(self, steps: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the return of the episode of each of these steps, [n] float32."""
        counter = self._counter
        self._returns.update(self._ring(), counter.last_steps() + 1, counter.unbroken)
        return self._returns.at(steps, env_ids)

    def weigh(self, relative_probs: np.ndarray) -> np.ndarray:
        """Returns importance weights; ones if the sampler returned no probabilities."""
        weights = importance_weights(self._cfg, relative_probs, self._drawn)
        self._drawn += len(relative_probs)
        return weights

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Passes priorities of items still held to the user's sampler, if it takes them."""
        take = getattr(self._choose, "update_priorities", None)
        if take is not None:
            held = self.held(keys)
            take(keys[held], priorities[held])

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        save = getattr(self._choose, "save", None)
        return super().save() | {
            "inserted": self._inserted.copy(),
            "custom": np.array([self._count, self._drawn], np.int64),
            "returns": self._returns.save(),
            "sampler": () if save is None else save(),
        }

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        super().load(tree)
        restore_into(self._inserted, tree["inserted"], "the ages of items")
        self._count, self._drawn = (int(n) for n in tree["custom"])
        self._returns.load(tree["returns"])
        self._held = None
        load = getattr(self._choose, "load", None)
        if load is not None:
            load(tree["sampler"])


def make_sampler(cfg: ReplayConfig) -> Callable[[np.random.Generator, Items, int], Any]:
    """Makes the user's sampler of a config, and checks its signature.

    Raises:
      ValueError: the factory cannot be imported.
      WrongKindError: the factory or the sampler that it returns has the wrong signature.
    """
    hook = cfg.sampler_factory
    made: Any = call_factory("ReplayConfig: sampler_factory", hook, _WANTED)
    rule = f"ReplayConfig: sampler_factory {name_of(hook)} must be a function {_WANTED}"
    if isinstance(made, type):
        raise WrongKindError(f"{rule}; it returned the class {made.__name__}, not an object of it.")
    check_callable(f"{rule}; for what it returned", made, None, None, 1)
    return made
