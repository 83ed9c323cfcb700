"""Checkpoints: a pytree and JSON metadata in a directory, written completely or not at all.

A checkpoint is `DIRECTORY/step_000000012345/`: the arrays, written by Orbax, and `checkpoint.json`
(a description and a digest of each leaf, the step, the caller's metadata). It is written under
another name, flushed to disk and then renamed, so that a crash, a full disk or Ctrl-C leaves the
earlier checkpoints as they were. Only one process may write to a directory at a time.

Reading compares the digests, so a checkpoint whose files have changed on disk is refused.
`newest_intact` then finds the newest one that is whole. Checkpoints of format 1, from versions
without digests, are still read.

Leaves may be numpy and JAX arrays of any size (also empty) and any dtype except object, typed JAX
keys, numpy scalars, Python numbers of any size, booleans and strings; None and empty containers are
part of the structure. Arrays are stored as host arrays, so a checkpoint can be restored on other
devices.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstack.storage import checkpoint_arrays, checkpoint_record
from rlstack.storage.checkpoint_leaves import (
    ANY_ARRAY,
    CheckpointError,
    DamagedError,
    Leaf,
    as_target,
    check_same,
    flatten,
    is_empty,
)
from rlstack.storage.checkpoint_record import reason

__all__ = [
    "ANY_ARRAY",
    "CheckpointError",
    "CheckpointWriteError",
    "DamagedError",
    "copy_parts",
    "latest",
    "newest_intact",
    "paths",
    "read_metadata",
    "restore",
    "save",
    "set_aside",
    "verify",
]

_NAME = re.compile(r"step_(\d{12})(?:\.(\d+))?")
_PARTIAL = ".partial-"
_LATE_WRITERS = 5.0  # longest wait in seconds for the writers of a failed save
_LOOK = 0.02  # seconds between two checks for their files
_VERIFIED_AT_ONCE = 1 << 28  # bytes of arrays that `verify` holds in memory

_log = logging.getLogger(__name__)


class CheckpointWriteError(OSError):
    """The file system refused a checkpoint; earlier ones are unchanged."""


def load_libraries() -> None:
    """Imports what `save` and `restore` need, which takes a part of a second."""
    checkpoint_arrays.load_libraries()


def save(
    directory: str | os.PathLike[str],
    step: int,
    tree: Any,
    metadata: Mapping[str, Any],
    *,
    keep: int = 3,
    before_rename: Callable[[], None] | None = None,
) -> Path:
    """Writes a checkpoint of `tree` and removes all but the newest `keep`.

    Args:
      directory: the directory of one run's checkpoints; created if missing.
      step: the step of the checkpoint, at least 0. Checkpoints are ordered by step. Saving a step
          again makes a newer checkpoint of the step.
      tree: the pytree to save (see above for its leaves).
      metadata: values that JSON supports, and numpy scalars; NaN and infinity become strings.
      keep: number of checkpoints to keep, at least 1.
      before_rename: called when everything is written, right before the checkpoint gets its name.
          If it raises an exception, so does `save`, and nothing is changed.

    Returns:
      The checkpoint's path.

    Raises:
      CheckpointError: a leaf or the metadata cannot be saved; nothing is written.
      CheckpointWriteError: the file system refuses the write, for example because the disk is full.
      ValueError: `step` or `keep` is out of range.
    """
    if not 0 <= step < 10**12:
        raise ValueError(f"checkpoint.save: step must be in [0, 1e12); got {step}.")
    if keep < 1:
        raise ValueError(f"checkpoint.save: keep must be at least 1; got {keep}.")
    leaves, arrays = flatten("save", tree)
    text = checkpoint_record.encode(step, leaves, metadata)
    directory = Path(directory).absolute()
    path = publish(directory, step, text, arrays, before_rename)
    for _, old in _listed(directory)[:-keep]:
        # Rename it first, so that an interrupted removal does not leave half a checkpoint in the
        # list.
        with contextlib.suppress(OSError):
            shutil.rmtree(old.rename(directory / f"{_PARTIAL}old-{old.name}"))
    return path


def paths(directory: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoints in `directory`, the newest (the highest step) first."""
    return [path for _, path in reversed(_listed(Path(directory)))]


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint, which its name tells."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the newest checkpoint in `directory`, or None. It is not read."""
    return next(iter(paths(directory)), None)


