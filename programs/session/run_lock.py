"""Lets one command at a time write to a run directory.

The file `.lock` in the directory names the command that has it: its host, its process and a token.
The command holds a lock of the kernel on the file (`flock`), which ends with its process, however
that ends. Where the file system has no locks, it holds a lease instead: it changes the file every
two seconds, and another command takes the directory over when the process is gone or, on another
host, when the file has not changed for ten seconds of that command's own clock.

A command that was killed may leave nodes that still save. Every writer therefore compares the token
before it renames a file (`Claim.check`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstack.storage import files

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_BEAT = 2.0  # seconds between two changes of a lease
_LEASE = 10.0  # seconds without a change after which a lease has ended: five missing beats
_SETTLE = 1.0  # seconds in which another command may take the same lease; the last one gets it


class RunLockedError(ValueError):
    """Another command writes to the run directory."""


class ClaimLostError(OSError):
    """Another command has taken the run directory over; nothing more may be written."""


class Claim(NamedTuple):
    """The right to write to a run directory; may be passed to other processes."""

    path: Path  # the lock file
    token: str

    def check(self) -> None:
        """Checks that no other command has taken the directory over.

        Raises:
          ClaimLostError: another command has taken it over.
        """
        holder = _read(self.path)
        if holder.get("token") != self.token:
            why = f"{describe(holder)} has taken it over" if holder else "its .lock is gone"
            raise ClaimLostError(
                errno.EBUSY,
                f"this command must not write to the run directory any more: {why}",
                str(self.path.parent),
            )


class Holder(NamedTuple):
    """The command that has claimed a run directory."""

    host: str
    pid: int
    alive: bool | None  # whether its process still runs; None on another machine


def holder_of(directory: Path) -> Holder | None:
    """Returns the command that claimed a run directory, even if it was killed; None for none.

    It only reads the file. If it tried the lock, a command that starts could be refused.
    """
    path = directory / ".lock"
    found = _read(path) if path.exists() else {}
    if "pid" not in found:
        return None
    return Holder(str(found.get("host", "")), int(found["pid"]), is_alive(found))


def is_alive(holder: Mapping[str, Any]) -> bool | None:
    """Whether the process that a lock names still runs; None on another machine."""
    if holder.get("machine") != _machine():
        return None
    return _start_of(holder["pid"]) == holder.get("started")


class RunLock:
    """Holds the lock of a run directory from construction to `release`."""

    def __init__(self, directory: Path) -> None:
        """Takes the lock. It waits only to find out whether the lease of a holder has ended.

        Args:
          directory: the run's directory, which must exist.

        Raises:
          RunLockedError: another command holds the lock.
          OSError: the lock's file cannot be written.
        """
        self.claim = Claim(directory / ".lock", secrets.token_hex(8))
        self._released = threading.Event()
        self._thread: threading.Thread | None = None
        self._handle = os.open(self.claim.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take()
        except BaseException:
            os.close(self._handle)
            raise

    def _take(self) -> None:
        path = self.claim.path
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise locked(path.parent, _read(path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._take_lease()
        else:
            self.hold()

    def hold(self) -> None:
        """Writes the name of this command to the lock's file."""
        write(self.claim.path, self.content())

    def _take_lease(self) -> None:
        path = self.claim.path
        holder = _read(path)
        if is_held(holder, lambda: _read(path) != holder, _LEASE, _BEAT / 4):
            raise locked(path.parent, holder)
        write(path, self.content(beat=0))
        time.sleep(_SETTLE)
        if (holder := _read(path)).get("token") != self.claim.token:
            raise locked(path.parent, holder)
        self._thread = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        """Changes the lease until it is released or lost."""
        beat = 0
        while not self._released.wait(_BEAT):
            with contextlib.suppress(OSError):  # a full disk: the next beat may succeed
                if _read(self.claim.path).get("token") != self.claim.token:
                    return
                beat += 1
                write(self.claim.path, self.content(beat=beat))

    def content(self, **others: int) -> dict[str, Any]:
        """Returns what the lock's file says of this command."""
        pid = os.getpid()
        return {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": pid,
            "started": _start_of(pid),
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:300],
            "token": self.claim.token,
            **others,
        }

    def release(self) -> None:
        """Releases the directory; a second call does nothing."""
        if self._released.is_set():
            return
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):  # a full disk: the kernel's lock ends below anyway
            if _read(self.claim.path).get("token") == self.claim.token:
                write(self.claim.path, {"token": self.claim.token})
        os.close(self._handle)


def is_held(
    holder: Mapping[str, Any], is_renewed: Callable[[], bool], lease: float, pause: float
) -> bool:
    """Whether the process named in a lease is alive.

    Args:
      holder: the content of the lease.
      is_renewed: whether the lease has changed. It is asked where the process cannot be seen.
      lease: seconds without a change after which the process is taken for dead.
      pause: seconds before each call of `is_renewed`.
    """
    if "pid" not in holder:
        return False
    if (alive := is_alive(holder)) is not None:
        return alive
    until = time.monotonic() + lease
    while time.monotonic() < until:
        time.sleep(pause)
        if is_renewed():
            return True
    return False


def locked(where: Path | str, holder: Mapping[str, Any]) -> RunLockedError:
    """Returns the error for a directory to which another command writes."""
    return RunLockedError(
        f"RunDir: only one command at a time may write to {where}; {describe(holder)} does. "
        "Wait until it ends, or stop it."
    )


def describe(holder: Mapping[str, Any]) -> str:
    """Returns the command that a lock names, in words."""
    if "pid" not in holder:
        return "another command"
    return f"process {holder['pid']} on host {holder['host']} ({holder.get('command', '')})"


def _machine() -> str:
    """Names the running kernel and the namespace of processes in which a pid has a meaning."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> int:
    """Returns when a process began, in ticks since the host's start; 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # it has the name of the process
        return int(stat.rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of the lock's file; {} if it cannot be read."""
    for _ in range(5):  # it may be read while it is written
        with contextlib.suppress(OSError, ValueError):
            found = files.read_json(path)
            if isinstance(found, dict):
                return found
        time.sleep(0.01)
    return {}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a lock's file in place, because the kernel's lock belongs to this very file."""
    text = json.dumps(content)
    # Padded with blanks, so that a full disk never needs another block and no old end remains.
    padded = text.ljust(1000).encode() + b"\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(handle, padded, 0)
        os.fsync(handle)
    finally:
        os.close(handle)
