"""What the processes of one host share: a folder in memory, and with it their reports.

No process leads the others. Whoever holds a lock acts for all; the kernel releases the lock of a
process that ends. The last process removes the folder, and a later program those of programs that
were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlstack.replay.shared_memory.block import FOLDER
from rlstack.rpc import codec


class HostFolder:
    """A folder in memory of the processes of one host that use the same name, and their lock.

    Attributes:
      path: the folder, which only this user can read.
    """

    def __init__(self, name: str, folder: str = FOLDER) -> None:
        """Opens the folder, or makes it.

        Args:
          name: identifies the folder's content and this host; without "/".
          folder: the parent folder.

        Raises:
          OSError: the folder cannot be made, or belongs to somebody else.
        """
        self.path = Path(folder, f"{_prefix()}{name}")
        sweep(folder)
        self._users = _join(self.path)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Holds the lock in the body; yields False if another process holds it."""
        holds = _try_lock(self._lock, fcntl.LOCK_EX)
        try:
            yield holds
        finally:
            if holds:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def write(self, name: str, *parts: bytes) -> None:
        """Replaces a file; others see the old one or the new one.

        Raises:
          OSError: there is no space.
        """
        new = self.path / f"new-{os.getpid()}-{id(self)}"
        try:
            with open(new, "wb") as file:
                file.writelines(parts)
            os.rename(new, self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise

    def close(self) -> None:
        """Removes the folder if no other process uses it; then it must not be used again."""
        with contextlib.suppress(OSError):
            if _try_lock(self._users, fcntl.LOCK_EX):
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._users)
        os.close(self._lock)


class Report(NamedTuple):
    """What a node tells the coordinator; see `Coordinator.report`."""

    node: str
    incarnation: int
    pid: int
    counts: Mapping[str, float]
    gauges: Mapping[str, float]
    logs: Mapping[str, Any]
    batch: int
    number: int


class Answer(NamedTuple):
    """The coordinator's answer to a report."""

    number: int  # of the report
    state: Mapping[str, Any]  # the fields of a `ProgramState`; those of all nodes of the host
    granted: int  # for this node; -1 if it was replaced


_ORDER = struct.Struct("<qq")  # a report's incarnation and number, before the rest of it
_REPORT, _ANSWERS = "report-", "answers"


class HostReports:
    """Reports of the nodes of one host, which one of them sends in one call for all.

    Each node writes its report to a file. When a period has passed since the last call, the first
    node that looks sends all reports that have no answer yet, and writes the answers to a file for
    the others. So a call is made by whichever node runs, and a report outlives its node.
    """

    def __init__(
        self,
        name: str,
        node: str,
        send: Callable[[Sequence[bytes]], tuple[Mapping[str, Any], Sequence[int]]],
        folder: str = FOLDER,
    ) -> None:
        """Opens the folder of the host's reports.

        Args:
          name: identifies the program and this host; without "/".
          node: the name of the node.
          send: `Coordinator.report_all`, or a client of it.
          folder: the parent folder of the host's folder.

        Raises:
          OSError: see `HostFolder`.
        """
        self._folder = HostFolder(f"reports-{name}", folder)
        self._key, self._send = node.replace("/", "%"), send
        self._incarnation = 0
        self._seen = (0, 0)  # which file of answers was read last
        self._sent, self._lines = -1.0, ""  # its content
        self._state: Mapping[str, Any] = {}

    def post(self, report: Report) -> None:
        """Replaces this node's report; raises an OSError if there is no space."""
        self._incarnation = report.incarnation
        order = _ORDER.pack(report.incarnation, report.number)
        self._folder.write(_REPORT + self._key, order, codec.encode(tuple(report)))

    def look(self, period: float) -> Answer | None:
        """Sends the reports of all nodes if it is time; returns the newest answer to this node.

        Args:
          period: seconds that must have passed since the last call of any node.

        Raises:
          Exception: what ``send`` raises.
        """
        self._read()
        if self._is_due(period):
            with self._folder.held() as holds:
                if holds:
                    self._read()  # written since the look above
                    if self._is_due(period):
                        self._send_all()
        return self._own_answer()

    def close(self) -> None:
        """Removes the folder if this is its last node; then it must not be used again."""
        self._folder.close()

    def _is_due(self, period: float) -> bool:
        return not self._sent <= time.monotonic() < self._sent + period

    def _read(self) -> None:
        """Reads the answers, if there are new ones."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._folder.path / _ANSWERS)
            seen = found.st_ino, found.st_mtime_ns
            if seen != self._seen:
                answers = (self._folder.path / _ANSWERS).read_bytes()
                self._sent, self._state, self._lines = codec.decode(answers)
                self._seen = seen

    def _own_answer(self) -> Answer | None:
        mark = f"\n{self._key}\t{self._incarnation}\t"
        begin = self._lines.find(mark)
        if begin < 0:
            return None
        number, granted = self._lines[begin + len(mark) :].split("\n", 1)[0].split("\t")
        return Answer(int(number), self._state, int(granted))

    def _send_all(self) -> None:
        """Sends the reports without an answer; the caller holds the lock."""
        lines = {line.partition("\t")[0]: line for line in self._lines.split("\n") if line}
        orders, reports = [], []
        for entry in os.scandir(self._folder.path):
            if entry.name.startswith(_REPORT):
                content = Path(entry.path).read_bytes()
                key, order = entry.name.removeprefix(_REPORT), _ORDER.unpack_from(content)
                mark = f"{key}\t{order[0]}\t{order[1]}"
                if not lines.get(key, "").startswith(f"{mark}\t"):
                    orders.append((key, mark))
                    reports.append(content[_ORDER.size :])
        if not reports:
            return
        sent = time.monotonic()
        self._state, granted = self._send(reports)
        for (key, mark), frames in zip(orders, granted, strict=True):
            lines[key] = f"{mark}\t{frames}"
        self._sent, self._lines = sent, "".join(f"\n{line}" for line in lines.values()) + "\n"
        answers = codec.encode((self._sent, dict(self._state), self._lines))
        # Without space the others report by themselves.
        with contextlib.suppress(OSError):
            self._folder.write(_ANSWERS, answers)


def sweep(folder: str = FOLDER) -> None:
    """Removes the folders that killed processes left."""
    for left in _own_folders(Path(folder)):
        with contextlib.suppress(OSError):
            users = os.open(left / "users", os.O_RDWR)
            try:
                if _try_lock(users, fcntl.LOCK_EX):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(users)


def _prefix() -> str:
    return f"rlstack-host-{os.getuid()}-"


def _join(folder: Path) -> int:
    """Locks a host's folder, which it creates if needed; returns the descriptor of the lock."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # the last user has just removed it
            found = folder.lstat()
            mine = found.st_uid == os.getuid() and not found.st_mode & 0o077
            if not (mine and stat.S_ISDIR(found.st_mode)):
                raise PermissionError(f"{folder} must be a folder that only this user can use.")
            users = os.open(folder / "users", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)
            if os.fstat(users).st_nlink:
                return users
            os.close(users)


def _own_folders(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                yield path


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
