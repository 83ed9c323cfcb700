"""Caches of compiled functions: one of a program's nodes, and one of a user's commands.

JAX's persistent cache stores compiled functions in files. Many nodes compile the same functions,
such as the actors of `heavy_env`: one of them compiles for the others. A command that runs again
loads what it compiled before.

Several processes may write at once: an entry that another process has not written completely cannot
be decompressed; JAX then compiles it and warns. It does not write such an entry again, so `keep`
removes what a command that was killed, or a full disk, has left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

OWN = "RLSTACK_COMPILATION_CACHE"  # a folder instead of the user's one; "" for none
_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_EVERYTHING = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
_PREFIX = "rlstack-program-"
_MOST = 256 << 20  # bytes of a user's cache; the oldest entries are removed
_BEING_WRITTEN = 60.0  # seconds; another command may be writing a younger entry
_ZSTD = b"\x28\xb5\x2f\xfd"  # how files begin where zstandard is installed; others are of zlib


def keep() -> None:
    """Lets JAX keep what this process compiles, and what its children compile, for later commands.

    The folder is the user's own, in ``XDG_CACHE_HOME`` or ``~/.cache``. Without one, or if others
    can write to it, nothing is kept: whoever can write to it can run code in later commands.
    Nothing changes if the user has chosen a folder for JAX.
    """
    chosen = os.environ.get(OWN)
    if _FOLDER in os.environ or chosen == "":
        return
    try:
        folder = Path(chosen) if chosen else _of_user() / _machine()
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return
        _tidy(folder)
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        return
    os.environ[_FOLDER] = str(folder)
    for name, value in _EVERYTHING.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def shared() -> Iterator[dict[str, str]]:
    """Makes a private folder for the nodes of a program, and removes it at the end.

    Yields:
      The environment variables that make JAX use it; none if there is a folder already.
    """
    if _FOLDER in os.environ:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix=_PREFIX)  # whoever can write to it can run code in the nodes
    try:
        yield {_FOLDER: folder, **_EVERYTHING}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove() -> None:
    """Removes the folder of this process's environment, if `shared` has made it.

    The launcher's process calls this at its end, since the process that made it may be killed.
    """
    folder = os.environ.get(_FOLDER, "")
    if os.path.basename(folder).startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def _of_user() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlstack" / "compiled"


def _machine() -> str:
    """Returns a name for processors like this one: homes may be shared by several machines.

    JAX names entries by its version, its flags and the function, and not by the processor.
    """
    with open("/proc/cpuinfo") as file:
        first = file.read(1 << 14).split("\n\n")[0]
    told = [x for x in first.splitlines() if x.startswith(("model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def _tidy(folder: Path) -> None:
    """Removes entries that were not written completely, and the oldest if there is too much."""
    last = folder / "tidied"
    since = last.stat().st_mtime if last.exists() else 0.0
    now = time.time()
    entries = []
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another command removes it as well
            found = entry.stat()
            if since - _BEING_WRITTEN < found.st_mtime < now - _BEING_WRITTEN and _is_torn(entry):
                entry.unlink()
            else:
                entries.append((found.st_mtime, found.st_size, entry))
    last.touch()
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= _MOST:
            break
        entry.unlink(missing_ok=True)
        total -= size


def _is_torn(entry: Path) -> bool:
    """Whether a compressed file is truncated; False if that cannot be known."""
    data = entry.read_bytes()
    if data.startswith(_ZSTD):
        return False
    reader = zlib.decompressobj()
    try:
        reader.decompress(data)
    except zlib.error:
        return True
    return not reader.eof
