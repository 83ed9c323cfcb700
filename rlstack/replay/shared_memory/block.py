"""Named blocks of shared memory that are gone when their owner is.

A block is a file in /dev/shm, mapped. The standard library's ``SharedMemory`` will not do: before
Python 3.13 its resource tracker unlinks a block as soon as any process that attached to it ends.
Here the owner alone unlinks, when it closes or exits. An owner that was killed cannot; its name
says who it was (process id, start time, and the namespace in which the id means something), and
whoever creates a block next sweeps those whose owner is no more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import tempfile
from pathlib import Path

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
# All pages are mapped at once: a fault for each, later, would cost more than the copy into it.
_MAPPING = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # the latter on Linux alone
_NAME = re.compile(r"rlstack-(\d+)-(\d+)-([0-9a-f]+)-[0-9a-f]+")


def birth(pid: int) -> int:
    """Returns when a process started (clock ticks since boot), -1 if there is none or a zombie.

    Ids are used again; an id with its start time is not. Systems without /proc give 0 for all.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold anything
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return -1
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return -1
        except PermissionError:
            pass
        return 0
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def _namespace() -> str:
    """What tells process ids of one container from those of another."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def sweep() -> list[str]:
    """Unlinks blocks whose owner has ended without doing so; returns their names."""
    swept, here = [], _namespace()
    for name in os.listdir(FOLDER):
        match = _NAME.fullmatch(name)
        if match is None or match[3] != here or birth(int(match[1])) == int(match[2]):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(os.path.join(FOLDER, name))
            swept.append(name)
    return swept


class Block:
    """A mapped block; ``memory`` holds zeros at first."""

    def __init__(self, name: str, memory: mmap.mmap, owner: int | None = None):
        self.name, self.memory, self._owner = name, memory, owner

    @classmethod
    def create(cls, num_bytes: int) -> Block:
        """Makes a block that this process owns.

        Raises:
          OSError: there is not enough memory; nothing stays behind.
        """
        sweep()
        pid = os.getpid()
        name = f"rlstack-{pid}-{birth(pid)}-{_namespace()}-{secrets.token_hex(4)}"
        path = os.path.join(FOLDER, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Taken at once: a page that cannot be had later would end the process by SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, num_bytes)
            else:
                os.ftruncate(fd, num_bytes)
            return cls(name, mmap.mmap(fd, num_bytes, _MAPPING), pid)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, name: str) -> Block:
        """Maps a block that another process, or this one, owns.

        Raises:
          FileNotFoundError: its owner has closed it or ended.
        """
        fd = os.open(os.path.join(FOLDER, name), os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(name, mmap.mmap(fd, os.fstat(fd).st_size, _MAPPING))
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Takes the name away, in the owner; who has the block mapped keeps the memory."""
        if os.getpid() == self._owner:  # and not a child that it forked
            Path(FOLDER, self.name).unlink(missing_ok=True)
