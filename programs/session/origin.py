"""Which run a checkpoint belongs to: the record in its metadata, and later checks against it."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlstack.programs.session.run_dir import RunDir, option_values
from rlstack.storage import checkpoint, files

_ENTRY = "run"  # key in a checkpoint's metadata; checkpoints of earlier versions lack it
_BUDGETS = ("frames", "updates", "hours")  # a resumed run may have others
_SHOWN = 6  # changed options in a message


def record(directory: RunDir) -> dict[str, Any]:
    """Returns the metadata that a checkpoint of a run gets: the run's id, its seed and options.

    The id is that of the newest checkpoint in the directory, so copies of a run and renamed ones
    keep theirs. The options are those of its config.json.
    """
    newest = checkpoint.latest(directory.checkpoints)
    told = _told(newest) if newest is not None else {}
    options = _options(directory)
    return {
        _ENTRY: {
            "id": told.get("id") or uuid.uuid4().hex,
            "seed": options.get("seed"),
            "options": options,
        }
    }


def check(directory: RunDir, path: Path) -> None:
    """Checks that a checkpoint in the directory of a run belongs to that run.

    Raises:
      CheckpointError: the checkpoint has another seed than the run's config, or belongs to another
        run than the other checkpoints there.
    """
    told, seed = _told(path), _options(directory).get("seed")
    if told.get("seed") not in (None, seed):
        raise checkpoint.CheckpointError(
            f"{path} must be a checkpoint of the run in {directory.path}; it is of a run with seed "
            f"{told['seed']}, and the seed in {directory.config.name} is {seed}. Move it back to "
            "its own run, or correct the seed."
        )
    for other in checkpoint.paths(path.parent):
        its = _told(other)
        if told.get("id") and its.get("id") not in (None, told["id"]):
            raise checkpoint.CheckpointError(
                f"{path} and {other.name} beside it must be checkpoints of one run; they are of "
                "two. Move the one that belongs to another run back to that run's directory."
            )


@contextlib.contextmanager
def compared(directory: RunDir, path: Path) -> Iterator[None]:
    """Explains the error of a checkpoint that does not fit by the options changed since then.

    Raises:
      CheckpointError: the body raised a ValueError and options have changed. The message names the
        file and the options, and says what to do.
    """
    try:
        yield
    except checkpoint.DamagedError:
        raise
    except ValueError as error:
        before, now = _told(path).get("options", {}), _options(directory)
        changed = [
            f"{name} was {json.dumps(before.get(name))} and is {json.dumps(now.get(name))}"
            for name in sorted({*before, *now})
            if before and before.get(name) != now.get(name) and name not in _BUDGETS
        ]
        if not changed:
            raise
        more = f" (and {len(changed) - _SHOWN} more)" if len(changed) > _SHOWN else ""
        raise checkpoint.CheckpointError(
            f"{path} does not fit {directory.config}, which has changed since it was saved: "
            f"{'; '.join(changed[:_SHOWN])}{more}. Put these back, or start a new run. "
            f"The reason is: {error}"
        ) from error


def _told(path: Path) -> dict[str, Any]:
    """Returns what a checkpoint says of its run; nothing if it cannot be read or is an old one."""
    try:
        told = checkpoint.read_metadata(path).get(_ENTRY, {})
    except checkpoint.CheckpointError:
        return {}
    return told if isinstance(told, dict) else {}


def _options(directory: RunDir) -> dict[str, Any]:
    try:
        config = files.read_json(directory.config)
    except (OSError, ValueError):
        return {}
    return option_values(config) if isinstance(config, dict) else {}
