"""How nodes that act get the learner's params."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlstack.acting.params import ParamsPuller, ParamsSource, RemoteParams
from rlstack.programs.program.base import Setup
from rlstack.programs.session import timing
from rlstack.replay.shared_memory.block import FOLDER
from rlstack.rpc import RemoteObject, codec
from rlstack.rpc.socket_filter import address_towards

_Encoded = tuple[int, bytes]  # a version, and its params
_VERSION = struct.Struct("<q")


def pull_params(setup: Setup, learner: RemoteObject) -> tuple[ParamsSource, Callable[[], None]]:
    """Returns a source of the learner's params and a function that closes it.

    Asynchronous programs pull in the background. In lock-step every request goes to the learner,
    which is idle while actors act, so actors use the params that a single process would use. In
    rounds actors wait for newer params, so each pull in the background waits for these. On a
    cluster, one node per host pulls, and the other nodes of the host read its copy.

    Args:
      setup: the program's setup, or the policy's.
      learner: a client of the learner's node.
    """
    cfg = setup.experiment.program
    client = copy.copy(learner)  # its own client: closing it cancels only the pull in progress
    if cfg.pacing == "lock_step":
        return RemoteParams(client.get_params, codec.decode), client.close
    get: Callable[[int], _Encoded | None] = client.get_params
    interval = cfg.params_interval
    if setup.experiment.replay.min_actors:
        get, interval = (lambda held: client.next_params(held, timing.NEXT_PARAMS)), 0.0
    shared: HostParams | None = None
    if cfg.on_several_hosts:
        with contextlib.suppress(OSError):  # then this process asks by itself
            shared = HostParams(f"{client.publication()}-{address_towards(client.host)}", get)
            get = shared.get
    source = RemoteParams(get, codec.decode)
    patience = timing.PARAMS_PULL_RESTART if setup.learner_restarts else timing.PARAMS_PULL
    background = ParamsPuller(source, interval, patience=patience)

    def close() -> None:
        client.close()  # first; otherwise closing would wait for a learner that has ended
        background.close()
        if shared is not None:
            shared.close()

    return background, close


class HostParams:
    """Params that the processes of one host share: one of them gets a version, the others read it.

    So the learner's link carries each version once for each host, and not once for each process.
    The version is in a file in memory. Whoever holds a lock asks the learner; the kernel releases
    the lock of a process that ends. The last process removes the file, and a later program those of
    programs that were killed.

    Attributes:
      transfers: number of versions that this process got from the learner.
    """

    def __init__(
        self,
        name: str,
        get: Callable[[int], _Encoded | None],
        folder: str = FOLDER,
        patience: float = timing.SHARED_PARAMS,
    ) -> None:
        """Opens the file of this host, or creates it.

        Args:
          name: identifies the learner's params and this host; without "/".
          get: asks the learner for (version, params) newer than a version; returns None if there
            are none.
          folder: parent folder of the file's own folder, which only this user can read.
          patience: seconds that a process waits for another process to pull before it asks the
            learner itself.

        Raises:
          OSError: the folder cannot be made, or belongs to somebody else.
        """
        self._get, self._patience = get, patience
        self.transfers = 0
        self._folder = Path(folder, f"{_prefix()}{name}")
        _sweep(Path(folder))
        self._users = _join(self._folder)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._busy_since: float | None = None  # since when another process has held the lock

    def get(self, newer_than: int) -> _Encoded | None:
        """Returns (version, params), or None when there is nothing newer here yet."""
        held = self._read(newer_than)
        if held is not None:
            self._busy_since = None
            return held
        if not _try_lock(self._lock, fcntl.LOCK_EX):
            now = time.monotonic()
            self._busy_since = now if self._busy_since is None else self._busy_since
            if now < self._busy_since + self._patience:
                time.sleep(timing.SHARED_PARAMS_LOOK)
                return None
            return self._fetch(newer_than)  # the other one hangs
        try:
            self._busy_since = None
            held = self._read(newer_than)  # written since the look above
            if held is None:
                held = self._fetch(newer_than)
                if held is not None:
                    self._write(held)
            return held
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Removes the file if no other process uses it; `get` must not be called again."""
        with contextlib.suppress(OSError):
            if _try_lock(self._users, fcntl.LOCK_EX):
                shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._users)
        os.close(self._lock)

    def _fetch(self, newer_than: int) -> _Encoded | None:
        found = self._get(newer_than)
        self.transfers += found is not None
        return found

    def _read(self, newer_than: int) -> _Encoded | None:
        with contextlib.suppress(FileNotFoundError), open(self._folder / "params", "rb") as file:
            (version,) = _VERSION.unpack(file.read(_VERSION.size))
            if version > newer_than:
                return version, file.read()
        return None

    def _write(self, held: _Encoded) -> None:
        """Replaces the file, if there is space: the others ask the learner otherwise."""
        version, params = held
        new = self._folder / f"new-{os.getpid()}-{id(self)}"
        try:
            with open(new, "wb") as file:
                file.write(_VERSION.pack(version))
                file.write(params)
            os.rename(new, self._folder / "params")
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new)


def _prefix() -> str:
    return f"rlstack-params-{os.getuid()}-"


def _join(folder: Path) -> int:
    """Makes the folder if it is missing; returns a descriptor whose lock says that it is used."""
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


def _sweep(folder: Path) -> None:
    """Removes what killed processes left."""
    for left in _own_folders(folder):
        with contextlib.suppress(OSError):
            users = os.open(left / "users", os.O_RDWR)
            try:
                if _try_lock(users, fcntl.LOCK_EX):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
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
