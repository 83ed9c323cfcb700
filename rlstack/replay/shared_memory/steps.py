"""What the processes around a shared replay buffer share: rings of steps, and who is how far.

There is no lock. Each number below has one writer at a time, and is one aligned word of 8 bytes,
which is never read half written. A step is published in this order, and read in the reverse one:

1. the writer puts ``reserved[env] = g + 1``: row ``g % rows`` is no longer what it was;
2. it copies step ``g`` into that row, and its mark;
3. it puts ``steps[env] = g + 1``: now step ``g`` may be read.

A reader looks only at steps below ``steps``, copies, and then looks at ``reserved``: rows that a
writer had begun to overwrite by then are taken for lost, and drawn anew. So a writer that dies at
any instant leaves at most a row that nobody sees; the next one for that environment begins with a
gap and writes over it.

This relies on stores becoming visible in the order in which they were made, and loads being made
in order. x86 promises both for ordinary stores; the C library's memcpy ends its streaming stores
with a fence. Elsewhere taking and releasing a lock puts the barriers in (`fence`).
"""

from __future__ import annotations

import platform
import threading
from typing import NamedTuple

import jax
import numpy as np

from rlstack.replay.base import ReplayConfig
from rlstack.replay.shared_memory.block import Block
from rlstack.replay.sizes import layout, reader_bytes, step_bytes
from rlstack.replay.storage import StepRing
from rlstack.types import PyTree, Transition

_ALIGN = 64  # bytes: a cache line
_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")

# Numbers of the buffer as a whole, all put by the reader. ASKED: the batch size that was refused
# last, 0 once one was granted; STARVED: whether for another reason than samples_per_insert. NEWS
# counts the times that anything which could end a writer's wait was put.
CLOSED, OWNER_PID, OWNER_BIRTH, SIZE, INSERTS, SAMPLES, ASKED, STARVED, NEWS = range(9)
_HEAD = 16

DEAD = -1  # in `waiting`: the writer has ended
ENDED = -2  # in `birth`: the writer has given the environment back


def fence() -> None:
    """Lets no load or store pass, on machines that would."""
    if not _IN_ORDER:
        lock = threading.Lock()
        with lock:
            pass


class Counters(NamedTuple):
    """Numbers of each environment, ``[num_envs]`` int64, and of the buffer, ``head``."""

    head: np.ndarray  # [16], by the names above
    reserved: np.ndarray  # by the writer: no step below this minus `rows` is whole any more
    steps: np.ndarray  # by the writer: steps below this may be read
    unbroken: np.ndarray  # by the writer: the first step after the last gap
    waiting: np.ndarray  # by the writer: 1 + NEWS when its add last had to wait, 0 otherwise
    waited: np.ndarray  # by the writer: microseconds waited, in the first of its environments
    pid: np.ndarray  # by the writer: whose environment it is, 0 for nobody's
    birth: np.ndarray  # by the writer: when that process started
    token: np.ndarray  # by the writer: which writer of that process
    seen: np.ndarray  # by the reader: steps below this are counted in SIZE and INSERTS
    released: np.ndarray  # by the reader: the first step that a waiting item needs


def ring_rows(cfg: ReplayConfig, num_envs: int) -> int:
    """Returns the steps of each environment that are stored.

    A waiting fifo item is never overwritten: its writer waits. Other items may be overwritten
    while they are copied. A few rows more than are needed make that rare: a sixteenth, within
    4..64, which is how far a writer may come while a batch is copied.
    """
    sizes = layout(cfg, num_envs)
    rows = sizes.items * cfg.step_period + cfg.unroll_length
    return rows if cfg.sampler == "fifo" else rows + min(max(rows // 16, 4), 64)


class SharedSteps:
    """The columns of one block, for a config, a number of environments and a spec.

    Attributes:
      counters: see there.
      ring: the steps, ``[rows, num_envs, ...]``.
      marks: ``[rows, num_envs]`` int64, ``g + 1`` where a whole item ends with step ``g``.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, spec: Transition, block: Block):
        rows, leaves = ring_rows(cfg, num_envs), jax.tree_util.tree_leaves(spec)
        word = np.dtype(np.int64)
        columns: list[tuple[tuple[int, ...], np.dtype]] = [((_HEAD,), word)]
        columns += [((num_envs,), word)] * (len(Counters._fields) - 1)
        columns.append(((rows, num_envs), word))
        columns += [((rows, num_envs, *leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves]
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

    @staticmethod
    def block_bytes(cfg: ReplayConfig, num_envs: int, spec: Transition) -> int:
        """Returns the size of the block."""
        rows, leaves = ring_rows(cfg, num_envs), jax.tree_util.tree_leaves(spec)
        total = _aligned(8 * _HEAD) + (len(Counters._fields) - 1) * _aligned(8 * num_envs)
        total += _aligned(8 * rows * num_envs)
        return total + sum(
            _aligned(rows * num_envs * step_bytes([(x.shape, x.dtype)])) for x in leaves
        )

    def save(self, seen: np.ndarray, cfg: ReplayConfig) -> PyTree:
        """Returns the rings as a buffer inside one process would have them after these steps."""
        num_envs = len(seen)
        sizes = layout(cfg, num_envs)
        newest = int(seen.max())
        rows = np.arange(sizes.rows if newest > sizes.rows else newest)[:, None]
        steps = _latest(seen, rows, sizes.rows)
        if newest > sizes.rows:
            steps = np.concatenate([steps, steps[: sizes.mirror]])
        return self.ring.pick(np.maximum(steps, 0) % self.ring.rows, np.arange(num_envs))

    def load(self, tree: PyTree, steps: np.ndarray, cfg: ReplayConfig) -> None:
        """Puts back what ``save`` of this or of another backend returned.

        Raises:
          ValueError: the rings have other sizes than a buffer of this config.
        """
        num_envs = len(steps)
        sizes, saved = layout(cfg, num_envs), jax.tree_util.tree_leaves(tree)
        for part in saved:
            if part.shape[0] > sizes.rows + sizes.mirror or part.shape[1] != num_envs:
                raise ValueError(
                    f"ReplayBuffer.load: this config has room for {sizes.rows + sizes.mirror} "
                    f"steps of {num_envs} environments; the saved one had {part.shape[:2]}. Load "
                    "into an equal config."
                )
        if saved:
            wanted = _latest(steps, np.arange(self.ring.rows)[:, None], self.ring.rows)
            there = (wanted >= 0) & (wanted >= steps - sizes.rows)
            rows, env_ids = np.nonzero(there)
            self.ring.put(rows, env_ids, tree, wanted[there] % sizes.rows)
        self.marks[:] = 0  # all items there are were completed before


def _latest(steps: np.ndarray, row: np.ndarray, rows: int) -> np.ndarray:
    """Returns the last step below ``steps`` that lies in a row of a ring of ``rows``."""
    last = steps - 1
    return last - (last - row) % rows


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def total_bytes(cfg: ReplayConfig, num_envs: int, spec: Transition) -> tuple[int, int]:
    """Returns the bytes of the shared block, and of what the reader holds beside it."""
    step = step_bytes((x.shape, x.dtype) for x in jax.tree_util.tree_leaves(spec))
    return SharedSteps.block_bytes(cfg, num_envs, spec), reader_bytes(cfg, num_envs, step)
