"""The devices of this process, by their index in ``jax.local_devices()``.

May import: rlstack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

# JAX 0.5 loads functions with collectives from its persistent cache, but they then damage memory or
# never end.
_LOADS_COLLECTIVES = jax.__version_info__ >= (0, 6)
MORE_ON_A_CPU = "On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N gives N of them."


def local(indices: Sequence[int], field: str) -> list[jax.Device]:
    """Returns the devices with these indices.

    Args:
      indices: indices into ``jax.local_devices()``.
      field: the name of the config field that holds the indices, for the error.

    Raises:
      ValueError: there is no device with one of the indices.
    """
    found = jax.local_devices()
    check(indices, len(found), field)
    return [found[index] for index in indices]


def mesh_of(indices: Sequence[int], field: str) -> Mesh | None:
    """Returns a mesh of devices with the axis ``batch``; None if there are no indices.

    Args:
      indices: indices into ``jax.local_devices()``.
      field: the name of the config field that holds the indices, for the error.

    Raises:
      ValueError: there is no device with one of the indices.
    """
    found = local(indices, field)
    if len(found) > 1:
        compile_collectives_anew()
    return Mesh(np.array(found), ("batch",)) if found else None


def compile_collectives_anew() -> None:
    """Turns off JAX's persistent cache in this process if cached collectives would fail.

    Call it before compiling a function that runs on several devices.
    """
    if not _LOADS_COLLECTIVES:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # else JAX keeps what it read at the first compilation


def check(indices: Sequence[int], count: int, field: str) -> None:
    """Checks indices of devices.

    Args:
      indices: indices of devices.
      count: the number of existing devices.
      field: the name of the config field that holds the indices, for the error.

    Raises:
      ValueError: an index is not less than ``count``.
    """
    for index in indices:
        if index >= count:
            have = f"the only local device is 0; got {index}"
            if count > 1:
                have = f"there are {count} local devices, 0 to {count - 1}; got {index}"
            raise ValueError(f"{field} must name devices of this machine: {have}. {MORE_ON_A_CPU}")


def by_device(
    function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns a function that each device of a mesh runs with its parts of the arguments.

    Replicated results must be equal on all devices; this is not checked.

    Args:
      function: the function that each device calls with its parts; its collectives name the axes of
        the mesh.
      mesh: the devices.
      in_specs: trees of ``jax.sharding.PartitionSpec`` that say how to divide the arguments.
      out_specs: trees of ``jax.sharding.PartitionSpec`` that say how to join the parts of the
        results.
    """
    if hasattr(jax, "shard_map"):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    from jax.experimental.shard_map import shard_map  # JAX 0.5

    return shard_map(function, mesh, in_specs, out_specs, check_rep=False)
