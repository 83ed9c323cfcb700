"""A Ray that a run starts for itself can be reached from this machine only."""

import collections
import contextlib
import os
import threading
import time

import psutil
import pytest

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.program.launch.ray import cluster
from tests.programs.clusters import VARIABLES
from tests.programs.running import ppo, run
from tests.rpc.test_socket_filter import can_connect, own_address

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180, method="thread")]


class Doors(threading.Thread):
    """Looks at the ports on which this process and its descendants listen, until `close`.

    Attributes:
      listening: by port, the name of the process.
      open: by port, for how long, in seconds, it could be reached at an address of this host.
    """

    def __init__(self):
        super().__init__()
        self.listening, self.open = {}, collections.Counter()
        self._over, self._since = threading.Event(), {}
        self._owners = dict.fromkeys(_listening(), None)  # by inode; None: not of a descendant

    def run(self):
        host = own_address()
        while not self._over.wait(0.1):
            found = _listening()
            new = found.keys() - self._owners.keys()
            self._owners |= dict.fromkeys(new, None) | (_owners(new) if new else {})
            for inode, port in found.items():
                if self._owners[inode] is None:
                    continue
                self.listening[port] = self._owners[inode]
                if can_connect(host, port):
                    since = self._since.setdefault(port, time.monotonic())
                    self.open[port] = time.monotonic() - since
                else:
                    self._since.pop(port, None)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()


def _listening():
    """The ports on which processes of this machine listen, by the inode of the socket."""
    rows = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as file:
            rows += [line.split() for line in file][1:]
    return {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def _owners(inodes):
    """The names of the processes, of this one and its descendants, that have the sockets."""
    found, me = {}, psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            for fd in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    inode = os.readlink(f"/proc/{process.pid}/fd/{fd}")[8:-1]
                    if inode in inodes:
                        found[inode] = process.name()
    return found


def _number():
    return os.getpid()


@pytest.mark.chosen
@pytest.mark.parametrize("interface", ["", "0.0.0.0"])
def test_no_port_of_a_local_ray_is_open_to_others(monkeypatch, interface):
    """Also if the nodes' own servers listen on all interfaces: no other host joins this Ray."""
    own_address()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = ProgramConfig(launch="ray", interface=interface, ray=RayConfig())
    with Doors() as doors, cluster.joined(cfg) as ray:
        assert ray.get(ray.remote(_number).remote()) != os.getpid()  # starts a worker
        time.sleep(1.5)
    names = set(doors.listening.values())
    assert {"gcs_server", "raylet"} <= names
    assert any(name.startswith("ray::") for name in names)
    assert {doors.listening[port] for port in doors.open} == set()


@pytest.mark.launchpad
def test_no_port_of_a_program_on_a_local_ray_is_open_to_others(tmp_path, monkeypatch):
    """Nodes' own servers may be open for the milliseconds before their filter."""
    own_address()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with Doors() as doors:
        run(ppo("distributed", program={"launch": "ray", "num_actors": 1}), tmp_path / "run")
    assert len(doors.listening) >= 10
    assert [port for port, seconds in doors.open.items() if seconds > 0.3] == []
