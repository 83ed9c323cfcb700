"""Copies params from an accelerator to actors on the CPU, in one transfer per version."""

from __future__ import annotations

import jax
import numpy as np

from rlstack.acting.packing import Packing
from rlstack.types import Params


class OnHost:
    """Copies params to the host in one array, instead of one for each layer.

    Each transfer from an accelerator waits tens of microseconds, however small it is, and an
    actor-critic has a dozen arrays. Params on a CPU stay where they are: numpy reads their memory.
    One thread at a time may call it.

    Attributes:
      transfers: number of arrays copied so far.
      transferred_bytes: number of bytes of these arrays.
    """

    def __init__(self, *, from_cpu: bool = False) -> None:
        """Prepares to copy params.

        Args:
          from_cpu: whether to copy params that are on a CPU, too. It shows on a CPU what happens
            with an accelerator.
        """
        self._from_cpu = from_cpu
        self._packing = Packing()
        self._pack = jax.jit(lambda params: self._packing.pack(0, params))
        self.transfers = self.transferred_bytes = 0

    def __call__(self, params: Params) -> Params:
        """Returns the params as numpy arrays or, if they are on a CPU, as they are."""
        if not (self._from_cpu or any(map(_is_remote, jax.tree.leaves(params)))):
            return params
        packed = self._pack(params)
        arrays: list[np.ndarray] = jax.device_get(packed)  # starts all copies, then waits
        self.transfers += len(arrays)
        self.transferred_bytes += sum(array.nbytes for array in arrays)
        return self._packing.unpack(0, arrays)


def _is_remote(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and any(d.platform != "cpu" for d in leaf.devices())
