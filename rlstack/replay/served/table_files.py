"""A table's checkpoint as files: each array in one file, so that no copy of all is needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np

from rlstack.replay.served import checkpoints
from rlstack.types import PyTree

_ABOUT = "table.json"
_VERSION = 1


def is_table(path: Path) -> bool:
    """Whether a replay's checkpoint is of a table, and not of a Reverb server."""
    return (path / _ABOUT).is_file()


def write(directory: Path, layout: str, tree: PyTree) -> Path:
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
        folder = checkpoints.prepare(directory) / "table"
        folder.mkdir()
        leaves = jax.tree_util.tree_leaves(tree)
        for index, leaf in enumerate(leaves):
            np.save(folder / _name(index), np.asarray(leaf), allow_pickle=False)
        about = {"version": _VERSION, "layout": layout, "arrays": len(leaves)}
        (folder / _ABOUT).write_text(json.dumps(about))
        (folder / checkpoints.DONE).touch()
        return checkpoints.take(directory, folder)
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise checkpoints.ReplayCheckpointError(
            f"ReplayService.checkpoint: a checkpoint could not be written in {directory}: {error}. "
            "Free space there (df) or make it writable. Earlier checkpoints are intact."
        ) from error


def read(path: Path, layout: str, like: PyTree) -> PyTree:
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
        about = json.loads((path / _ABOUT).read_text())
        found = about["version"], about["layout"], about["arrays"]
        wanted = _VERSION, layout, treedef.num_leaves
        if found != wanted:
            raise ValueError(f"it must be {wanted}; got {found}. Resume with the same config")
        leaves = [np.load(path / _name(i), allow_pickle=False) for i in range(treedef.num_leaves)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"ReplayService: {path} is no checkpoint of this table: {error}."
        ) from error
    return treedef.unflatten(leaves)


def _name(index: int) -> str:
    return f"{index:04d}.npy"
