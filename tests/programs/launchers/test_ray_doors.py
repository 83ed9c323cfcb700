"""A Ray that a run starts for itself can be reached from this machine only."""

import collections
import contextlib
import os
import threading
import time

import psutil
import pytest

from programs.cluster_config import RayConfig
from programs.experiment import ProgramConfig
from programs.launchers import ray_cluster
from tests.programs.clusters import VARIABLES
from tests.programs.running import ppo, run
from tests.rpc.test_socket_filter import can_connect, own_address

pytest.importorskip("launchpad")
pytest.importorskip("ray")
pytestmark = [
    pytest.mark.reference,
    pytest.mark.slow,
    pytest.mark.chosen,
    pytest.mark.timeout(180, method="thread"),
]


class Doors(threading.Thread):
    """Looks at the ports on which this process and its descendants listen, until `close`.

    Attributes:
      listening: by port, the name of the process.
      open: by port, for how long, in seconds, it could be reached at an address of this host.
    """

    def __init__(self):
        super().__init__()
        self.listening, self.open = {}, collections.Counter()
        self._mine, self._over = self._ports(), threading.Event()
        self._since = {}
        self.start()

    @staticmethod
    def _ports():
        found, me = {}, psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found[connection.laddr.port] = process.name()
        return found

    def run(self):
        host = own_address()
        while not self._over.wait(0.1):
            for port, name in self._ports().items():
                if port in self._mine:
                    continue
                self.listening[port] = name
                if can_connect(host, port):
                    since = self._since.setdefault(port, time.monotonic())
                    self.open[port] = time.monotonic() - since
                else:
                    self._since.pop(port, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()


@pytest.mark.parametrize("interface", ["", "0.0.0.0"])
def test_no_port_of_a_local_ray_is_open_to_others(monkeypatch, interface):
    """Also if the nodes' own servers listen on all interfaces: no other host joins this Ray."""
    own_address()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = ProgramConfig(launch="ray", interface=interface, ray=RayConfig())
    with Doors() as doors, ray_cluster.joined(cfg) as ray:
        assert ray.get(ray.remote(os.getpid).remote()) != os.getpid()  # starts a worker
        time.sleep(1.5)
    names = set(doors.listening.values())
    assert {"gcs_server", "raylet"} <= names
    assert any(name.startswith("ray::") for name in names)
    assert {doors.listening[port] for port in doors.open} == set()


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