def newest_intact(
    directory: str | os.PathLike[str],
    *,
    part: str = "",
    also: Callable[[Path], None] | None = None,
) -> Path | None:
    """Returns the newest checkpoint in `directory` without damage, or None if there are none.

    Each damaged one is logged as a warning.

    Args:
      directory: a directory of checkpoints.
      part: only leaves whose path begins with this are read, such as ``['learner']['params']``.
      also: checks data that belong to a checkpoint but are stored elsewhere; raises `DamagedError`.

    Raises:
      DamagedError: all checkpoints are damaged; the message is that of the newest.
      CheckpointError: another version of rlstack wrote the newest.
    """
    first: DamagedError | None = None
    for path in paths(directory):
        try:
            verify(path, part=part)
            if also is not None:
                also(path)
        except DamagedError as error:
            first = first or error
            _log.warning("%s Looking for an older checkpoint.", error)
        else:
            if first is not None:
                _log.warning("checkpoint: using %s, which is whole.", path)
            return path
    if first is not None:
        raise first
    return None


def verify(path: str | os.PathLike[str], *, part: str = "") -> None:
    """Reads a checkpoint and compares its digests; holds a few hundred megabytes at a time.

    Args:
      path: a checkpoint.
      part: only leaves whose path begins with this are read.

    Raises:
      DamagedError: a file is missing or differs from what was written.
      CheckpointError: another version of rlstack wrote it.
    """
    path = Path(path).absolute()
    record = _record(path, "verify")
    if not checkpoint_record.has_digests(record):
        _log.warning("checkpoint: %s has no digests, so damage of its arrays is not seen.", path)
    group: dict[int, Leaf] = {}
    size = 0
    for number, leaf in checkpoint_record.leaves_of(record).items():
        if leaf.has_file and leaf.path.startswith(part):
            group[number] = leaf
            size += leaf.num_bytes
        if size > _VERIFIED_AT_ONCE:
            read_arrays(path, group, "verify")
            group, size = {}, 0
    read_arrays(path, group, "verify")


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is neither read nor counted; returns its new path.

    Raises:
      CheckpointWriteError: the file system refuses it.
    """
    target = path.with_name(f"damaged_{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"damaged_{path.name}.{number}")
    try:
        return path.rename(target)
    except OSError as error:
        raise CheckpointWriteError(
            f"checkpoint.set_aside: {path} is damaged and could not be renamed: {reason(error)}. "
            "Make its directory writable."
        ) from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the metadata of the checkpoint at `path`; adds its step as `step` if that is missing.

    Raises:
      CheckpointError: `path` is not a checkpoint.
    """
    record = _record(Path(path), "read_metadata")
    return {"step": record["step"], **record["metadata"]}


