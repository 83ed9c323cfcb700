"""The process that starts a program's nodes on this machine, waits for them, and ends them.

    python -m rlstack.programs.program.launch.local RUN_DIR

It imports the packages that nodes need, while its parent prepares the program. If RUN_DIR is empty,
its parent does not know the run yet; standard input then begins with a line of JSON about it. Next
come a line of JSON, which describes each node, and the pickled program. It prints a
line once all nodes are started, and ends when they have ended. It is a process of its own, because
supervisors signal their parent, and only a main thread can handle signals: a program may be
launched by any thread of a notebook.

It forks the supervisors of the nodes, which fork the nodes. So packages are imported once for a
program, also if nodes are restarted. What only some nodes need is imported when the others have
been started. JAX has not computed anything here: its devices and threads would not survive a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rlstack.programs.program import supervisor
from rlstack.programs.program.launch import compiled, node_process, signs
from rlstack.programs.session import module_path, timing
from rlstack.programs.session.titles import set_title


class Forked:
    """A forked child process, with a part of the interface of ``subprocess.Popen``.

    Attributes:
      pid: the child's process id.
    """

    def __init__(self, function: Callable[[], int]) -> None:
        """Forks; call it in the main thread only.

        Args:
          function: the function that the child runs; it returns the exit code.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(function)

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal that killed it; None while it runs."""
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        """Returns the exit code when the process has ended."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Sends SIGTERM, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)


def _run(function: Callable[[], int]) -> NoReturn:
    """Runs the function in the child, and ends it without what its parent does at its own end."""
    code = 1
    try:
        code = function()
    except BaseException:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)
_told = bytearray()  # what the parent has told of the run


@dataclasses.dataclass(frozen=True)
class NodeProcess:
    """The description by which this process starts a node."""

    name: str
    run_dir: str
    record: str  # path of the record of failures
    log: str
    variables: dict[str, str]  # environment variables
    niceness: int
    grace: float  # seconds from a signal until the node is killed
    silence: float  # seconds without a sign of life until the node is killed; 0 for never
    max_restarts: int
    envpool: bool = False  # whether the node steps environments of EnvPool
    incarnation: int = 0  # the first one here


def main() -> int:
    """Runs the launcher's process; returns its exit code."""
    answers = begin()
    try:
        _import_modules()
        if not (sys.argv[1] or _learn_of_run()):
            return 1
        described = receive()
        if described is None:
            return 1
        program = sys.stdin.buffer.read()
        received = _Signals()
        nodes: list[_Node] = []
        try:
            for fields in described:
                made = NodeProcess(**fields)
                if made.envpool:
                    _import_envpool()
                nodes.append(_Node(made, program, [answers.close, received.close]))
            print("launched", file=answers, flush=True)
            return _wait(nodes, received)
        finally:
            _end(nodes, received)
    finally:
        clean()


def clean() -> None:
    """Removes the program's compiled functions, and the file of its keys (`rlstack.rpc.zmq.keys`).

    The command does so too, but it may be killed.
    """
    compiled.remove()
    folder = os.path.dirname(os.environ.get("RLSTACK_KEYS", ""))
    if os.path.basename(folder).startswith("rlstack-keys-"):
        shutil.rmtree(folder, ignore_errors=True)


def begin() -> TextIO:
    """Makes this process the launcher's; returns where its parent reads answers.

    Standard output is for answers only; all other output goes to standard error. From now on,
    SIGTERM, which also comes when the parent ends, removes what `clean` removes.
    """
    signal.signal(signal.SIGTERM, _leave)
    supervisor.die_with_parent(signal.SIGTERM, supervisor.parent_id())
    os.environ[supervisor.PARENT] = str(os.getpid())
    set_title(signs.title("launcher", sys.argv[1]).rstrip())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _leave(number: int, _: object) -> None:
    """Ends this process by a signal that came before it waited for signals."""
    if not sys.argv[1]:  # the parent may have made files for a run that it has only just told of
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError, ValueError):  # not told, or not completely
            _learn_of_run()
    clean()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _learn_of_run() -> bool:
    """Reads the parent's line about the run and applies it; returns False if there is none.

    The line is read byte by byte, because a signal may interrupt this function and read the rest.
    """
    while not _told.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return False
        _told.extend(byte)
    told = json.loads(_told)
    os.environ.update(told["variables"])
    sys.path[:] = dict.fromkeys([*os.environ["PYTHONPATH"].split(os.pathsep), *sys.path])
    with open(told["log"], "ab") as log:
        for output in (1, 2):
            os.dup2(log.fileno(), output)
    set_title(signs.title("launcher", told["run_dir"]))
    return True


def receive() -> Any:
    """Returns the first line of what the parent writes; None if it gave up."""
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else None


