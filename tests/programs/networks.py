"""Hosts with separate networks: namespaces joined by a bridge, with a Ray node in each."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.programs.clusters import VARIABLES

_HIDES = 'mount -t tmpfs none "$1" && shift && exec "$@"'


def hiding(folder):
    """The prefix that runs a command for which a folder is empty, as on a machine of its own."""
    return ("unshare", "-m", "sh", "-c", _HIDES, "sh", str(folder))


class Host:
    """One namespace.

    Attributes:
      hides: a folder that is empty on this host; None for a host that has all files of the machine.
    """

    def __init__(self, name, address, wire):
        self.name, self.address, self._wire = name, address, wire
        self.hides = None

    @property
    def within(self):
        """The prefix that runs a command in the namespace."""
        hides = () if self.hides is None else hiding(self.hides)
        return ("ip", "netns", "exec", self.name, *hides)

    def signal(self, number):
        """Sends a signal to all processes of the host."""
        command = ["ip", "netns", "pids", self.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
        for pid in map(int, shown.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def connect(self, up):
        """Sets the host's network link up or down."""
        _ip("link", "set", self._wire, "up" if up else "down")

    def connections(self):
        """(peer address, peer port, local pid) of each connection of the host's processes."""
        command = [*self.within, "ss", "-tnpH", "state", "established"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
        for line in shown.stdout.splitlines():
            peer, _, port = line.split()[3].rpartition(":")
            for pid in re.findall(r"pid=(\d+)", line):
                yield peer.strip("[]").removeprefix("::ffff:"), int(port), int(pid)


def _ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def network(size):
    """Namespaces on one bridge; skips the test if the user may not create them.

    At the address .254 they reach this process.
    """
    mark = secrets.token_hex(2)
    bridge, subnet = f"rlb{mark}", f"10.213.{secrets.randbelow(250)}"
    hosts = [Host(f"rl{mark}-{i}", f"{subnet}.{i}", f"rlw{mark}{i}") for i in range(1, size + 1)]
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "ss"))):
        pytest.skip("namespaces of networks need root and the commands ip and ss")
    with contextlib.ExitStack() as stack:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            stack.callback(_ip, "link", "del", bridge)
            _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for host in hosts:
                _ip("netns", "add", host.name)
                stack.callback(_ip, "netns", "del", host.name)
                ends = ("type", "veth", "peer", "name", "eth0", "netns", host.name)
                _ip("link", "add", host._wire, *ends)
                _ip("link", "set", host._wire, "master", bridge, "up")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
                for interface in ("eth0", "lo"):
                    _ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces of networks may not be made here: {error.stderr.decode()}")
        yield hosts


@contextlib.contextmanager
def ray_on(hosts):
    """Starts Ray on the hosts, the first as the head; yields the cluster's address."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    address = f"{hosts[0].address}:6379"
    started = []
    try:
        for host in hosts:
            joins = ["--address", address]
            if host is hosts[0]:
                joins = ["--head", "--port=6379", "--include-dashboard=false", "--temp-dir", folder]
            with open(f"{folder}-{host.name}.log", "ab") as log:
                command = [
                    *host.within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
                    *joins, "--node-ip-address", host.address, "--num-cpus=8",
                    "--object-store-memory=83886080", "--disable-usage-stats",
                ]  # fmt: skip
                started.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **VARIABLES, "RAY_TMPDIR": folder},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            wait_until_up(f"{folder}-{host.name}.log", started[-1])
        yield address
    finally:
        _end(started)
        shutil.rmtree(folder, ignore_errors=True)
        for host in hosts:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}-{host.name}.log")


def wait_until_up(log, process, timeout=60.0):
    until = time.monotonic() + timeout
    while "Ray runtime started" not in (said := Path(log).read_text()):
        assert process.poll() is None, said
        assert time.monotonic() < until, said
        time.sleep(0.1)


def _end(started):
    below = []
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(process.pid).children(recursive=True)
    for process in reversed(started):
        process.terminate()
    psutil.wait_procs(below, timeout=10.0)
    for process in [*below, *started]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in started:
        process.wait()