def restore(
    path: str | os.PathLike[str], target: Any, *, partial: bool = False, older: Any = None
) -> Any:
    """Returns the tree saved at `path`, in the form of `target`.

    Each leaf has the dtype that was saved and the type that it has in `target`: a numpy array, a
    JAX array (on the devices and with the sharding of `target`; also for a `jax.ShapeDtypeStruct`),
    a numpy scalar, or a Python value. Values in `target` are not read.

    Args:
      path: a checkpoint, as `latest` returns it.
      target: a tree of the same structure, shapes and dtypes; `ANY_ARRAY` matches any array.
      partial: whether the checkpoint may hold leaves that `target` lacks; they are not read.
      older: the target that takes the place of `target` if the checkpoint does not fit it.

    Raises:
      DamagedError: a file of the checkpoint is missing or differs from what was written.
      CheckpointError: a leaf differs from that in `target`; the message names the first one.
    """
    path = Path(path).absolute()
    record = _record(path, "restore")

    def fitting(target: Any) -> dict[int, Leaf]:
        wanted, _ = flatten("restore", target, with_arrays=False)
        named = {leaf.path for leaf in wanted}
        saved = {
            number: leaf
            for number, leaf in checkpoint_record.leaves_of(record).items()
            if not partial or leaf.path in named
        }
        check_same(path, wanted, list(saved.values()))
        return saved

    try:
        saved = fitting(target)
    except CheckpointError as error:
        if older is None:
            raise
        target = older
        try:
            saved = fitting(target)
        except CheckpointError:
            raise error from None
    arrays = read_arrays(path, saved, "restore")
    likes, treedef = jax.tree_util.tree_flatten(target, is_leaf=is_empty)
    found = [
        as_target(leaf, arrays.get(number), like)
        for (number, leaf), like in zip(saved.items(), likes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, found)


def copy_parts(
    path: Path, source: Path, parts: Sequence[str], before_rename: Callable[[], None] | None = None
) -> Path:
    """Copies some parts of the leaves of one checkpoint into a copy of another one.

    It is a newer checkpoint of the same step, with the same metadata; `path` stays as it is.

    Args:
      path: a checkpoint.
      source: another one.
      parts: the beginnings of the paths of the leaves to copy, such as ``['learner']['params']``.
      before_rename: see `save`.

    Returns:
      The path of the new checkpoint.

    Raises:
      DamagedError: one of the two checkpoints cannot be read.
      CheckpointError: the leaves differ in their structure, shapes or dtypes.
      CheckpointWriteError: the file system refuses the write.
    """
    path, source = path.absolute(), source.absolute()
    record = checkpoint_record.read(path, "copy_parts")
    leaves = checkpoint_record.leaves_of(record)
    others = checkpoint_record.leaves_of(checkpoint_record.read(source, "copy_parts"))
    begin = tuple(parts)
    mine = {number: leaf for number, leaf in leaves.items() if leaf.path.startswith(begin)}
    theirs = {number: leaf for number, leaf in others.items() if leaf.path.startswith(begin)}
    check_same(source, list(mine.values()), list(theirs.values()))
    rest = {number: leaf for number, leaf in leaves.items() if number not in mine}
    arrays = read_arrays(path, rest, "copy_parts")
    copied = read_arrays(source, theirs, "copy_parts")
    for number, (other, leaf) in zip(mine, theirs.items(), strict=True):
        leaves[number] = leaf
        if other in copied:
            arrays[number] = copied[other]
    text = checkpoint_record.encode(record["step"], list(leaves.values()), record["metadata"])
    return publish(path.parent, record["step"], text, arrays, before_rename)


def _record(path: Path, where: str) -> dict[str, Any]:
    """Reads the record of a checkpoint, and compares its step with the name.

    Raises:
      DamagedError: the record is missing or is not what was written.
      CheckpointError: another version of rlstack wrote it, or the directory has been renamed.
    """
    record = checkpoint_record.read(path, where)
    step = int(record["step"])
    if _NAME.fullmatch(path.name) and step_of(path) != step:
        raise CheckpointError(
            f"checkpoint.{where}: {path} must have the name of its step; it was saved at step "
            f"{step}. Rename it back to step_{step:012d}."
        )
    return record


def publish(
    directory: Path,
    step: int,
    text: str,
    arrays: dict[int, np.ndarray],
    before_rename: Callable[[], None] | None,
) -> Path:
    """Writes a checkpoint under a temporary name, then renames it."""
    partial = directory / f"{_PARTIAL}{step}-{os.getpid()}"
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_partial(directory)
            partial.mkdir()
            _write(partial, text, arrays)
        except Exception as error:
            _remove_and_wait(partial)
            raise _refused(directory, error) from error
        if before_rename is not None:
            before_rename()
        target = _free_name(directory, step)
        try:
            partial.rename(target)
            _sync(directory)
        except OSError as error:
            raise _refused(directory, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _refused(directory: Path, error: Exception) -> CheckpointWriteError:
    return CheckpointWriteError(
        f"checkpoint.save: could not write a checkpoint into {directory}: {reason(error)}. "
        "Free space there (df) or make it writable, or choose another --run-dir. Earlier "
        "checkpoints are intact: --resume goes on from the last one."
    )


def _write(partial: Path, text: str, arrays: dict[int, np.ndarray]) -> None:
    """Writes and flushes the files of one checkpoint."""
    if arrays:
        checkpoint_arrays.write(partial / "arrays", arrays)
    (partial / checkpoint_record.NAME).write_text(text)
    for folder, _, names in os.walk(partial):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))


def read_arrays(path: Path, saved: Mapping[int, Leaf], where: str) -> dict[int, np.ndarray]:
    """Returns the saved arrays by leaf number.

    Raises:
      DamagedError: an array cannot be read, or is not what was written.
    """
    numbers = [i for i, leaf in saved.items() if leaf.has_file]
    try:
        arrays = checkpoint_arrays.read(path / "arrays", numbers)
    except Exception as error:
        raise DamagedError(
            f"checkpoint.{where}: {path} is damaged: the arrays in it must be readable; "
            f"{reason(error)}. "
            "Remove that directory to use the checkpoint before it."
        ) from error
    for number, array in arrays.items():
        leaf = saved[number]
        if leaf.digest and checkpoint_arrays.digest(array) != leaf.digest:
            raise DamagedError(
                f"checkpoint.{where}: {path} is damaged: {leaf.path} is not what was written."
            )
    return arrays


def _listed(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    """Returns the checkpoints in `directory`, oldest first, each with (step, revision)."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.append(((int(match[1]), int(match[2] or 0)), path))
    return sorted(found)


def _free_name(directory: Path, step: int) -> Path:
    """Returns a name for `step`; a second checkpoint of a step gets a suffix."""
    revisions = [order[1] for order, _ in _listed(directory) if order[0] == step]
    name = f"step_{step:012d}"
    return directory / (f"{name}.{max(revisions) + 1}" if revisions else name)


def _remove_partial(directory: Path) -> None:
    """Removes the partial checkpoints of killed writers."""
    for path in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove_and_wait(partial: Path) -> None:
    """Removes the files of a failed save, including files that background writers still add."""
    gone_since = time.monotonic()
    until = gone_since + _LATE_WRITERS
    while time.monotonic() < min(until, gone_since + 10 * _LOOK):
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
            gone_since = time.monotonic()
        time.sleep(_LOOK)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
