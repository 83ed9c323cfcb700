"""Files that have their name only once they are complete."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file in UTF-8; an editor may have added a byte order mark.

    Raises:
      OSError: the file cannot be read.
      ValueError: the content is not JSON.
      RecursionError: the content is nested too deeply.
    """
    return json.loads(path.read_bytes())  # which knows the mark, unlike a text


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, in the same folder; its file then replaces the one at `path`.

    After an error in the block the old file stays. Several processes may write the same file.

    Raises:
      OSError: the file cannot be renamed.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write(
    path: Path,
    content: str | bytes,
    *,
    to_disk: bool = False,
    check: Callable[[], None] | None = None,
) -> None:
    """Writes a file.

    Args:
      path: the path of the file, which is replaced.
      content: the content of the file; text is encoded in UTF-8.
      to_disk: whether to wait until the content is on the disk, to survive a loss of power.
      check: called just before the old file is replaced; if it raises an error, the old file stays.

    Raises:
      OSError: the file cannot be written; the old one stays.
    """
    with replacing(path) as partial:
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if to_disk:
                file.flush()
                os.fsync(file.fileno())
        if check is not None:
            check()
