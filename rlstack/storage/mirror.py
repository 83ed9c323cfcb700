"""Mirrors a local folder to an object store, and back.

One object of the store, the manifest `rlstack.json`, names all files, and for each file its pieces:
other objects, with sizes and digests. A piece is never changed. A writer writes new pieces, then
the manifest under the condition that nobody else has; so readers see either all files of before or
all of now, and nobody needs a list of the objects.

```
rlstack.json                       the manifest, with the command that writes
config.json.4f1c2a90-1             the one piece of config.json
metrics.jsonl.4f1c2a90-2           pieces of a log, each with lines that followed
metrics.jsonl.4f1c2a90-9
checkpoints/step_000000001000/...
```

A log grows: its full pieces stay, and its last one is written again until it is full. Names that
begin with a dot, links, and runs in a folder of several are no part of a copy. This module does not
import JAX.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstack.storage import files
from rlstack.storage.objects import Objects, StoreError

MANIFEST = "rlstack.json"
STATE = ".store"  # the file of a copy that says what of the store is in it
_FORMAT = 1
_PIECE = 8 << 20  # bytes of a piece; some are in memory at the same time
_FULL = 1 << 18  # bytes from which the last piece of a log stays as it is
_AT_ONCE = 8  # requests at the same time
_LOOKS = 5  # times that a folder is looked at until it rests
_IN_ORDER = ("checkpoints", "replay", "learners")  # folders whose files belong together


class Piece(NamedTuple):
    """An object with a part of a file."""

    key: str
    size: int
    digest: str


class Stat(NamedTuple):
    """What changes if a file is changed."""

    size: int
    time: int  # of the last change, in ns
    inode: int


class Copied(NamedTuple):
    """A file of the folder as the store has it."""

    pieces: list[Piece]
    stat: Stat

    @property
    def size(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)


@dataclasses.dataclass
class Manifest:
    """What a store has of a run."""

    run: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))  # never changes
    revision: int = 0  # of the files
    beat: int = 0  # of the manifest
    mark: str = ""  # of the command that wrote last, in the names of its pieces
    holder: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the command that writes
    files: Mapping[str, list[Piece]] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        """Returns the content of the object."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}).encode()

    @classmethod
    def read(cls, objects: Objects) -> tuple[Manifest, str] | None:
        """Returns the manifest and its tag; None if the store has none.

        Raises:
          StoreError: it cannot be read.
        """
        if (found := objects.get(MANIFEST)) is None:
            return None
        content, tag = found
        try:
            tree = json.loads(content)
            if tree.pop("format") != _FORMAT:
                raise StoreError(
                    f"{objects.url}/{MANIFEST} was written by a newer version of rlstack; "
                    "install that one."
                )
            tree["files"] = {
                name: [Piece(*piece) for piece in pieces] for name, pieces in tree["files"].items()
            }
            return cls(**tree), tag
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{objects.url}/{MANIFEST} must be the manifest of a run; {error!r}."
            ) from error


