"""How the requests of an inference service become one batch of few different sizes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlstack.acting.request_queue import Request
from rlstack.networks.base import dummy_timestep
from rlstack.types import PyTree, TimeStep


class Layout:
    """Structure, shapes and dtypes of the timesteps that a service takes."""

    def __init__(self, example: TimeStep) -> None:
        leaves, self.structure = jax.tree_util.tree_flatten(example)
        self.rows = [(tuple(leaf.shape[1:]), np.dtype(leaf.dtype)) for leaf in leaves]

    @classmethod
    def of(cls, obs_spec: PyTree) -> Layout:
        """Returns the layout of environments with these observations."""
        return cls(dummy_timestep(obs_spec))

    def leaves(self, timestep: TimeStep) -> list[np.ndarray]:
        """Returns the arrays of a timestep, or raises ValueError where it is not of this layout."""
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
    """Joins requests into one batch of few different sizes, in arrays that are used again."""

    def __init__(self, sizes: Sequence[int], num_envs: int) -> None:
        """Allocates nothing yet.

        Args:
          sizes: of batches, growing, up to ``num_envs``.
          num_envs: the id of padding: outside of the table, it is written to nowhere.
        """
        self._sizes = sizes
        self._num_envs = num_envs
        self._buffers: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
        self.sizes_seen: set[int] = set()

    def join(self, requests: Sequence[Request], layout: Layout) -> tuple[np.ndarray, TimeStep]:
        """Writes each request's ``start``; returns env ids ``[B]`` and timestep ``[B, ...]``.

        Rows beyond the last request's repeat the first row, so that they are sound data, under an
        id that is no environment's.
        """
        total = 0
        for request in requests:
            request.start = total
            total += len(request.env_ids)
        size = self._sizes[bisect.bisect_left(self._sizes, total)]
        self.sizes_seen.add(size)
        if len(requests) == 1 and total == size:
            return requests[0].env_ids, layout.structure.unflatten(requests[0].leaves)
        env_ids, buffers = self._buffer(size, layout)
        env_ids[total:] = self._num_envs
        for request in requests:
            rows = slice(request.start, request.start + len(request.env_ids))
            env_ids[rows] = request.env_ids
            for buffer, leaf in zip(buffers, request.leaves, strict=True):
                buffer[rows] = leaf
        if total < size:
            for buffer in buffers:
                buffer[total:] = buffer[0]
        return env_ids, layout.structure.unflatten(buffers)

    def _buffer(self, size: int, layout: Layout) -> tuple[np.ndarray, list[np.ndarray]]:
        if size not in self._buffers:
            rows: list[Any] = [np.zeros((size, *shape), dt) for shape, dt in layout.rows]
            self._buffers[size] = np.zeros(size, np.int32), rows
        return self._buffers[size]


def ladder(sizes: Sequence[int], max_batch: int, num_envs: int) -> list[int]:
    """Returns the sizes of batches, growing, up to ``num_envs``.

    Args:
      sizes: those wished; empty for powers of two from 8 to ``max_batch``. Doubles of the last
        follow, for requests that are greater.
      max_batch: environments at which a batch is full.
      num_envs: environments in all, which no batch exceeds.
    """
    wished = list(sizes)
    if not wished:
        size = 8  # below it a batch takes no less time
        while size < max_batch:
            wished.append(size)
            size *= 2
        wished.append(max_batch)
    while wished[-1] < num_envs:
        wished.append(2 * wished[-1])
    return sorted({min(size, num_envs) for size in wished})
