"""Files that have their name only once they are complete; the local copies of object stores."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COPIES = "RLSTACK_STORE_CACHE"  # a folder for local copies instead of the user's own
_URL = re.compile(r"([a-z][a-z0-9+]+):/+(.*)")  # with one slash, as `Path` writes it


def copies() -> Path:
    """Returns the folder of this user with the copies of what is in object stores."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(COPIES) or Path(cache, "rlstack", "stores")).absolute()


def local(path: str | os.PathLike[str]) -> Path:
    """Returns the path of the local copy of what a URL names; other paths as they are.

    Raises:
      ValueError: the URL has no bucket, or parts that are no names of objects, such as a password.
    """
    found = _URL.fullmatch(os.fspath(path))
    if not found:
        return Path(path)
    scheme, rest = found.groups()
    parts = [part for part in rest.split("/") if part]
    if not parts or any(part in (".", "..") or set(part) & set("@?#") for part in parts):
        raise ValueError(
            f"{scheme}: a URL must be like {scheme}://BUCKET/PATH, without a user, a query or dots "
            "as names. Credentials are in environment variables (docs/using_runs.md)."
        )
    return copies().joinpath(scheme, *parts)


def url_of(path: Path) -> str:
    """Returns the URL of which a path is the local copy; "" for all other paths."""
    try:
        scheme, *rest = path.relative_to(copies()).parts
    except ValueError:
        return ""
    return f"{scheme}://{'/'.join(rest)}" if rest else ""


def shown(path: str | os.PathLike[str]) -> str:
    """Returns a path as the user named it: a URL, also for its local copy, or the path itself."""
    return url_of(local(path)) or os.fspath(path)


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