def record_end_of_supervisor(record: str, name: str, code: int) -> None:
    """Records that a supervisor was killed; it has recorded all other ends itself."""
    if code < 0:
        end = supervisor.End(reason=f"its supervisor was {supervisor.describe(code)}")
        supervisor.record_failure(record, node=name, end=end, restarts=False)


def _import_modules() -> None:
    """Imports what all nodes need."""
    # Collections in the nodes then do not copy the memory that they share either.
    with module_path.imported_for_good():
        importlib.import_module("rlstack.programs.program.launch.wiring")
        importlib.import_module("rlstack.programs.program.topologies")


def _import_envpool() -> None:
    """Imports EnvPool, unless it has been imported."""
    if "envpool" in sys.modules:
        return
    with module_path.imported_for_good():
        from rlstack.envs.cpp import library

        library.load()


class _Signals:
    """The signals of this process, one after another."""

    def __init__(self) -> None:
        """Handles the signals from now on."""
        self._pipe, self._writer = os.pipe()
        os.set_blocking(self._pipe, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._numbers():
            signal.signal(number, lambda *_: None)

    def _numbers(self) -> tuple[signal.Signals, ...]:
        return (*_TOLD_TO_END, supervisor.ENDING, signal.SIGCHLD)

    def wait(self, seconds: float) -> bytes:
        """Returns the numbers of the signals that have come; waits at most this long for one."""
        select.select([self._pipe], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            return os.read(self._pipe, 64)
        return b""

    def close(self) -> None:
        """Restores the usual handling, in a child."""
        signal.set_wakeup_fd(-1)
        for number in self._numbers():
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self._pipe)
        os.close(self._writer)


class _Node:
    """A node and the process of its supervisor."""

    def __init__(
        self, made: NodeProcess, program: bytes, to_close: Sequence[Callable[[], object]]
    ) -> None:
        """Starts it.

        Args:
          made: the node.
          program: pickled.
          to_close: called in the child, one after another, for what only the launcher needs.
        """
        self.made = made
        Path(made.log).parent.mkdir(parents=True, exist_ok=True)
        # A signal that comes before the child has reset its handlers must not be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD_TO_END)
        try:
            to_close = (*to_close, lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))
            self.process = Forked(functools.partial(_supervise, made, program, to_close))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _supervise(made: NodeProcess, program: bytes, to_close: Sequence[Callable[[], object]]) -> int:
    """Runs a supervisor, in its process."""
    for close in to_close:
        close()
    with open(made.log, "wb") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(made.variables)

    def start(told: int, variables: Mapping[str, str], prepare: Callable[[], None]) -> Forked:
        del told  # inherited

        def run() -> int:
            prepare()
            os.environ.update(variables)
            restarts = made.incarnation + int(variables[supervisor.INCARNATION])
            os.environ[supervisor.INCARNATION] = str(restarts)
            _begin_node(made)
            node_process.run(made.name, made.run_dir, program)
            return 0

        return Forked(run)

    restarts = supervisor.RestartPolicy(made.max_restarts, *timing.RESTARTS)
    return supervisor.supervise(made.record, made.name, made.grace, made.silence, restarts, start)


def _begin_node(made: NodeProcess) -> None:
    """Gives a node's process what other processes have from their start."""
    import jax
    import numpy as np

    if made.niceness:
        os.nice(made.niceness)
    np.random.seed()  # all nodes have the same global generator from the launcher
    for name, value in made.variables.items():
        if name.startswith("JAX_"):  # read when JAX was imported
            jax.config.update(name.lower(), value)


def _wait(nodes: Sequence[_Node], signals: _Signals) -> int:
    """Waits for the coordinator, which ends last, for a failure, or for a signal."""
    while True:
        for number in signals.wait(timing.LAUNCHER_POLL):
            if number in _TOLD_TO_END:
                return 128 + number
            if number == supervisor.ENDING:  # the others end while that node saves
                return 1
        for node in nodes:
            code = node.process.poll()
            if code:
                record_end_of_supervisor(node.made.record, node.made.name, code)
                return 1
            if code == 0 and node.made.name == "coordinator":
                return 0
        if all(node.process.poll() == 0 for node in nodes):  # the coordinator is on another host
            return 0


def _end(nodes: Sequence[_Node], signals: _Signals) -> None:
    """Tells all nodes to end, and kills those that do not.

    A node that was being restarted may not know that the program is over; it would wait for nodes
    that have ended.
    """
    running = [node.process for node in nodes]
    for process in running:
        process.terminate()
    until = time.monotonic() + timing.NODES_NOTICE
    while (running := [p for p in running if p.poll() is None]) and time.monotonic() < until:
        signals.wait(timing.LAUNCHER_POLL)
    for process in running:
        process.kill()  # the kernel then kills the node
    for process in running:
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
