"""Blocks of shared memory that are freed when their owner ends, even if it is killed.

A block is a mapped file in /dev/shm without a name in the file system: other processes open it
through the owner's file descriptor, /proc/PID/fd/FD. So the kernel frees it with the last process
that maps it, and nothing is left to remove. The standard library's ``SharedMemory`` is not
suitable: its blocks have names, which a killed process leaves behind, and before Python 3.13 its
resource tracker unlinks a block as soon as any attached process ends.

Where the system has no files without a name, a block is a file that its owner unlinks. A killed
owner cannot do so. So the name of a block identifies its owner (process id, start time, and process
id namespace), and creating a block first removes the blocks of owners that have ended.
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
# All pages are mapped immediately: a later fault for each page would cost more than the copy to it.
_MAPPING = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # MAP_POPULATE is Linux only
_NAME = re.compile(r"rlstack-(\d+)-(\d+)-([0-9a-f]+)-[0-9a-f]+")
_NAMELESS = re.compile(r"rlstack-(\d+)-(\d+)-([0-9a-f]+)-fd(\d+)-(\d+)")


def start_time(pid: int) -> int:
    """Returns when a process started (clock ticks since boot), -1 if it has ended or is a zombie.

    Process ids are reused, but an id together with its start time is unique. Without /proc, the
    result is 0 for all processes.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may contain any characters
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
    """Returns the process id namespace, which differs between containers."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def sweep() -> list[str]:
    """Unlinks blocks that ended owners did not unlink; returns the names of the blocks."""
    swept, here = [], _namespace()
    for name in os.listdir(FOLDER):
        match = _NAME.fullmatch(name)
        if match is None or match[3] != here or start_time(int(match[1])) == int(match[2]):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(os.path.join(FOLDER, name))
            swept.append(name)
    return swept


class Block:
    """A mapped block; ``memory`` is initially zero."""

    def __init__(self, name: str, memory: mmap.mmap, owner: int | None = None, fd: int = -1):
        self.name, self.memory, self._owner, self._fd = name, memory, owner, fd

    @classmethod
    def create(cls, num_bytes: int) -> Block:
        """Creates a block that this process owns.

        Raises:
          OSError: there is not enough memory; nothing was created.
        """
        sweep()
        pid = os.getpid()
        owner = f"rlstack-{pid}-{start_time(pid)}-{_namespace()}"
        fd = _open_nameless()
        if fd >= 0:
            try:
                memory = _map_all(fd, num_bytes)
            except BaseException:
                os.close(fd)
                raise
            return cls(f"{owner}-fd{fd}-{os.fstat(fd).st_ino}", memory, pid, fd)
        name = f"{owner}-{secrets.token_hex(4)}"
        path = os.path.join(FOLDER, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return cls(name, _map_all(fd, num_bytes), pid)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @classmethod
    def private(cls, num_bytes: int) -> Block:
        """Creates a block that no other process can attach; pages are mapped when first written."""
        return cls("", mmap.mmap(-1, num_bytes))

    @classmethod
    def attach(cls, name: str) -> Block:
        """Maps a block of this or another process of the same user.

        Raises:
          FileNotFoundError: the owner has closed the block or has ended.
        """
        path = os.path.join(FOLDER, name)
        if nameless := _NAMELESS.fullmatch(name):
            pid, started, _, owners_fd, inode = nameless.groups()
            path = f"/proc/{pid}/fd/{owners_fd}"
            # The numbers of processes and of descriptors are reused.
            if start_time(int(pid)) != int(started) or os.stat(path).st_ino != int(inode):
                raise FileNotFoundError(f"{name}: its owner has closed it or has ended")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(name, mmap.mmap(fd, os.fstat(fd).st_size, _MAPPING))
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Makes it impossible to attach, if this process is the owner; mappings remain valid."""
        if os.getpid() != self._owner:  # in a forked child
            return
        if self._fd < 0:
            Path(FOLDER, self.name).unlink(missing_ok=True)
        else:
            os.close(self._fd)
        self._owner = None


def _open_nameless() -> int:
    """Returns the descriptor of a file without a name that other processes can open, else -1."""
    try:
        fd = os.open(FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # the file system, or the operating system, has none
        return -1
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        return fd
    except OSError:  # no /proc
        os.close(fd)
        return -1


def _map_all(fd: int, num_bytes: int) -> mmap.mmap:
    """Gives a file its size, and maps it."""
    # Reserve the pages now: a page that is missing later would end the process by SIGBUS.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.ftruncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes, _MAPPING)
