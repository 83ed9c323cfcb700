"""Storage of stacked frames, with each frame stored only once.

An observation of Atari contains the last k frames, so every frame is part of k observations. In
this storage a step contains only its newest frame and the age of its episode. A sample rebuilds the
stacks from the frames of its own window. The window therefore begins k - 1 steps before the item.

The stack at FIRST may repeat the first frame k times (EnvPool, Gymnasium), be padded with zeros, or
continue the previous frames (EnvPool's episodes of single lives). Rebuilt stacks equal the added
ones; other kinds of stacks are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayBuffer, Sample
from rlstack.replay.memory import BUFFERS
from rlstack.replay.step_counter import restore_into
from rlstack.types import Batch, Logs, PyTree, StartSpec, StepType, Trajectory, Transition

_FIRST, _LAST = int(StepType.FIRST), int(StepType.LAST)
_ZEROS = 128  # added to the age if the episode began with a stack of zeros
_CHECKED_STEPS = 256  # the stacks of this number of first steps are all checked, not only at FIRST

StackTest = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of stacks and the previous ones


class Frames(NamedTuple):
    """The stored part of an observation with stacks."""

    leaves: list[np.ndarray]  # leaves of the observation; of a stack only the newest frame
    age: np.ndarray  # [] uint8: number of earlier frames of the episode, at most k - 1


class FrameStacks:
    """Reduces stacks to their newest frames, and rebuilds stacks; only one thread may use it."""

    def __init__(self, cfg: ReplayConfig, num_envs: int, spec: Transition) -> None:
        """Finds the stacks: observation leaves with three or more axes, the first of length k.

        Args:
          cfg: the config of the table; its ``frame_stack`` is k.
          num_envs: number of environments that the owner of this object adds steps of.
          spec: the spec of one environment's step, from `rlstack.acting.actor.transition_spec`.

        Raises:
          ValueError: there are no stacks.
        """
        self._depth = cfg.frame_stack
        self._context = self._depth - 1
        self.cfg = dataclasses.replace(
            cfg,
            frame_stack=0,
            context=self._context,
            unroll_length=cfg.unroll_length + self._context,
            period=cfg.step_period,
        )
        leaves, self._treedef = jax.tree_util.tree_flatten(spec.timestep.observation)
        self._stacked = [len(x.shape) >= 3 and x.shape[0] == self._depth for x in leaves]
        if not any(self._stacked):
            raise ValueError(
                f"ReplayConfig: frame_stack is {self._depth}, so a leaf of the observation must be "
                f"a stack [{self._depth}, height, width]; got {[x.shape for x in leaves]}. "
                "Set frame_stack to 0."
            )
        newest = [
            jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if stacked else x
            for x, stacked in zip(leaves, self._stacked, strict=True)
        ]
        self.spec = _with_observation(
            spec,
            Frames(newest, jax.ShapeDtypeStruct((), np.dtype(np.uint8))),  # type: ignore[arg-type]
        )
        self.spec = jax.tree.map(self._after_context, self.spec)
        self._envs = np.arange(num_envs)
        self._age = np.full(num_envs, self._context, np.uint8)
        self._known = np.zeros(num_envs, bool)  # whether `_last` has the previous step
        self._last = [np.zeros((num_envs, *x.shape), x.dtype) for x in leaves]
        self._steps = 0
        self._buffers: dict[tuple[int, int, tuple[int, ...]], np.ndarray] = {}
        self._next = 0

    def _after_context(self, leaf: Any) -> Any:
        if isinstance(leaf, StartSpec):
            return StartSpec(leaf.shape, leaf.dtype, self._context)
        return leaf

    def split(self, env_ids: np.ndarray | None, transition: Transition) -> Transition:
        """Returns the transition with frames instead of stacks.

        Raises:
          ValueError: a stack neither continues the previous one nor begins an episode.
        """
        leaves = [
            np.asarray(x) for x in self._treedef.flatten_up_to(transition.timestep.observation)
        ]
        ids = self._envs if env_ids is None else np.asarray(env_ids)
        step_type = np.asarray(transition.timestep.step_type)
        first = step_type == _FIRST
        age = self._age[ids]
        age = np.where(age % _ZEROS < self._context, age + 1, age).astype(np.uint8)
        checks_all = self._steps < _CHECKED_STEPS
        checked = np.flatnonzero(first | checks_all)
        if checked.size:
            age[checked] = self._ages(ids[checked], leaves, checked, first, age[checked])
        self._steps += 1
        self._age[ids] = age
        # Keep only stacks that FIRST may continue: copying all of them would cost as much as it
        # saves.
        self._remember(ids, leaves, np.flatnonzero((step_type == _LAST) | checks_all))
        newest = [
            leaf[:, -1] if stacked else leaf
            for leaf, stacked in zip(leaves, self._stacked, strict=True)
        ]
        return _with_observation(transition, Frames(newest, age))

    def _remember(self, ids: np.ndarray, leaves: list[np.ndarray], rows: np.ndarray) -> None:
        """Stores the stacks of some rows, and deletes those of the other environments."""
        self._known[ids] = False
        self._known[ids[rows]] = True
        for last, leaf, stacked in zip(self._last, leaves, self._stacked, strict=True):
            if stacked and rows.size:
                last[ids[rows]] = leaf[rows]

    def _ages(
        self,
        ids: np.ndarray,
        leaves: list[np.ndarray],
        rows: np.ndarray,
        first: np.ndarray,
        age: np.ndarray,
    ) -> np.ndarray:
        """Checks the stacks of the steps and returns the ages of their episodes."""
        repeats = self._all(lambda now, _: now[:, :-1] == now[:, -1:], ids, leaves, rows)
        zeros = self._all(lambda now, _: now[:, :-1] == 0, ids, leaves, rows)
        follows = self._all(lambda now, last: now[:, :-1] == last[:, 1:], ids, leaves, rows)
        begins = first[rows]
        age = np.where(repeats & begins, 0, np.where(zeros & begins, _ZEROS, age))
        continues = ~(begins & (repeats | zeros))
        broken = self._known[ids] & continues & ~follows
        if broken.any():
            raise ValueError(
                f"ReplayBuffer.add: with frame_stack {self._depth}, a stack must continue the "
                "one before, or at FIRST repeat one frame or be padded with zeros; got another one "
                f"from environments {ids[broken].tolist()!r:.100}. Set --replay.frame-stack 0."
            )
        return age.astype(np.uint8)

    def _all(
        self, test: StackTest, ids: np.ndarray, leaves: list[np.ndarray], rows: np.ndarray
    ) -> np.ndarray:
        """Returns whether all stacks of each step pass a test, [n] bool."""
        found = np.ones(len(rows), bool)
        for last, leaf, stacked in zip(self._last, leaves, self._stacked, strict=True):
            if stacked:
                found &= test(leaf[rows], last[ids]).reshape(len(rows), -1).all(1)
        return found

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Deletes the stored last steps of these environments.

        Items after a gap begin late enough that they need no frame from before the gap.
        """
        ids = self._envs if env_ids is None else env_ids
        self._known[ids] = False
        self._age[ids] = self._context

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        last = [x for x, stacked in zip(self._last, self._stacked, strict=True) if stacked]
        return {"age": self._age.copy(), "known": self._known.copy(), "last": [*map(np.copy, last)]}

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        restore_into(self._age, tree["age"], "age, one number for each environment,")
        restore_into(self._known, tree["known"], "known, one for each environment,")
        last = [x for x, stacked in zip(self._last, self._stacked, strict=True) if stacked]
        for held, saved in zip(last, tree["last"], strict=True):
            restore_into(held, saved, "the last frames of all environments")

    def join(self, sample: Sample) -> Sample:
        """Returns the sample with stacks instead of frames, without the context steps.

        The memory of the stacks is reused after two more calls.
        """
        stored = sample.batch.trajectory
        frames, steps = stored.timestep.observation, slice(self._context, None)
        where, padded = self._frames_of(np, frames.age[steps])
        self._next = (self._next + 1) % BUFFERS
        leaves = []
        for i, (leaf, stacked) in enumerate(zip(frames.leaves, self._stacked, strict=True)):
            if not stacked:
                leaves.append(leaf[steps])
                continue
            out = self._buffer(i, (*where.shape, *leaf.shape[2:]), leaf.dtype)
            np.take(leaf.reshape(-1, *leaf.shape[2:]), where, axis=0, out=out, mode="clip")
            if padded.any():
                out[padded] = 0
            leaves.append(out)
        return Sample(Batch(self._joined(stored, leaves), sample.batch.weights), sample.keys)

    def joined(self, stored: Trajectory) -> Trajectory:
        """Returns items ``[T+1, B, ...]`` as `join` does, in a function that JAX traces."""
        frames, steps = stored.timestep.observation, slice(self._context, None)
        where, padded = self._frames_of(jnp, frames.age[steps])
        leaves = []
        for leaf, stacked in zip(frames.leaves, self._stacked, strict=True):
            if stacked:
                stacks = leaf.reshape(-1, *leaf.shape[2:])[where]
                zero = padded.reshape(padded.shape + (1,) * (leaf.ndim - 2))
                leaves.append(jnp.where(zero, jnp.zeros((), leaf.dtype), stacks))
            else:
                leaves.append(leaf[steps])
        return self._joined(stored, leaves)

    def _frames_of(self, xp: Any, ages: Any) -> tuple[Any, Any]:
        """Returns the frames of each stack, as indices of all frames, and which of them are zeros.

        Args:
          xp: the module of the arrays.
          ages: ``[T+1, B]``, as stored.

        Returns:
          Two arrays ``[T+1, B, k]``.
        """
        length, batch_size = ages.shape
        back = self._context - xp.arange(self._depth)  # [k], oldest first
        age = (ages % _ZEROS)[..., None].astype(int)
        at = xp.arange(length)[:, None, None] + self._context - xp.minimum(back, age)
        where = at * batch_size + xp.arange(batch_size)[:, None]
        return where, (ages >= _ZEROS)[..., None] & (back > age)

    def _joined(self, stored: Trajectory, leaves: list[Any]) -> Trajectory:
        """Returns items without the context steps, and with these leaves of the observations."""
        trajectory = jax.tree.map(
            lambda x: x[self._context :] if len(x) > 1 else x, _with_observation(stored, ())
        )
        return _with_observation(trajectory, self._treedef.unflatten(leaves))

    def _buffer(self, leaf: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        key = (leaf, self._next, shape)
        if key not in self._buffers:
            if len(self._buffers) > 16 * len(self._stacked):  # rounds have several sizes
                self._buffers.clear()
            self._buffers[key] = np.empty(shape, dtype)
        return self._buffers[key]


def _with_observation(transition: Transition, observation: PyTree) -> Transition:
    timestep = transition.timestep._replace(observation=observation)
    return transition._replace(timestep=timestep)


class StackedReplay:
    """A ``ReplayBuffer`` that wraps another one: ``add`` splits stacks and ``sample`` joins them.

    The first k - 1 items of an environment, and the first k - 1 after a gap, are missing, because
    their first stacks would need frames that were never added. Batches are copies in reused memory,
    also with fifo.
    """

    def __init__(self, stacks: FrameStacks, stored: ReplayBuffer) -> None:
        """Wraps a buffer.

        Args:
          stacks: splits and joins the stacks; this buffer must be its only user.
          stored: a buffer that was made with ``stacks.cfg`` and ``stacks.spec``.
        """
        self._stacks, self.stored = stacks, stored

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments."""
        self.stored.add(env_ids, self._stacks.split(env_ids, transition), timeout)

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Marks a break: the next steps of these environments do not continue the previous ones."""
        self._stacks.gap(env_ids)
        self.stored.gap(env_ids)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every completed item can be sampled."""
        self.stored.flush(timeout)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now."""
        return self.stored.can_sample(batch_size)

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws items."""
        return self._stacks.join(self.stored.sample(batch_size, timeout))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys."""
        self.stored.update_priorities(keys, priorities)

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items."""
        self.stored.write_back(keys, updates)

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params."""
        self.stored.set_params_version(version)

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples, as the inner buffer does."""
        return map(self._stacks.join, self.stored.make_dataset(stop))

    def stats(self) -> Logs:
        """Returns sizes, counters and lag."""
        return self.stored.stats()

    def save(self) -> PyTree:
        """Returns the whole state as numpy arrays."""
        return {"stored": self.stored.save(), "stacks": self._stacks.save()}

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        self.stored.load(tree["stored"])
        self._stacks.load(tree["stacks"])

    def close(self) -> None:
        """Frees the storage."""
        self.stored.close()
