"""Checkpoints: a pytree and JSON metadata in a directory, written completely or not at all.

A checkpoint is `DIRECTORY/step_000000012345/`: the arrays, written by Orbax, and `checkpoint.json`
(a description of each leaf, the step, the caller's metadata). It is written under another name,
flushed to disk and then renamed, so that a crash, a full disk or Ctrl-C leaves the earlier
checkpoints as they were. Only one process may write to a directory at a time.

Leaves may be numpy and JAX arrays of any size (also empty) and any dtype except object, typed JAX
keys, numpy scalars, Python numbers of any size, booleans and strings; None and empty containers are
part of the structure. Arrays are stored as host arrays, so a checkpoint can be restored on other
devices.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstack.storage.checkpoint_leaves import (
    ANY_ARRAY,
    CheckpointError,
    Leaf,
    as_target,
    check_same,
    flatten,
    is_empty,
)
from rlstack.storage.loggers import to_json

__all__ = [
    "ANY_ARRAY",
    "CheckpointError",
    "CheckpointWriteError",
    "latest",
    "read_metadata",
    "restore",
    "save",
]

_FORMAT = 1
_NAME = re.compile(r"step_(\d{12})(?:\.(\d+))?")
_PARTIAL = ".partial-"
_LATE_WRITERS = 5.0  # longest wait in seconds for the writers of a failed save
_LOOK = 0.02  # seconds between two checks for their files


class CheckpointWriteError(OSError):
    """The file system refused a checkpoint; earlier ones are unchanged."""


def save(
    directory: str | os.PathLike[str],
    step: int,
    tree: Any,
    metadata: Mapping[str, Any],
    *,
    keep: int = 3,
) -> Path:
    """Writes a checkpoint of `tree` and removes all but the newest `keep`.

    Args:
      directory: holds the checkpoints of one run; created if missing.
      step: at least 0; checkpoints are ordered by step. Saving a step again makes a newer
          checkpoint of the step.
      tree: the pytree to save (see above for its leaves).
      metadata: values that JSON supports, and numpy scalars; NaN and infinity become strings.
      keep: number of checkpoints to keep, at least 1.

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
    text = _encode(step, leaves, metadata)
    directory = Path(directory).absolute()
    path = _publish(directory, step, text, arrays)
    for _, old in _listed(directory)[:-keep]:
        # Rename it first, so that an interrupted removal does not leave half a checkpoint in the
        # list.
        with contextlib.suppress(OSError):
            shutil.rmtree(old.rename(directory / f"{_PARTIAL}old-{old.name}"))
    return path


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the newest checkpoint in `directory` (the highest step), or None."""
    found = _listed(Path(directory))
    return found[-1][1] if found else None


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the metadata of the checkpoint at `path`; adds its step as `step` if that is missing.

    Raises:
      CheckpointError: `path` is not a checkpoint.
    """
    record = _read_record(Path(path), "read_metadata")
    return {"step": record["step"], **record["metadata"]}


def restore(path: str | os.PathLike[str], target: Any, *, partial: bool = False) -> Any:
    """Returns the tree saved at `path`, in the form of `target`.

    Each leaf has the dtype that was saved and the type that it has in `target`: a numpy array, a
    JAX array (on the devices and with the sharding of `target`; also for a `jax.ShapeDtypeStruct`),
    a numpy scalar, or a Python value. Values in `target` are not read.

    Args:
      path: a checkpoint, as `latest` returns it.
      target: a tree of the same structure, shapes and dtypes; `ANY_ARRAY` matches any array.
      partial: whether the checkpoint may hold leaves that `target` lacks; they are not read.

    Raises:
      CheckpointError: `path` is not a readable checkpoint, or a leaf differs; the message names the
          first one.
    """
    path = Path(path).absolute()
    record = _read_record(path, "restore")
    wanted, _ = flatten("restore", target, with_arrays=False)
    named = {leaf.path for leaf in wanted}
    saved = {
        number: Leaf(name, kind, tuple(shape), dtype, value)
        for number, (name, kind, shape, dtype, value) in enumerate(record["leaves"])
        if not partial or name in named
    }
    check_same(path, wanted, list(saved.values()))
    arrays = _read_arrays(path, saved)
    likes, treedef = jax.tree_util.tree_flatten(target, is_leaf=is_empty)
    found = [
        as_target(leaf, arrays.get(number), like)
        for (number, leaf), like in zip(saved.items(), likes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, found)


def _encode(step: int, leaves: list[Leaf], metadata: Mapping[str, Any]) -> str:
    """Returns the text of checkpoint.json."""
    record = {
        "format": _FORMAT,
        "step": int(step),
        "leaves": [[*leaf] for leaf in leaves],
        "metadata": to_json(metadata),
    }
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint.save: metadata must hold only values of JSON; {error}. "
            "Put arrays into the tree, and write other objects as numbers or text."
        ) from error


