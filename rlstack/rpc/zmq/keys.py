"""The keys of one program: only processes that hold them can call its nodes.

A program has two pairs of Curve25519 keys: one of all its servers and one of all its clients. A
client accepts only a server that has the secret key of the first pair, and a server admits only
clients that have that of the second. All nodes of a program are equals, so each holds both pairs.

The process that runs a program makes the keys (`made`). The others read them from a file that only
their user can read, in a folder of its own. An environment variable has the file's path. The keys
themselves are in no command line, environment, log, config or pickle, and the file is removed when
the program ends. A host that does not see the file gets them from the launcher (`adopt`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator

import zmq

VARIABLE = "RLSTACK_KEYS"  # environment variable with the path of the file
_PREFIX = "rlstack-keys-"
_FILE = "keys"
_adopted: Keys | None = None


class Keys:
    """Two pairs of keys, each of 40 characters of Z85; neither printed nor pickled."""

    __slots__ = ("client_public", "client_secret", "server_public", "server_secret")

    def __init__(self, text: bytes) -> None:
        """Reads what `Keys.text` returned.

        Raises:
          ValueError: the text does not hold four keys, or a public key does not belong to its
            secret key.
        """
        parts = text.split()
        fits = len(parts) == 4 and all(len(part) == 40 for part in parts)
        if not fits or any(_public(parts[i + 1]) != parts[i] for i in (0, 2)):
            raise ValueError("zmq keys: their file must hold two pairs of keys; it does not.")
        self.server_public, self.server_secret, self.client_public, self.client_secret = parts

    def text(self) -> bytes:
        """Returns the keys as text."""
        return b"\n".join(
            (self.server_public, self.server_secret, self.client_public, self.client_secret)
        )

    def __repr__(self) -> str:
        return "Keys(...)"

    def __reduce__(self) -> str:
        raise TypeError("Keys: keys are not pickled. Give processes the path of their file.")


def make() -> Keys:
    """Returns new random keys."""
    return Keys(b"\n".join((*zmq.curve_keypair(), *zmq.curve_keypair())))


@contextlib.contextmanager
def made(where: str = "", text: bytes = b"") -> Iterator[str]:
    """Makes keys for this process and those that it starts in the body; yields their file.

    Args:
      where: the directory for the file's own folder; by default the directory of temporary files.
      text: the keys of a program on another host, as text; by default new ones.
    """
    before = os.environ.get(VARIABLE)
    # Only this user can open it.
    folder = os.path.abspath(tempfile.mkdtemp(prefix=_PREFIX, dir=where or None))
    try:
        path = os.path.join(folder, _FILE)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(text or make().text())
        os.environ[VARIABLE] = path
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _read.cache_clear()
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def adopt(text: bytes) -> None:
    """Takes the keys of a program, as `Keys.text` returned them, whose file is on another host."""
    global _adopted
    _adopted = Keys(text)


def current() -> Keys:
    """Returns the keys of this process's program.

    Raises:
      PermissionError: others than this user can read the file, or it belongs to another user.
      ValueError: this process has no keys.
    """
    if _adopted is not None:
        return _adopted
    path = os.environ.get(VARIABLE)
    if not path:
        raise ValueError(
            "zmq keys: a process that uses the transport zmq must have its program's keys; this "
            "one has none. `rlstack.rpc.transports.chosen('zmq')` makes keys for it and for the "
            f"processes that it starts, which find them by the variable {VARIABLE}."
        )
    return _read(path)


@functools.lru_cache(4)
def _read(path: str) -> Keys:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                f"zmq keys: only this user may own and read {path}; its mode is "
                f"{stat.filemode(status.st_mode)}. Remove it, and start the program again."
            )
        return Keys(file.read())


def _public(secret: bytes) -> bytes:
    try:
        return bytes(zmq.curve_public(secret))
    except (zmq.ZMQError, ValueError):
        return b""
