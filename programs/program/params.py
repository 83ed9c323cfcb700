"""How nodes that act get the learner's params."""

from __future__ import annotations

import contextlib
import copy
import math
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rlstack.acting.params import ParamsPuller, ParamsSource, RemoteParams
from rlstack.programs.program.base import Setup
from rlstack.programs.program.host import HostFolder
from rlstack.programs.session import timing
from rlstack.replay.shared_memory.block import FOLDER
from rlstack.rpc import (
    ClosedError,
    Remote,
    RemoteError,
    RemoteObject,
    UnavailableError,
    codec,
)
from rlstack.rpc.socket_filter import address_towards

_Encoded = tuple[int, bytes]  # a version, and its params
_VERSION = struct.Struct("<q")
# The learner sends each version to as many hosts as these bytes hold, and to two at least: to all,
# as long as params are small. 32 MiB take 27 ms of a link of 10 Gbit/s.
SENT_BY_ONE = 1 << 25


class Pulled(NamedTuple):
    """A source of a learner's params.

    Attributes:
      source: the source.
      close: closes it.
      shared: what the processes of this host share; None if this one asks by itself.
    """

    source: ParamsSource
    close: Callable[[], None]
    shared: HostParams | None = None


def pull_params(
    setup: Setup, learner: RemoteObject, address: Callable[[], str] = lambda: ""
) -> Pulled:
    """Returns a source of the learner's params.

    Asynchronous programs pull in the background. In lock-step every request goes to the learner,
    which is idle while actors act, so actors use the params that a single process would use. In
    rounds actors wait for newer params, so each pull in the background waits for these. On a
    cluster, one node per host pulls, and the other nodes of the host read its copy; the learner
    may tell it to pull from another host (`ParamsTree`).

    Args:
      setup: the program's setup, or the policy's.
      learner: a client of the learner's node.
      address: returns the address at which this node answers `share_params`; "" if it does not.
    """
    cfg = setup.experiment.program
    client = copy.copy(learner)  # its own client: closing it cancels only the pull in progress
    if cfg.pacing == "lock_step":
        return Pulled(RemoteParams(client.get_params, codec.decode), client.close)
    get: Callable[[int], _Encoded | None] = client.get_params
    interval, seconds = cfg.params_interval, 0.0
    if setup.experiment.replay.min_actors:
        interval, seconds = 0.0, timing.NEXT_PARAMS
        get = lambda held: client.next_params(held, seconds)  # noqa: E731
    shared, tree = None, None
    if cfg.on_several_hosts:
        with contextlib.suppress(OSError):  # then this process asks by itself
            here = address_towards(client.host)
            tree = FromHosts(client, seconds, here, address)
            shared = HostParams(f"{client.publication()}-{here}", tree.get)
            get = shared.get
    source = RemoteParams(get, codec.decode)
    patience = timing.PARAMS_PULL_RESTART if setup.learner_restarts else timing.PARAMS_PULL
    background = ParamsPuller(source, interval, patience=patience)

    def close() -> None:
        client.close()  # first; otherwise closing would wait for a learner that has ended
        if tree is not None:
            tree.close()
        background.close()
        if shared is not None:
            shared.close()

    return Pulled(background, close, shared)


class ParamsTree:
    """The learner's side of a tree of hosts: who gets a version from whom.

    Hosts take their places in the order in which they ask for a version. The learner sends it to
    the first ones, and each host to as many others. So each version has a tree of its own, which
    follows from who asks: a host that is lost asks for no further version.
    """

    def __init__(self, bytes_by_one: int = SENT_BY_ONE) -> None:
        """Makes an empty tree.

        Args:
          bytes_by_one: the learner sends a version to as many hosts as these bytes hold.
        """
        self._bytes = bytes_by_one
        self._lock = threading.Lock()
        self._version = -1
        self._places: dict[str, int] = {}  # of the hosts that asked for this version
        self._addresses: list[str] = []  # of the hosts, by place
        self._avoided: dict[str, float] = {}  # until when, by address

    def source_of(self, version: int, size: int, host: str, address: str) -> str:
        """Returns the address from which a host gets a version; "" for the learner.

        Args:
          version: the newest version.
          size: its bytes.
          host: the host.
          address: where another host can get it from this host; "" for nowhere.
        """
        with self._lock:
            if not address or version < self._version:
                return ""
            if version > self._version:
                self._version, self._places, self._addresses = version, {}, []
            place = self._places.get(host, len(self._addresses))
            if self._avoided.get(address, -math.inf) < time.monotonic():
                self._places[host] = place
                self._addresses[place : place + 1] = [address]
            each = max(2, self._bytes // max(size, 1))
            return self._addresses[place // each - 1] if place >= each else ""

    def avoid(self, address: str) -> None:
        """Sends no host to this address for a while, because one could not reach it."""
        with self._lock:
            self._avoided[address] = time.monotonic() + timing.PARAMS_AVOID


class FromHosts:
    """The other side of a `ParamsTree`: gets versions from the learner or the host that it names.

    The learner says which version is the newest, so nobody stays behind with a host that is; and it
    sends the version itself if that host has not sent it in time.
    """

    def __init__(
        self, learner: RemoteObject, seconds: float, host: str, address: Callable[[], str]
    ) -> None:
        """Connects at the first call.

        Args:
          learner: a client of the learner.
          seconds: how long the learner waits for a newer version.
          host: the address of this host.
          address: returns the address at which this node answers `share_params`; "" if it does not.
        """
        self._learner, self._seconds = learner, seconds
        self._host, self._address = host, address
        self._others: dict[str, RemoteObject] = {}
        self._closed = False

    def get(self, newer_than: int) -> _Encoded | None:
        """Returns (version, params), or None when there is nothing newer."""
        place = self._host, self._address()
        found = self._learner.next_params(newer_than, self._seconds, *place)
        if found is None or not isinstance(found[1], str):
            return found
        lost = ""
        try:
            held: _Encoded | None = self._client(found[1]).call(
                "share_params", (newer_than, timing.PARAMS_SHARE), timeout=timing.PARAMS_SHARE_CALL
            )
            if held is not None and held[0] > newer_than:
                return held
        except (UnavailableError, RemoteError):
            lost = found[1]
            self._others.pop(lost).close()
        return self._learner.next_params(newer_than, 0.0, "", "", lost)

    def close(self) -> None:
        """Ends the call in progress."""
        self._closed = True
        for client in list(self._others.values()):
            client.close()

    def _client(self, address: str) -> RemoteObject:
        if address not in self._others:
            if self._closed:
                raise ClosedError("FromHosts: it is closed.")
            rules = {"share_params": Remote(idempotent=True)}
            self._others[address] = RemoteObject(address, rules, name=address)
        return self._others[address]


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

    def wait(self, newer_than: int, seconds: float) -> _Encoded | None:
        """Waits until this host has a newer version; returns it like `read`."""
        until = time.monotonic() + seconds
        while (held := self.read(newer_than)) is None and time.monotonic() < until:
            time.sleep(timing.SHARED_PARAMS_LOOK)
        return held

    def close(self) -> None:
        """Removes the file if no other process uses it; `get` must not be called again."""
        self._folder.close()

    def _fetch(self, newer_than: int) -> _Encoded | None:
        found = self._get(newer_than)
        self.transfers += found is not None
        return found
