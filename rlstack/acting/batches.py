"""The batches of an inference service: which timesteps it accepts, and how requests are joined."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import jax
import numpy as np

from rlstack.acting.request_queue import Request
from rlstack.networks.base import dummy_timestep
from rlstack.types import PyTree, TimeStep


class TimestepSpec:
    """The structure, shapes and dtypes of the timesteps that a service accepts."""

    def __init__(self, example: TimeStep) -> None:
        leaves, self.structure = jax.tree_util.tree_flatten(example)
        self.rows = [(tuple(leaf.shape[1:]), np.dtype(leaf.dtype)) for leaf in leaves]

    @classmethod
    def of(cls, obs_spec: PyTree, extras_spec: PyTree = ()) -> TimestepSpec:
        """Returns the spec of environments with these observations and extras."""
        return cls(dummy_timestep(obs_spec, extras_spec=extras_spec))

    def leaves(self, timestep: TimeStep) -> list[np.ndarray]:
        """Returns the arrays of a timestep; raises ValueError if it differs from this spec."""
        leaves, structure = jax.tree_util.tree_flatten(timestep)
        where = "InferenceService.inference"
        if structure != self.structure:
            raise ValueError(
                f"{where}: timesteps must have the structure {self.structure}; got {structure}."
            )
        size = len(timestep.step_type)
        for leaf, (shape, dtype) in zip(leaves, self.rows, strict=True):
            if leaf.shape != (size, *shape) or leaf.dtype != dtype:
                path = next(
                    p for p, x in jax.tree_util.tree_leaves_with_path(timestep) if x is leaf
                )
                raise ValueError(
                    f"{where}: timestep{jax.tree_util.keystr(path)} must be {dtype} "
                    f"{[size, *shape]}; got {leaf.dtype} {list(leaf.shape)}."
                )
        return leaves


class BatchJoiner:
    """Joins requests into one batch of one of a few sizes, in arrays that are reused."""

    def __init__(self, sizes: Sequence[int], num_envs: int) -> None:
        """Prepares to join requests; buffers are allocated on first use.

        Args:
          sizes: batch sizes in ascending order, up to ``num_envs``.
          num_envs: the id of padding rows, which is outside the table of agent states.
        """
        self._sizes = sizes
        self._num_envs = num_envs
        self._buffers: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
        self.sizes_seen: set[int] = set()

    def join(self, requests: Sequence[Request], spec: TimestepSpec) -> tuple[np.ndarray, TimeStep]:
        """Writes each request's ``start``; returns env ids ``[B]`` and timestep ``[B, ...]``.

        Padding rows repeat the first row, so that they are valid data.
        """
        total = 0
        for request in requests:
            request.start = total
            total += len(request.env_ids)
        size = self._sizes[bisect.bisect_left(self._sizes, total)]
        self.sizes_seen.add(size)
        if len(requests) == 1 and total == size:
            return requests[0].env_ids, spec.structure.unflatten(requests[0].leaves)
        env_ids, buffers = self._buffer(size, spec)
        env_ids[total:] = self._num_envs
        for request in requests:
            rows = slice(request.start, request.start + len(request.env_ids))
            env_ids[rows] = request.env_ids
            for buffer, leaf in zip(buffers, request.leaves, strict=True):
                buffer[rows] = leaf
        if total < size:
            for buffer in buffers:
                buffer[total:] = buffer[0]
        return env_ids, spec.structure.unflatten(buffers)

    def _buffer(self, size: int, spec: TimestepSpec) -> tuple[np.ndarray, list[np.ndarray]]:
        if size not in self._buffers:
            rows = [np.zeros((size, *shape), dt) for shape, dt in spec.rows]
            self._buffers[size] = np.zeros(size, np.int32), rows
        return self._buffers[size]


def padded_sizes(sizes: Sequence[int], max_batch: int, num_envs: int) -> list[int]:
    """Returns the sizes to which batches are padded, in ascending order, up to ``num_envs``.

    Args:
      sizes: the first sizes; empty for powers of two from 8 to ``max_batch``. For larger requests,
          the last size is doubled repeatedly.
      max_batch: environments in a full batch.
      num_envs: the total number of environments, which is the largest size.
    """
    wished = list(sizes)
    if not wished:
        size = 8  # smaller batches take no less time
        while size < max_batch:
            wished.append(size)
            size *= 2
        wished.append(max_batch)
    while wished[-1] < num_envs:
        wished.append(2 * wished[-1])
    return sorted({min(size, num_envs) for size in wished})
