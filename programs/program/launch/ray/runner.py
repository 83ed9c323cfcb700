"""The process of one node on a host of a Ray cluster; the launcher calls it through Ray.

Ray only places and watches this process. Nodes call one another without Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlstack.programs.program.supervisor import End

_CHUNK = 1 << 16  # most bytes of a log that one answer has
_MOST = 1 << 24  # bytes of a log on a host that does not see the run directory


class Placement(NamedTuple):
    """Where a node's process runs."""

    host: str  # the address by which other hosts reach it
    node_id: str  # Ray's id of the host
    pid: int
    ports: tuple[int, ...]  # for the node's servers; held for them
    token: str  # the contents of the token file, as this host sees it
    versions: bytes = b""  # versions of rlstack there; empty from a version without this field


class Watched(NamedTuple):
    """What a process says of its node."""

    end: End | None = None  # how the node ended; None while it runs
    log: str = ""  # the file with its output, if this host does not see the run directory
    output: bytes = b""  # the bytes added to that file since the last answer
    at: int = 0  # the bytes of the file that were read


def read_log(path: str, since: int) -> tuple[bytes, int]:
    """Returns the new end of a log, and its size; a log that has become too large is emptied.

    Args:
      path: the file, to which a node may be writing.
      since: the bytes of it that were read before.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(since if since <= size else 0, size - _CHUNK)
        file.seek(start)
        output = file.read(size - start)
    if start > since:
        output = b"[%d bytes of output are left out]\n" % (start - since) + output
    if size > _MOST:
        os.truncate(path, 0)
        size = 0
    return output, size


def last_of_log(path: str, since: int) -> tuple[bytes, int]:
    """Returns what `read_log` does, and removes the file."""
    try:
        return read_log(path, since)
    finally:
        os.unlink(path)


class NodeRunner:
    """Runs one node in a thread; every method may be called while another waits."""

    def __init__(self) -> None:
        self._stop, self._done = threading.Event(), threading.Event()
        self._end = End(ordered=True)
        self._is_away, self._log = False, ""
        self._held = contextlib.ExitStack()  # ports, until this process ends

    def prepare(
        self,
        token_file: str,
        num_ports: int,
        interface: str,
        variables: Mapping[str, str],
        among: Sequence[int] = (),
        sent: tuple[str, bytes] | None = None,
    ) -> Placement:
        """Returns where this process runs and which ports are free.

        Args:
          token_file: a file in the run directory, which every host must see at the same path.
          num_ports: number of ports that the node will listen on.
          interface: this host's interface by which others reach the node; empty for Ray's own.
          variables: environment variables of the program's transport.
          among: the ports to choose from; () for any.
          sent: for a run directory in an object store, which this host need not see: the contents
            of the token file, and the secret of the transport.
        """
        os.environ.update(variables)
        import ray

        from rlstack.programs.session import module_path

        module_path.arrange()  # Ray puts the directory of the command first
        from rlstack.rpc import addresses, transports, versions
        from rlstack.rpc.socket_filter import address_of

        try:
            token = Path(token_file).read_text()
        except OSError as error:
            token = f"({error.strerror})"
            if sent is not None:
                self._is_away = True
                token, secret = sent
                transports.adopt(secret)
        address = ray.util.get_node_ip_address()
        if interface and not addresses.is_all(interface):
            address = address_of(interface)
        node_id = ray.get_runtime_context().get_node_id()
        held = [self._held.enter_context(addresses.reserve_port(among)) for _ in range(num_ports)]
        return Placement(address, node_id, os.getpid(), tuple(held), token, versions.own())

    def start(
        self, program: bytes, name: str, incarnation: int, coordinator_lost: float, log: str
    ) -> Watched:
        """Starts the node.

        Args:
          program: the program, pickled.
          name: the name of the node.
          incarnation: number of restarts of the node.
          coordinator_lost: seconds without an answer of the coordinator after which the node ends.
          log: the file for the node's output. A host that does not see the run directory has
            another one, of which `watch` returns what is new.
        """
        if self._is_away:
            handle, log = tempfile.mkstemp(prefix="rlstack-", suffix=".log")
            os.close(handle)
            self._log = log
            atexit.register(Path(log).unlink, missing_ok=True)  # if nobody reads the end of it
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        arguments = (program, name, incarnation, coordinator_lost)
        threading.Thread(target=self._run, args=arguments, name="node", daemon=True).start()
        return Watched(log=self._log)

    def watch(self, seconds: float, since: int = 0) -> Watched:
        """Waits at most this long for the node to end.

        Args:
          seconds: how long it waits.
          since: the bytes of its log that were read before.
        """
        end = self._end if self._done.wait(seconds) else None
        if not self._log:
            return Watched(end)
        if end is None:
            return Watched(None, self._log, *read_log(self._log, since))
        log, self._log = self._log, ""
        return Watched(end, "", *last_of_log(log, since))

    def stop(self) -> None:
        """Asks the node to end."""
        self._stop.set()

    def _run(self, program: bytes, name: str, incarnation: int, coordinator_lost: float) -> None:
        try:
            import cloudpickle

            from rlstack.programs.program import base
            from rlstack.programs.program.launch import wiring
            from rlstack.programs.program.stopping import end_of

            base.set_incarnation(incarnation)
            base.set_coordinator_lost(coordinator_lost)
            wiring.run_node(cloudpickle.loads(program), name, self._stop)
        except BaseException as error:
            self._end = end_of(error, base.ran_seconds())
            print(self._end.traceback, flush=True)
        finally:
            self._done.set()
