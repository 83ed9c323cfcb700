"""Which run a checkpoint belongs to: the record in its metadata, and later checks against it."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlstack.programs.session.run_config import CHANGEABLE
from rlstack.programs.session.run_dir import RunDir, option_values
from rlstack.storage import checkpoint, files

_ENTRY = "run"  # key in a checkpoint's metadata; checkpoints of earlier versions lack it
_SHOWN = 6  # changed options in a message


def record(directory: RunDir) -> dict[str, Any]:
    """Returns the metadata that a checkpoint of a run gets: its id, seed, options and datasets.

    The id is that of the newest checkpoint in the directory, so copies of a run and renamed ones
    keep theirs, and so are the fingerprints of datasets. The options are those of its config.json.
    """
    newest = checkpoint.latest(directory.checkpoints)
    told = _told(newest) if newest is not None else {}
    options = _options(directory)
    return {
        _ENTRY: {
            "id": told.get("id") or uuid.uuid4().hex,
            "seed": options.get("seed"),
            "options": options,
            "datasets": told.get("datasets") or _datasets(options),
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


def check_datasets(directory: RunDir, path: Path) -> None:
    """Checks that the datasets of a run are those that it learned from up to a checkpoint.

    Raises:
      CheckpointError: a dataset has changed. Checkpoints of earlier versions are not checked.
    """
    before, now = _told(path).get("datasets", {}), _datasets(_options(directory))
    for name, found in now.items():
        if before.get(name, found) != found:
            raise checkpoint.CheckpointError(
                f"{name} must be the dataset that the run in {directory.path} has learned from; "
                f"it has changed since {path.name} was saved (its fingerprint was "
                f"{before[name]} and is {found}). Put the earlier one back, or start a new "
                f"run: rlstack train {directory.config}"
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
            if before
            and before.get(name) != now.get(name)
            and name.partition(".")[0] not in CHANGEABLE
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


def _datasets(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fingerprint of each dataset that options name, but of those that are missing."""
    found = {}
    for option, name in options.items():
        if name and (option == "data" or option.endswith("replay.demonstrations")):
            from rlstack.storage.datasets import fingerprint, located

            with contextlib.suppress(ValueError, OSError):  # where it is read, it is an error
                found[name] = fingerprint(located(name))
    return found
