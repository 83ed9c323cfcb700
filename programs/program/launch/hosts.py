"""Runs a program's nodes on several hosts, on each of which the same command runs.

Nothing is placed by a service: every command computes the same places and ports. The command of the
first host, the leader, has the run directory and runs the coordinator. It writes the program to a
file there. The commands of the other hosts wait for that file, and run their nodes. A host that
comes back, as after a preemption, does so again; its nodes continue as their next incarnations.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import re
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import cloudpickle

from rlstack.programs.config.experiment import Experiment, ProgramConfig
from rlstack.programs.program.base import OVER, Setup
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.graph import Graph, Node
from rlstack.programs.program.launch import launcher, processes, wiring
from rlstack.programs.program.launch.wiring import Program
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.session import timing
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import RemoteError, RemoteObject, UnavailableError, transports, versions
from rlstack.rpc.addresses import LOOPBACK, join, reserve_port, resolved
from rlstack.rpc.socket_filter import address_of, address_towards

_FILE = ".program"  # in the run directory
_LIST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # an entry of a list such as node[1-3,7],gpu1
_RANGES = re.compile(r"\[(\d[\d,-]*)\]")

Answer = TypeVar("Answer")


class Hosts(NamedTuple):
    """The hosts of a program, and which of them this one is."""

    names: tuple[str, ...]
    own: int

    @property
    def leads(self) -> bool:
        """Whether this host's command has the run directory."""
        return self.own == 0


def of_program(cfg: ProgramConfig, variables: Mapping[str, str] = os.environ) -> Hosts:
    """Returns the hosts that the config names, or those of Slurm or SkyPilot.

    Args:
      cfg: the program's config.
      variables: environment variables.

    Raises:
      ValueError: the hosts, or which of them this one is, are not known.
    """
    listed = ",".join(cfg.hosts) or _of_scheduler(variables)
    names = tuple(name for entry in _LIST.findall(listed) for name in _expanded(entry))
    if not names:
        raise ValueError(
            "launch hosts: the hosts must be known; this process runs neither in a job of Slurm "
            "nor of SkyPilot. Name them with --program.hosts, and this one with --program.host."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"launch hosts: hosts must differ; got {', '.join(names)}.")
    own = _own_index(cfg, names, variables)
    if not 0 <= own < len(names):
        known = f"{len(names)} ({', '.join(names[:4])}{', ...' * (len(names) > 4)})"
        raise ValueError(
            f"launch hosts: this host must be one of the {known}; got "
            f"{socket.gethostname() if own < 0 else own}. --program.host says which it is."
        )
    return Hosts(names, own)


def check_shared(directory: RunDir) -> None:
    """Raises a ValueError if hosts cannot find one another by a file in the run directory."""
    if directory.is_stored:
        raise ValueError(
            "launch hosts: the run directory must be on a file system that all hosts share; got "
            f"{directory.name}. --launch ray needs no such file system."
        )


def _of_scheduler(variables: Mapping[str, str]) -> str:
    groups = int(variables.get("SLURM_HET_SIZE", "0"))
    lists = [variables.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in range(groups)]
    lists = [*lists, *variables.get("SKYPILOT_NODE_IPS", "").split()]
    return ",".join(filter(None, lists)) or variables.get("SLURM_JOB_NODELIST", "")


def _own_index(cfg: ProgramConfig, names: Sequence[str], variables: Mapping[str, str]) -> int:
    if cfg.host is not None:
        return cfg.host
    if not cfg.hosts and "SKYPILOT_NODE_RANK" in variables:
        return int(variables["SKYPILOT_NODE_RANK"])
    name = variables.get("SLURMD_NODENAME") or socket.gethostname()
    firsts = [other.partition(".")[0] for other in names]
    for known, wanted in ((list(names), name), (firsts, name.partition(".")[0])):
        if known.count(wanted) == 1:
            return known.index(wanted)
    return -1


