"""Files that belong to a checkpoint but that another library has written: their sizes and digests.

A digest is the CRC-32 of a file's bytes; `rlstack.storage.checkpoint_arrays` has the reason.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstack.storage.checkpoint_leaves import DamagedError

_AT_ONCE = 1 << 22  # bytes


def digests(folder: Path) -> dict[str, list[Any]]:
    """Returns [size, digest] of each file of a folder, by name.

    Raises:
      OSError: a file cannot be read.
    """
    return {file.name: _digest(file) for file in sorted(folder.iterdir())}


def check(folder: Path, expected: Mapping[str, Any]) -> None:
    """Compares the files of a folder with what `digests` returned.

    Raises:
      DamagedError: a file is missing or differs; the message names it.
    """
    for name, want in expected.items():
        file = folder / name
        try:
            same = file.stat().st_size == want[0] and _digest(file) == list(want)
        except OSError as error:
            raise DamagedError(f"{file} must be readable: {error.strerror}.") from error
        if not same:
            raise DamagedError(f"{file} is not what was written.")


def _digest(file: Path) -> list[Any]:
    size, value = 0, 0
    with open(file, "rb") as stream:
        while part := stream.read(_AT_ONCE):
            size, value = size + len(part), zlib.crc32(part, value)
    return [size, f"{value:08x}"]
