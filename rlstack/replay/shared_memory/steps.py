"""The shared data of a replay buffer's processes: rings of steps, and each side's progress.

There is no lock. Each number below has one writer at a time. It is one aligned word of 8 bytes, so
no reader sees it half written. A step is published in this order and read in the reverse order:

1. the writer sets ``reserved[env] = g + 1``: the old content of row ``g % rows`` is invalid;
2. it sets the step's mark, and copies step ``g`` into that row;
3. it sets ``steps[env] = g + 1``: now step ``g`` may be read.

A reader uses only steps below ``steps``. It copies them and then reads ``reserved``. If a writer
has begun to overwrite a row by then, the reader discards the row and draws again. So if a writer
ends at any time, it leaves at most one row that is never read. The environment's next writer begins
with a gap and overwrites this row.

This requires that stores become visible in program order and that loads happen in program order.
x86 guarantees both for ordinary stores, and the C library's memcpy ends its streaming stores with a
fence. On other machines, acquiring and releasing a lock issues the barriers (`memory_fence`).
"""

from __future__ import annotations

import platform
import threading
from typing import NamedTuple

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.memory import leaf_bytes, reader_bytes, ring_shape, rows_of
from rlstack.replay.shared_memory.block import Block
from rlstack.replay.storage import StepRing
from rlstack.types import PyTree, Transition

_ALIGN = 64  # bytes: a cache line
_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")

# Indices into `Counters.head`: numbers of the whole buffer, all set by the reader. ASKED: the batch
# size of the last refused request, 0 after a granted one. STARVED: whether a rule other than
# samples_per_insert refused it. NEWS: the number of changes that could end a writer's wait.
CLOSED, OWNER_PID, OWNER_START, SIZE, INSERTS, SAMPLES, ASKED, STARVED, NEWS = range(9)
_HEAD = 16

DEAD = -1  # in `blocked`: the writer has ended
ENDED = -2  # in `start_time`: the writer has released the environment


def memory_fence() -> None:
    """Keeps loads and stores in order on machines that may reorder them."""
    if not _IN_ORDER:
        lock = threading.Lock()
        with lock:
            pass


class Counters(NamedTuple):
    """Numbers of each environment, ``[num_envs]`` int64, and of the buffer, ``head``."""

    head: np.ndarray  # [16], indexed by the names above
    # Set by the writer of the environment:
    reserved: np.ndarray  # steps below this minus `rows` are overwritten or about to be
    steps: np.ndarray  # steps below this may be read
    unbroken: np.ndarray  # the first step after the last gap
    blocked: np.ndarray  # 1 + NEWS at the last wait of `add`, 0 while it does not wait
    waited: np.ndarray  # microseconds waited, at the writer's first environment
    pid: np.ndarray  # process of the writer, 0 for none
    start_time: np.ndarray  # when that process started
    token: np.ndarray  # identifies the writer in that process
    # Set by the reader:
    seen: np.ndarray  # steps below this are counted in SIZE and INSERTS
    released: np.ndarray  # the first step that a queued item needs


class Columns(NamedTuple):
    """The shared arrays of consecutive environments, as views ``[n]`` or ``[rows, n, ...]``.

    Making a view takes as long as a small copy, so a writer keeps those of its environments.
    """

    reserved: np.ndarray
    steps: np.ndarray
    marks: np.ndarray
    step_type: np.ndarray
    rings: list[np.ndarray]


def ring_rows(cfg: ReplayConfig, num_envs: int) -> int:
    """Returns the number of stored steps of each environment.

    A queued fifo item is never overwritten, because its writer waits. Other items may be
    overwritten during a copy. Spare rows make this rare: one sixteenth of the rows, between 4 and
    64. A writer may add this number of steps while a batch is copied.
    """
    sizes = ring_shape(cfg, num_envs)
    rows = sizes.items * cfg.step_period + cfg.unroll_length
    return rows if cfg.sampler == "fifo" else rows + min(max(rows // 16, 4), 64)


class SharedSteps:
    """The arrays in one block, for a config, a number of environments and a spec.

    Attributes:
      counters: the counters of the buffer, see `Counters`.
      ring: the steps, ``[rows, num_envs, ...]``.
      marks: ``[rows, num_envs]`` int64, ``g + 1`` where an unbroken item ends at step ``g``.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, spec: Transition, block: Block):
        self.spec = spec
        rows, leaves = ring_rows(cfg, num_envs), jax.tree_util.tree_leaves(spec)
        word = np.dtype(np.int64)
        columns: list[tuple[tuple[int, ...], np.dtype]] = [((_HEAD,), word)]
        columns += [((num_envs,), word)] * (len(Counters._fields) - 1)
        columns.append(((rows, num_envs), word))
        for leaf in leaves:
            own = rows_of(leaf, cfg.step_period, rows)
            columns.append(((own, num_envs, *leaf.shape), np.dtype(leaf.dtype)))
        offset = 0
        arrays: list[np.ndarray] = []
        for shape, dtype in columns:
            arrays.append(np.ndarray(shape, dtype, block.memory, offset))
            offset += _aligned(arrays[-1].nbytes)
        count = len(Counters._fields)
        self.counters = Counters(*arrays[:count])
        self.marks = arrays[count]
        self.ring = StepRing(cfg, num_envs)
        self.ring.use(spec, arrays[count + 1 :])

    def columns(self, envs: slice) -> Columns:
        """Returns views of the shared arrays of these environments."""
        rings = self.ring.columns(envs)
        counters, marks = self.counters, self.marks[:, envs]
        types = self.ring.step_type[:, envs]
        return Columns(counters.reserved[envs], counters.steps[envs], marks, types, rings)

    @staticmethod
    def block_bytes(cfg: ReplayConfig, num_envs: int, spec: Transition) -> int:
        """Returns the size of the block."""
        rows, leaves = ring_rows(cfg, num_envs), jax.tree_util.tree_leaves(spec)
        total = _aligned(8 * _HEAD) + (len(Counters._fields) - 1) * _aligned(8 * num_envs)
        total += _aligned(8 * rows * num_envs)
        own = [rows_of(x, cfg.step_period, rows) * leaf_bytes(x) for x in leaves]
        return total + sum(_aligned(num_envs * each) for each in own)

    def save(self, seen: np.ndarray, cfg: ReplayConfig) -> PyTree:
        """Returns the rings in the form of an `InProcessReplay` after the steps ``seen``."""
        return self.ring.pick(seen, ring_shape(cfg, len(seen)))

    def load(self, tree: PyTree, steps: np.ndarray, cfg: ReplayConfig) -> None:
        """Restores what ``save`` of this or another backend returned.

        Raises:
          ValueError: the rings have other sizes than a buffer of this config.
        """
        self.ring.put(tree, steps, ring_shape(cfg, len(steps)))
        self.marks[:] = 0  # the sampler already has all earlier items


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def total_bytes(cfg: ReplayConfig, num_envs: int, spec: Transition) -> tuple[int, int]:
    """Returns the bytes of the shared block, and the additional bytes of the reader."""
    return SharedSteps.block_bytes(cfg, num_envs, spec), reader_bytes(cfg, num_envs, spec)
