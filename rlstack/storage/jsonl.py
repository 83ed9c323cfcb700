"""Files of JSON lines: read with torn lines skipped, appended to, and rewritten.

A full disk or a kill may leave a line without its end. A writer that continues such a file removes
or ends that line, and readers skip it with a warning. This module does not import JAX.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlstack.storage import files

FRAMES = "env_frames"  # which each line of logs has
_log = logging.getLogger(__name__)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the objects of a file, without torn lines; logs a warning that names those.

    Raises:
      OSError: the file cannot be read.
    """
    found, torn = [], []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        value: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
        if isinstance(value, dict):
            found.append(value)
        elif line.strip():
            torn.append(number)
    if torn:
        shown = ", ".join(map(str, torn[:5])) + (", ..." if len(torn) > 5 else "")
        _log.warning(
            "%s: line %s is incomplete and was skipped; a full disk or a kill leaves such lines.",
            path,
            shown,
        )
    return found


def read_logs(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Returns the lines of a file of logs as numbers, without whatever else a line has.

    Another program may have written to the file. What is left out, which includes lines without
    env_frames, is named in a warning.

    Raises:
      OSError: the file cannot be read.
    """
    found, wrong = [], {}
    for line in read(path):
        kept = numbers(line)
        wrong.update({name: value for name, value in line.items() if name not in kept})
        if math.isfinite(kept.get(FRAMES, math.nan)):
            found.append(kept)
        else:
            wrong.setdefault(FRAMES, line.get(FRAMES))
    for name, value in list(wrong.items())[:3]:
        _log.warning(
            "%s: %.80r must be a number in each line; got %.80r. It was skipped.", path, name, value
        )
    return found


def numbers(line: Any) -> dict[str, float]:
    """Returns the entries of a line of logs that are numbers: in JSON, NaN is the text "nan"."""
    found = {}
    for name, value in line.items() if isinstance(line, dict) else ():
        if type(value) is float:  # nearly all are, and long logs have millions
            found[name] = value
            continue
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found[name] = float(value)
    return found


def drop_torn_line(path: Path) -> None:
    """Removes the text after the last newline, so that appending starts a new line."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 4096)
            file.seek(start)
            found = file.read(keep - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            keep = start
        if keep != end:
            file.truncate(keep)


def move_lines(path: Path, target: Path, which: Callable[[Mapping[str, Any]], bool]) -> int:
    """Moves the lines for which ``which`` is true to the end of another file; returns their number.

    Torn lines are dropped. A crash leaves the file as it was, or without the lines.

    Raises:
      OSError: a file cannot be read or written.
    """
    if not path.exists():
        return 0
    lines = read(path)
    moved = [line for line in lines if which(line)]
    if not moved:
        return 0
    drop_torn_line(target)
    with open(target, "ab") as file:
        file.write(_text(moved))
        file.flush()
        os.fsync(file.fileno())
    files.write(path, _text([line for line in lines if not which(line)]), to_disk=True)
    return len(moved)


def _text(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