class Mirror:
    """A folder, and what of the store is in it.

    Attributes:
      folder: the folder.
      run: the manifest's `run` of which the folder is a copy; "" for none.
      revision: its revision of the files.
      ahead: whether a command has written to the folder what the store may not have.
      files: the files that are as the store has them.
      marks: the marks of the commands that have written to the folder.
    """

    def __init__(self, folder: Path, objects: Objects) -> None:
        """Reads what the folder has, by its file `STATE`."""
        self.folder, self._objects = folder, objects
        self.run, self.revision, self.ahead = "", 0, False
        self.files: dict[str, Copied] = {}
        self._written: dict[tuple[str, Stat, int], Piece] = {}  # in no manifest yet
        self.marks: list[str] = []
        self.mark, self._count = secrets.token_hex(4), 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            tree = files.read_json(folder / STATE)
            self.files = {
                name: Copied([Piece(*piece) for piece in pieces], Stat(*stat))
                for name, (pieces, stat) in tree["files"].items()
            }
            self.run, self.revision, self.ahead = tree["run"], tree["revision"], tree["ahead"]
            self.marks = tree["marks"]

    def continues(self, manifest: Manifest) -> bool:
        """Whether a command that wrote to the folder was the last to write to the store."""
        return self.ahead and self.run == manifest.run and manifest.mark in self.marks

    def save(self) -> None:
        """Writes what the folder has to its file `STATE`."""
        known = {name: list(copied) for name, copied in self.files.items()}
        tree = {"run": self.run, "revision": self.revision, "ahead": self.ahead}
        files.write(self.folder / STATE, json.dumps({**tree, "marks": self.marks, "files": known}))

    # From the store.

    def pull(self, manifest: Manifest, wanted: Callable[[str], bool]) -> list[str]:
        """Makes the wanted files as the store has them, and removes those that it no longer has.

        Files are whole or absent.

        Returns:
          What is wrong with the damaged files of checkpoints, which are left out.

        Raises:
          StoreError: a piece is missing or is not what was written.
          StoreAwayError: the store does not answer.
          OSError: a file cannot be written.
        """
        for name in [name for name in self.files if name not in manifest.files]:
            _remove(self.folder, name)
            del self.files[name]
        needed = [
            name
            for name, pieces in manifest.files.items()
            if wanted(name) and not self._has(name, pieces)
        ]
        damaged = []
        try:
            with _workers() as pool:
                found = pool.map(lambda name: self._pulled(name, manifest.files[name]), needed)
                for name, copied in zip(needed, found, strict=True):
                    if isinstance(copied, Copied):
                        self.files[name] = copied
                    else:
                        damaged.append(copied)
            self.run, self.revision = manifest.run, manifest.revision
        finally:
            for name in needed:
                _remove_empty(self.folder, name)  # the folders of what is damaged
            self.save()
        return damaged

    def _has(self, name: str, pieces: list[Piece]) -> bool:
        copied = self.files.get(name)
        return (
            copied is not None
            and copied.pieces == pieces
            and _stat(self.folder / name) == copied.stat
        )

    def _pulled(self, name: str, pieces: list[Piece]) -> Copied | str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not self._extended(name, path, pieces):
                with files.replacing(path) as partial, open(partial, "wb") as file:
                    for piece in pieces:
                        file.write(self._content(piece))
        except StoreError as error:
            if "is damaged" not in str(error) or name.split("/")[0] not in _IN_ORDER:
                raise
            return str(error)
        stat = _stat(path)
        assert stat is not None
        return Copied(pieces, stat)

    def _extended(self, name: str, path: Path, pieces: list[Piece]) -> bool:
        """Appends to a log what it lacks, so that readers go on; False if it must be replaced."""
        old = self.files.get(name)
        if old is None or not _is_log(name) or _stat(path) != old.stat:
            return False
        same = 0
        while same < min(len(old.pieces), len(pieces)) and old.pieces[same] == pieces[same]:
            same += 1
        if len(old.pieces) - same > 1:
            return False
        new = b"".join(self._content(piece) for piece in pieces[same:])
        start = sum(piece.size for piece in pieces[:same])
        with open(path, "r+b") as file:
            file.seek(start)
            last = file.read()
            if not new.startswith(last):
                return False
            file.write(new[len(last) :])
        return True

    def _content(self, piece: Piece) -> bytes:
        found = self._objects.get(piece.key)
        content = b"" if found is None else found[0]
        if found is None or len(content) != piece.size or _digest(content) != piece.digest:
            what = "there is no such object" if found is None else "it is not what was written"
            raise StoreError(f"{self._objects.url}/{piece.key} is damaged: {what}.")
        return content

    # To the store.

    def push(self, between: Callable[[], None]) -> dict[str, list[Piece]] | None:
        """Writes the pieces of all files that have changed.

        Args:
          between: called after each piece.

        Returns:
          The files for the manifest; None if checkpoints change all the time. Another file that
          does, such as a database, may be torn, until it is written again.

        Raises:
          StoreError: the store refuses it.
          StoreAwayError: the store does not answer; what is written already is not written again.
          OSError: a file cannot be read.
        """
        for look in range(_LOOKS):
            found = dict(_scan(self.folder))
            with contextlib.suppress(FileNotFoundError):
                self._push(found, between)
                strict = look < _LOOKS - 1
                if _at_rest(found, strict) == _at_rest(dict(_scan(self.folder)), strict):
                    self.files = {name: self.files[name] for name in found}
                    return {name: copied.pieces for name, copied in self.files.items()}
        return None

    def _push(self, found: Mapping[str, Stat], between: Callable[[], None]) -> None:
        parts: list[tuple[str, Stat, int, int]] = []
        kept: dict[str, list[Piece]] = {}
        for name, stat in found.items():
            old = self.files.get(name)
            if old is not None and old.stat == stat:
                continue
            kept[name] = self._kept(name, stat)
            start = sum(piece.size for piece in kept[name])
            end = _end_of_lines(self.folder / name, start, stat.size)
            parts += [
                (name, stat, offset, min(_PIECE, end - offset))
                for offset in range(start, end, _PIECE)
            ]
        with _workers() as pool:
            for (name, *_), piece in zip(
                parts, pool.map(lambda part: self._piece(*part), parts), strict=True
            ):
                kept[name].append(piece)
                between()
        for name, pieces in kept.items():
            self.files[name] = Copied(pieces, found[name])

    def _kept(self, name: str, stat: Stat) -> list[Piece]:
        """Returns the pieces of a log that are full."""
        old = self.files.get(name)
        if old is None or not _is_log(name) or stat.inode != old.stat.inode or stat.size < old.size:
            return []
        return old.pieces[:-1] if old.pieces and old.pieces[-1].size < _FULL else list(old.pieces)

    def _piece(self, name: str, stat: Stat, offset: int, size: int) -> Piece:
        if (piece := self._written.get((name, stat, offset))) is not None:
            return piece
        with open(self.folder / name, "rb") as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) != size:
            raise FileNotFoundError(name)  # it changed while it was read
        self._count += 1
        piece = Piece(f"{name}.{self.mark}-{self._count}", size, _digest(content))
        self._objects.put(piece.key, content)
        self._written[name, stat, offset] = piece
        return piece

    def unnamed(self, manifest: Manifest) -> list[str]:
        """Returns the pieces of the last command that no manifest names: it was killed.

        Raises:
          StoreError: the store does not list its objects.
        """
        named = {piece.key for pieces in manifest.files.values() for piece in pieces}
        its = re.compile(rf".*\.{re.escape(manifest.mark)}-\d+")
        return [key for key in self._objects.listed() if its.fullmatch(key) and key not in named]

    def committed(self, manifest: Manifest) -> None:
        """Records that the store has a manifest with what `push` returned."""
        self._written.clear()
        self.run, self.revision = manifest.run, manifest.revision
        self.save()