def _publish(directory: Path, step: int, text: str, arrays: dict[int, np.ndarray]) -> Path:
    """Writes a checkpoint under a temporary name, then renames it."""
    partial = directory / f"{_PARTIAL}{step}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_partial(directory)
        partial.mkdir()
        _write(partial, text, arrays)
        target = _free_name(directory, step)
        partial.rename(target)
        _sync(directory)
    except Exception as error:
        _remove_and_wait(partial)
        raise CheckpointWriteError(
            f"checkpoint.save: could not write a checkpoint into {directory}: {_reason(error)}. "
            "Free space there (df) or make it writable, or choose another --run-dir. Earlier "
            "checkpoints are intact: --resume goes on from the last one."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write(partial: Path, text: str, arrays: dict[int, np.ndarray]) -> None:
    """Writes and flushes the files of one checkpoint."""
    if arrays:
        with _orbax() as ocp:
            checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
            checkpointer.save(
                partial / "arrays",
                args=ocp.args.PyTreeSave({str(i): array for i, array in arrays.items()}),
            )
            checkpointer.close()
    (partial / "checkpoint.json").write_text(text)
    for folder, _, names in os.walk(partial):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _read_arrays(path: Path, saved: dict[int, Leaf]) -> dict[int, np.ndarray]:
    """Returns the saved arrays by leaf number."""
    numbers = [
        i for i, leaf in saved.items() if leaf.kind in ("array", "key") and 0 not in leaf.shape
    ]
    if not numbers:
        return {}
    try:
        with _orbax() as ocp:
            how = {str(i): ocp.RestoreArgs(restore_type=np.ndarray) for i in numbers}
            checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
            found = checkpointer.restore(
                path / "arrays",
                args=ocp.args.PyTreeRestore(
                    dict.fromkeys(how, 0), restore_args=how, partial_restore=True
                ),
            )
            checkpointer.close()
    except Exception as error:
        raise CheckpointError(
            f"checkpoint.restore: the arrays of {path} must be readable; {_reason(error)}. "
            "Remove that directory to use the checkpoint before it."
        ) from error
    return {i: np.asarray(found[str(i)]) for i in numbers}


def _read_record(path: Path, where: str) -> dict[str, Any]:
    try:
        record = json.loads((path / "checkpoint.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint.{where}: {path} must be a checkpoint; {_reason(error)}. "
            "Give one of the step_* directories under a run's checkpoints/."
        ) from error
    if record.get("format") != _FORMAT:
        raise CheckpointError(
            f"checkpoint.{where}: the format of {path} must be {_FORMAT}; got "
            f"{record.get('format')}. Use the version of rlstack that wrote it."
        )
    return record


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


def _reason(error: Exception) -> str:
    """Returns the first line of an error, shortened: storage libraries add pages of context."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".")


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """Yields ``orbax.checkpoint`` without its warnings, log lines and late tracebacks.

    The import takes a second, so it happens here.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import orbax.checkpoint as ocp

        logger.setLevel(logging.CRITICAL)
        shown = sys.unraisablehook
        sys.unraisablehook = functools.partial(_unless_late, shown)
        try:
            yield ocp
            sys.unraisablehook = shown  # not after an error: the late tracebacks follow it
        finally:
            logger.setLevel(level)


def _unless_late(
    shown: Callable[[sys.UnraisableHookArgs], Any], error: sys.UnraisableHookArgs
) -> None:
    """Shows an error of a background thread, except the error of a late writer.

    When one array cannot be written, Orbax closes its event loop while the writers of other arrays
    still use it. Each of their threads then prints a traceback between other output.
    """
    if str(error.exc_value) != "Event loop is closed":
        shown(error)
