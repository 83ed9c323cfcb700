"""Copies parts of one checkpoint, such as the params, into another one of the same structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlstack.storage import checkpoint, checkpoint_record
from rlstack.storage.checkpoint_leaves import check_same


def copy(
    path: Path, source: Path, parts: Sequence[str], before_rename: Callable[[], None] | None = None
) -> Path:
    """Copies some parts of the leaves of one checkpoint into a copy of another one.

    It is a newer checkpoint of the same step, with the same metadata; `path` stays as it is.

    Args:
      path: a checkpoint.
      source: another one.
      parts: the beginnings of the paths of the leaves to copy, such as ``['learner']['params']``.
      before_rename: see `checkpoint.save`.

    Returns:
      The path of the new checkpoint.

    Raises:
      DamagedError: one of the two checkpoints cannot be read.
      CheckpointError: the leaves differ in their structure, shapes or dtypes.
      CheckpointWriteError: the file system refuses the write.
    """
    path, source = path.absolute(), source.absolute()
    record = checkpoint_record.read(path, "copy")
    leaves = checkpoint_record.leaves_of(record)
    others = checkpoint_record.leaves_of(checkpoint_record.read(source, "copy"))
    begin = tuple(parts)
    mine = {number: leaf for number, leaf in leaves.items() if leaf.path.startswith(begin)}
    theirs = {number: leaf for number, leaf in others.items() if leaf.path.startswith(begin)}
    check_same(source, list(mine.values()), list(theirs.values()))
    rest = {number: leaf for number, leaf in leaves.items() if number not in mine}
    arrays = checkpoint.read_arrays(path, rest, "copy")
    copied = checkpoint.read_arrays(source, theirs, "copy")
    for number, (other, leaf) in zip(mine, theirs.items(), strict=True):
        leaves[number] = leaf
        if other in copied:
            arrays[number] = copied[other]
    text = checkpoint_record.encode(record["step"], list(leaves.values()), record["metadata"])
    return checkpoint.publish(path.parent, record["step"], text, arrays, before_rename)