def _scan(folder: Path, root: Path | None = None) -> Iterator[tuple[str, Stat]]:
    """Yields the files of a folder, by their names below it."""
    root = root or folder
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            path = Path(entry.path)
            if entry.is_dir():
                if not (path / "config.json").exists():  # else a run of its own
                    yield from _scan(path, root)
            elif entry.is_file() and (stat := _stat(path)) is not None:
                yield path.relative_to(root).as_posix(), stat


def _at_rest(found: Mapping[str, Stat], strict: bool) -> dict[str, Stat]:
    """Returns the files that must not change while they are written to the store."""
    if strict:
        return {name: stat for name, stat in found.items() if not _is_log(name)}
    return {name: stat for name, stat in found.items() if name.split("/")[0] in _IN_ORDER}


def _is_log(name: str) -> bool:
    """Whether a file only grows."""
    return name.endswith(".jsonl") or name.startswith("logs/") or ".tfevents." in name


def _end_of_lines(path: Path, start: int, end: int) -> int:
    """Returns the end of the last whole line of a file of lines; the end of other files."""
    if path.suffix != ".jsonl":
        return end
    with open(path, "rb") as file:
        last = file.seek(max(start, end - _PIECE))
        newline = file.read(end - last).rfind(b"\n")
        return start if newline < 0 else last + newline + 1


def _stat(path: Path) -> Stat | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return Stat(found.st_size, found.st_mtime_ns, found.st_ino)


def _remove(folder: Path, name: str) -> None:
    """Removes a file, and the folders around it that are empty then."""
    with contextlib.suppress(OSError):
        (folder / name).unlink(missing_ok=True)
    _remove_empty(folder, name)


def _remove_empty(folder: Path, name: str) -> None:
    """Removes the folders around a file that are empty."""
    with contextlib.suppress(OSError):
        for parent in (folder / name).parents:
            if parent == folder:
                break
            parent.rmdir()


def _digest(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _workers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "store")
