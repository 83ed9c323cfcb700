"""The directory of a replay server's checkpoints: numbered, in the order in which they were made.

A server writes into a directory of its own, `written`, which is empty before each checkpoint; each
is then moved out of it and gets a number. Reverb names a checkpoint by the wall clock, and keeps
and loads the one with the last name. When the clock goes back, it would delete the new one.

A table's checkpoint is files, each array in one of them, so that no copy of all is needed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np

from rlstack.types import PyTree

WRITTEN = "written"
DONE = "DONE"  # a server writes this file last
_NUMBERED = re.compile(r"checkpoint_(\d{9,})")
_TABLE = "table.json"
_TABLE_VERSION = 1


class ReplayCheckpointError(OSError):
    """The server could not write a checkpoint; earlier ones are intact."""


def numbered(directory: Path) -> list[Path]:
    """Returns the numbered checkpoints, oldest first, whether or not they are complete."""
    found = [p for p in directory.glob("checkpoint_*") if _NUMBERED.fullmatch(p.name)]
    return sorted(found, key=lambda path: int(path.name.split("_")[1]))


def is_complete(path: Path) -> bool:
    """Whether a server finished writing a checkpoint."""
    return (path / DONE).is_file()


def newest(directory: Path) -> Path | None:
    """Returns the newest complete checkpoint, or None.

    Versions without numbers left one checkpoint, with the time as its name.
    """
    found = [path for path in numbered(directory) if is_complete(path)]
    return found[-1] if found else max(filter(is_complete, unnumbered(directory)), default=None)


def unnumbered(directory: Path) -> list[Path]:
    """Returns the checkpoints that versions without numbers have left."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if re.match(r"\d{4}-\d\d-\d\d", path.name)]


def take(directory: Path, written: Path) -> Path:
    """Gives a checkpoint that a server has written the next number; returns its new path."""
    numbers = [int(path.name.split("_")[1]) for path in numbered(directory)]
    target = directory / f"checkpoint_{max(numbers, default=0) + 1:09d}"
    return written.rename(target)


def prepare(directory: Path) -> Path:
    """Empties the directory that a server writes to and returns it.

    A complete checkpoint that nobody has taken gets a number.
    """
    written = directory / WRITTEN
    written.mkdir(parents=True, exist_ok=True)
    for path in sorted(written.iterdir()):
        if is_complete(path):
            take(directory, path)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return written


def clear(directory: Path) -> None:
    """Removes a server's checkpoint that `take` has not taken."""
    for path in (directory / WRITTEN).glob("*"):
        shutil.rmtree(path, ignore_errors=True)


def keep_only(directory: Path, names: Collection[str], *, unnumbered_too: bool) -> None:
    """Removes all checkpoints except the named ones.

    Args:
      directory: the directory of the checkpoints.
      names: the names of the numbered checkpoints to keep.
      unnumbered_too: whether to remove the checkpoints without a number, too.
    """
    others = unnumbered(directory) if unnumbered_too else []
    for path in [*numbered(directory), *others]:
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)


def is_table(path: Path) -> bool:
    """Whether a replay's checkpoint is of a table, and not of a Reverb server."""
    return (path / _TABLE).is_file()


def write_table(directory: Path, layout: str, tree: PyTree) -> Path:
    """Writes a numbered checkpoint next to the earlier ones; returns its path.

    Args:
      directory: the directory of the checkpoints.
      layout: the layout of the table.
      tree: the table's state, a pytree of arrays.

    Raises:
      ReplayCheckpointError: the file system refuses it; earlier checkpoints are intact.
    """
    folder = None
    try:
        folder = prepare(directory) / "table"
        folder.mkdir()
        leaves = jax.tree_util.tree_leaves(tree)
        for index, leaf in enumerate(leaves):
            np.save(folder / _array_name(index), np.asarray(leaf), allow_pickle=False)
        about = {"version": _TABLE_VERSION, "layout": layout, "arrays": len(leaves)}
        (folder / _TABLE).write_text(json.dumps(about))
        (folder / DONE).touch()
        return take(directory, folder)
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise ReplayCheckpointError(
            f"ReplayService.checkpoint: a checkpoint could not be written in {directory}: {error}. "
            "Free space there (df) or make it writable. Earlier checkpoints are intact."
        ) from error


def read_table(path: Path, layout: str, like: PyTree) -> PyTree:
    """Reads a checkpoint.

    Args:
      path: the path of the checkpoint.
      layout: the layout of the table that loads the checkpoint.
      like: the state of an empty table of this layout.

    Raises:
      ValueError: the path is not a complete checkpoint of such a table.
    """
    treedef = jax.tree_util.tree_structure(like)
    try:
        about = json.loads((path / _TABLE).read_text())
        found = about["version"], about["layout"], about["arrays"]
        wanted = _TABLE_VERSION, layout, treedef.num_leaves
        if found != wanted:
            raise ValueError(f"it must be {wanted}; got {found}. Resume with the same config")
        leaves = [
            np.load(path / _array_name(i), allow_pickle=False) for i in range(treedef.num_leaves)
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"ReplayService: {path} is no checkpoint of this table: {error}."
        ) from error
    return treedef.unflatten(leaves)


def _array_name(index: int) -> str:
    return f"{index:04d}.npy"