def _expanded(entry: str) -> Iterator[str]:
    """Yields the names of an entry such as "node[01-03,7]"."""
    found = _RANGES.search(entry)
    if found is None:
        yield entry
        return
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            text = f"{entry[: found.start()]}{number:0{len(first)}}{entry[found.end() :]}"
            yield from _expanded(text)


def place_of(node: Node, index: int, experiment: Experiment, count: int) -> int:
    """Returns the host of a node.

    The first hosts have a learner process each, with its replay. The others have the actors and the
    inference services, and the last one the evaluator; without others, all hosts have actors.

    Args:
      node: the node.
      index: its index in its group.
      experiment: the program's experiment.
      count: the number of hosts.
    """
    learning = min(experiment.learner.processes, count)
    if node.group in ("learner", "replay"):
        return index % learning
    if node.group == "coordinator":
        return 0
    others = range(learning if count > learning else 0, count)
    return others[-1] if node.group == "evaluator" else others[index % len(others)]


class _Part(NamedTuple):
    """What one host runs of a program."""

    program: Program
    nodes: list[tuple[Node, int]]  # with their index in their group


@contextlib.contextmanager
def _part_of(
    graph: Graph, setup: Setup, hosts: Hosts, known: Mapping[str, str] | None = None
) -> Iterator[_Part]:
    """Yields this host's part; its ports are held until the end.

    Args:
      graph: the program's nodes.
      setup: the program's setup.
      hosts: all hosts.
      known: the addresses that the leader has told; None in the leader.
    """
    experiment = setup.experiment
    served = [node for node in graph.nodes if node.kind != "worker"]
    ports = experiment.program.port_range
    if len(ports) <= len(served):
        raise ValueError(
            f"launch hosts: program.ports must have a port for each of {len(served)} servers, and "
            f"another one; got {len(ports)}."
        )
    places = {
        node.name: place_of(node, index, experiment, len(hosts.names))
        for node, index in wiring.indexed(graph)
    }
    own = _own_address(experiment.program, hosts)
    addresses = dict(known or {})
    with contextlib.ExitStack() as held:
        for node, port in zip(served, ports, strict=False):
            if places[node.name] == hosts.own:
                held.enter_context(reserve_port([port]))
                addresses[node.name] = join(own, port)  # its name may mean loopback here
            elif known is None:
                addresses[node.name] = join(hosts.names[places[node.name]], port)
        here = [(n, i) for n, i in wiring.indexed(graph) if places[n.name] == hosts.own]
        yield _Part(Program(graph.nodes, setup, addresses), here)


def _own_address(cfg: ProgramConfig, hosts: Hosts) -> str:
    """Returns the numeric address by which the other hosts reach this one."""
    if cfg.interface:
        return address_of(cfg.interface)
    if len(hosts.names) == 1:
        return LOOPBACK
    name = hosts.names[hosts.own]
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(name))
    other = hosts.names[1 if hosts.leads else 0]

    def found() -> str | None:
        for look in (lambda: resolved(name), lambda: address_towards(other)):
            with contextlib.suppress(OSError):  # not known yet
                address = look()
                if not ipaddress.ip_address(address).is_loopback:
                    return address
        return None

    return _wait(found, f"an address by which {other} reaches this host ({name})")


def _wait(look: Callable[[], Answer | None], what: str) -> Answer:
    """Returns what is found; looks again for as long as a program may take to start."""
    until = time.monotonic() + timing.START
    while (found := look()) is None:
        if time.monotonic() > until:
            raise ValueError(f"launch hosts: there must be {what} within {timing.START:g} s.")
        time.sleep(timing.DISPLAY_PERIOD)
    return found


