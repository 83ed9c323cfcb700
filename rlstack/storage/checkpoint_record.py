"""The file checkpoint.json: the leaves of a checkpoint, its step, its metadata, and a digest."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstack.storage.checkpoint_leaves import CheckpointError, DamagedError, Leaf
from rlstack.storage.loggers import to_json

NAME = "checkpoint.json"

_FORMAT = 2
_WITHOUT_DIGESTS = 1
_OF_DISKS = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO


def encode(step: int, leaves: list[Leaf], metadata: Mapping[str, Any]) -> str:
    """Returns the text of checkpoint.json."""
    record = {
        "format": _FORMAT,
        "step": int(step),
        "leaves": [[*leaf] for leaf in leaves],
        "metadata": to_json(metadata),
    }
    try:
        text = json.dumps(record | {"digest": _digest(record)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint.save: metadata must hold only values of JSON; {error}. "
            "Put arrays into the tree, and write other objects as numbers or text."
        ) from error
    return text


def has_digests(record: Mapping[str, Any]) -> bool:
    """Whether damage of the checkpoint's files can be seen."""
    return bool(record["format"] != _WITHOUT_DIGESTS)


def _digest(record: Mapping[str, Any]) -> str:
    """Returns the digest of checkpoint.json, which is one of its entries."""
    others = {name: value for name, value in record.items() if name != "digest"}
    return f"{zlib.crc32(json.dumps(others, sort_keys=True).encode()):08x}"


def read(path: Path, where: str) -> dict[str, Any]:
    """Returns the content of checkpoint.json.

    Raises:
      DamagedError: the record is missing or is not what was written.
      CheckpointError: another version of rlstack wrote it.
    """
    try:
        record = json.loads((path / NAME).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(
            f"checkpoint.{where}: {path} must be a checkpoint; its checkpoint.json cannot be read: "
            f"{reason(error)}. A checkpoint is one of the step_* directories under a run's "
            "checkpoints/."
        ) from error
    known = isinstance(record, dict) and record.get("format") in (_FORMAT, _WITHOUT_DIGESTS)
    intact = isinstance(record, dict) and record.get("digest") == _digest(record)
    if known and record["format"] == _WITHOUT_DIGESTS and "digest" not in record:
        intact = _is_well_formed(record)
    elif isinstance(record, dict) and not known and (intact or "digest" not in record):
        raise CheckpointError(
            f"checkpoint.{where}: the format of {path} must be {_FORMAT}; got "
            f"{record.get('format')}. Use the version of rlstack that wrote it."
        )
    if not intact:
        raise DamagedError(
            f"checkpoint.{where}: {path} is damaged: its checkpoint.json is not what was written."
        )
    return record


def _is_well_formed(record: Mapping[str, Any]) -> bool:
    """Whether the record of a checkpoint without digests has everything that is read from it."""
    step, metadata = record.get("step"), record.get("metadata")
    try:
        for leaf in leaves_of(record).values():
            _ = leaf.num_bytes
    except (KeyError, TypeError, ValueError):
        return False
    return isinstance(step, int) and isinstance(metadata, dict)


def leaves_of(record: Mapping[str, Any]) -> dict[int, Leaf]:
    """Returns the saved leaves by number."""
    return {
        number: Leaf(path, kind, tuple(shape), *others)
        for number, (path, kind, shape, *others) in enumerate(record["leaves"])
    }


def reason(error: Exception) -> str:
    """Returns the first line of an error, shortened: storage libraries add pages of context.

    What the operating system says stays, also behind long paths.
    """
    text = str(error).strip()
    short = (text.splitlines() or [type(error).__name__])[0][:300].rstrip(".")
    said = (os.strerror(number) for number in _OF_DISKS)
    return next((f"{short} ... {s}" for s in said if s in text and s not in short), short)
