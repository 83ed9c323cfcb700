"""The memory that a replay buffer needs, and the memory that is available."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.types import StartSpec, Transition

BUFFERS = 2  # number of returned batches that keep their values


class RingShape(NamedTuple):
    """The size of the ring that stores an environment's steps."""

    rows: int  # steps held of each environment
    mirror: int  # rows at the end that repeat the first rows
    items: int  # items held of each environment


def ring_shape(cfg: ReplayConfig, num_envs: int) -> RingShape:
    """Returns the ring that holds the items of a config.

    The item that starts at step s is removed when the item that starts ``items`` periods later is
    completed, at step ``s + items * period + T``. Until then none of its steps may be overwritten.

    Raises:
      ValueError: the ring holds so few items that it might never hold a batch.
    """
    period, items = cfg.step_period, cfg.items_per_env(num_envs)
    # If items may not start at LAST, at most every second start is lost, because FIRST follows
    # LAST.
    needed = cfg.batch_size * (2 if cfg.starts == "not_last" else 1)
    if (cfg.sampler == "fifo" or cfg.times_limit) and items * num_envs < needed:
        raise ValueError(
            f"ReplayConfig: the table must have room for {needed} items; otherwise it might never "
            f"hold a batch; got room for {items} of each of {num_envs} environments. Raise "
            "max_size or max_size_per_env, or lower batch_size."
        )
    rows = items * period + cfg.unroll_length
    if cfg.sampler != "fifo":
        return RingShape(rows, 0, items)
    return RingShape(-(-rows // period) * period, cfg.unroll_length - period + 1, items)


def bytes_needed(cfg: ReplayConfig, example: Transition, num_envs: int) -> int:
    """Returns the bytes that an `InProcessReplay` needs.

    Args:
      cfg: the rules of the table.
      example: a transition with leaves ``[n, ...]`` for any n: arrays, or results of
        ``jax.eval_shape``.
      num_envs: number of environments.
    """
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), example)
    return spec_bytes(cfg, spec, num_envs)


def spec_bytes(cfg: ReplayConfig, spec: Transition, num_envs: int) -> int:
    """Returns the bytes that an `InProcessReplay` needs for steps of a `transition_spec`."""
    return ring_bytes(cfg, num_envs, spec) + reader_bytes(cfg, num_envs, spec)


def ring_bytes(cfg: ReplayConfig, num_envs: int, spec: Transition) -> int:
    """Returns the bytes of the rings of an `InProcessReplay`."""
    leaves = jax.tree_util.tree_leaves(spec)
    rows, mirror, _ = ring_shape(cfg, num_envs)
    each = [rows_of(x, cfg.step_period, rows, mirror) * leaf_bytes(x) for x in leaves]
    return num_envs * sum(each)


def rows_of(leaf: Any, period: int, rows: int, mirror: int = 0) -> int:
    """Returns the rows of a leaf's ring: of a `StartSpec`, one for each start of ``rows`` steps."""
    return -(-rows // period) if isinstance(leaf, StartSpec) else rows + mirror


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes of a leaf in one step of one environment, from its shape and dtype."""
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def item_bytes(cfg: ReplayConfig, spec: Transition) -> int:
    """Returns the bytes of an item in a batch."""
    leaves, steps = jax.tree_util.tree_leaves(spec), cfg.unroll_length + 1
    return sum((1 if isinstance(x, StartSpec) else steps) * leaf_bytes(x) for x in leaves)


def reader_bytes(cfg: ReplayConfig, num_envs: int, spec: Transition) -> int:
    """Returns the bytes of everything except the rings: returned batches and the sampler's arrays.

    Args:
      cfg: the rules of the table.
      num_envs: number of environments.
      spec: the spec of one environment's step.
    """
    batches = BUFFERS * cfg.batch_size * item_bytes(cfg, spec)
    per_item = 8 + 4 * (cfg.times_limit > 0)  # priorities included
    per_item += {"fifo": 16, "uniform": 0, "prioritized": 9}[cfg.sampler]
    sizes = ring_shape(cfg, num_envs)
    if cfg.sampler_factory:  # the order of insertion, and the return of each step's episode
        per_item += 8
        batches += 4 * sizes.rows * num_envs
    if cfg.item_processor:  # the first step of each step's episode
        batches += 8 * sizes.rows * num_envs
    return batches + sizes.items * num_envs * per_item


def available_memory() -> int | None:
    """Returns the bytes that this process can still allocate, None if unknown."""
    found = [_mem_available(), _cgroup_available()]
    known = [size for size in found if size is not None]
    return min(known) if known else None


def _mem_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_available() -> int | None:
    """Returns the bytes that the control group (version 2) still allows."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        fields = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        cached = int(fields.get("inactive_file", 0))
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError):
        return None


def check_memory(num_bytes: int, where: str, folder: str | None = None) -> None:
    """Raises if an allocation does not fit into memory.

    Args:
      num_bytes: size of the allocation.
      where: the caller, for the message.
      folder: a memory file system, such as /dev/shm, that must have the same free space.

    Raises:
      ValueError: less memory is free.
    """
    limits = [("memory", available_memory())]
    if folder is not None:
        status = os.statvfs(folder)
        limits.append((folder, status.f_bavail * status.f_frsize))
    for name, available in limits:
        if available is not None and num_bytes > available:
            raise ValueError(
                f"{where}: its {num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB) must fit into "
                f"what is free of {name}; got {available:,} bytes. Lower max_size or "
                "max_size_per_env, or use a machine with more."
            )