def run_hosts(process: subprocess.Popen[bytes], setup: Setup, display: ProgressDisplay) -> int:
    """Runs the leader's part; returns the signal that was received, or 0.

    Args:
      process: the launcher's process, started with the code `launcher.LOCAL`.
      setup: the program's setup.
      display: shows the program's progress.
    """
    graph, hosts = graph_of(setup), of_program(setup.experiment.program)
    check_shared(setup.directory)
    if not hosts.leads:
        raise ValueError(
            f"launch hosts: `rlstack train` must run the part of {hosts.names[hosts.own]}; in "
            "Python only the first host's part can be run."
        )
    with _part_of(graph, setup, hosts) as part, _published(part.program):
        return processes.run_part(process, part.program, part.nodes, display)


class _Told(NamedTuple):
    """What the leader tells the other hosts."""

    versions: bytes
    transport: str
    secret: bytes  # of the transport
    program: bytes  # pickled


@contextlib.contextmanager
def _published(program: Program) -> Iterator[None]:
    """Writes the program, for the other hosts, to a file that only this user can read."""
    path = program.setup.directory.path / _FILE
    secret = transports.secret()
    told = _Told(versions.own(), transports.current(), secret, cloudpickle.dumps(program))
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pickle.dumps(tuple(told)))
    new.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def follow(run_dir: Path, hosts: Hosts) -> int:
    """Waits for the leader's program, and runs this host's part of it; returns the exit code.

    Args:
      run_dir: the run directory, which all hosts share.
      hosts: all hosts.

    Raises:
      ValueError: the leader does not start in time, or it has another version of rlstack.
    """
    until = time.monotonic() + timing.START
    while time.monotonic() < until:
        if (told := _read(run_dir / _FILE)) is not None:
            with transports.chosen(told.transport, secret=told.secret):
                program: Program = pickle.loads(told.program)
                incarnations = _incarnations(program, hosts)
                if incarnations is not None:
                    return _run(program, hosts, incarnations)
        time.sleep(timing.DISPLAY_PERIOD)
    raise ValueError(
        f"launch hosts: {hosts.names[0]} must start a program in {run_dir}, which all hosts see, "
        f"within {timing.START:g} s; it has not. Its own output says why."
    )


def _read(path: Path) -> _Told | None:
    """Returns what the leader tells; None if it tells nothing."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ValueError(f"launch hosts: only this user may own and read {path}.")
            told = _Told(*pickle.load(file))
    except FileNotFoundError:
        return None
    if wrong := versions.differences(told.versions, "the first host"):
        raise ValueError(f"launch hosts: {wrong}")
    return told


def _incarnations(program: Program, hosts: Hosts) -> dict[str, int] | None:
    """Returns the incarnations of this host's nodes that have run before.

    None if the coordinator does not answer, as after the end of an earlier command, or if a node
    that cannot be restarted has run before: that program ends.
    """
    address = program.addresses["coordinator"]
    coordinator = RemoteObject(address, Coordinator, name="coordinator")
    try:
        status = coordinator.call("status", timeout=timing.ASK_COORDINATOR)
    except (UnavailableError, RemoteError):
        return None
    finally:
        coordinator.close()
    nodes, experiment = status["nodes"], program.setup.experiment
    found = {}
    for node, index in wiring.indexed(_graph(program)):
        here = place_of(node, index, experiment, len(hosts.names)) == hosts.own
        if here and node.name in nodes:
            found[node.name] = int(nodes[node.name]["restarts"]) + 1
            if not node.restartable:
                return None
    return None if status["phase"] == OVER else found


def _run(program: Program, hosts: Hosts, incarnations: Mapping[str, int]) -> int:
    experiment = program.setup.experiment
    with (
        _part_of(_graph(program), program.setup, hosts, program.addresses) as part,
        processes.started(
            launcher.LOCAL, program.setup.directory, f"launcher-{hosts.own}"
        ) as process,
        ProgressDisplay(experiment.all_frames, shows_progress=False) as display,
    ):
        received = processes.run_part(process, part.program, part.nodes, display, incarnations)
        code = process.returncode
    return 128 + received if received else int(code != 0)


def _graph(program: Program) -> Graph:
    graph = Graph(program.setup.experiment.topology)
    graph.nodes.extend(program.nodes)
    return graph
