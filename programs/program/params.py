"""How nodes that act get the learner's params."""

from __future__ import annotations

import contextlib
import copy
import struct
import time
from collections.abc import Callable

from rlstack.acting.params import ParamsPuller, ParamsSource, RemoteParams
from rlstack.programs.program.base import Setup
from rlstack.programs.program.host import HostFolder
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
    The version is in a file of a `HostFolder`. Whoever holds its lock asks the learner.

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
          OSError: see `HostFolder`.
        """
        self._get, self._patience = get, patience
        self.transfers = 0
        self._folder = HostFolder(f"params-{name}", folder)
        self._busy_since: float | None = None  # since when another process has held the lock

    def get(self, newer_than: int) -> _Encoded | None:
        """Returns (version, params), or None when there is nothing newer here yet."""
        held = self.read(newer_than)
        if held is not None:
            self._busy_since = None
            return held
        with self._folder.held() as holds:
            if holds:
                self._busy_since = None
                held = self.read(newer_than)  # written since the look above
                if held is None:
                    held = self._fetch(newer_than)
                    if held is not None:
                        version, params = held
                        with contextlib.suppress(OSError):  # no space: the others ask the learner
                            self._folder.write("params", _VERSION.pack(version), params)
                return held
        now = time.monotonic()
        self._busy_since = now if self._busy_since is None else self._busy_since
        if now < self._busy_since + self._patience:
            time.sleep(timing.SHARED_PARAMS_LOOK)
            return None
        return self._fetch(newer_than)  # the other one hangs

    def read(self, newer_than: int) -> _Encoded | None:
        """Returns what this host has, (version, params), if it is newer; asks nobody."""
        path = self._folder.path / "params"
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            (version,) = _VERSION.unpack(file.read(_VERSION.size))
            if version > newer_than:
                return version, file.read()
        return None

    def close(self) -> None:
        """Removes the file if no other process uses it; `get` must not be called again."""
        self._folder.close()

    def _fetch(self, newer_than: int) -> _Encoded | None:
        found = self._get(newer_than)
        self.transfers += found is not None
        return found
