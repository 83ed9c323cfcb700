"""Runs a program of several nodes: checks it, launches it, and reads its result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlstack.checks import ReportedError
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.policies.members import divide
from rlstack.programs.build.replay import announce_replay
from rlstack.programs.config.experiment import Experiment, ProgramConfig
from rlstack.programs.program.base import Setup
from rlstack.programs.program.failures import (
    cause,
    is_accident,
    read_failures,
    release_record,
    reserve_record,
    restart_line,
)
from rlstack.programs.program.supervisor import End, RestartPolicy, record_failure
from rlstack.programs.session import errors, timing
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.profile import Updates
from rlstack.programs.session.progress import resume_point
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.rpc import transports
from rlstack.rpc.addresses import family
from rlstack.rpc.socket_filter import address_of
from rlstack.storage import checkpoint

_LOG_END = 100_000  # characters


class ProgramError(ReportedError):
    """A node failed for good and ended its program; the message has the node's error."""


def run_program(
    experiment: Experiment,
    directory: RunDir,
    start_from: Path | None,
    display: ProgressDisplay,
    profiled: Updates | None = None,
) -> Result:
    """Runs a topology of several nodes until all of them have ended.

    With `ProgramConfig.on_loss` resume, all nodes start again after the loss of one that the
    program needs.

    Args:
      experiment: what to run.
      directory: the run directory.
      start_from: the checkpoint to resume from; None for a new run.
      display: shows the progress of all nodes.
      profiled: the updates that nodes measure.

    Raises:
      ValueError: a package is missing, or the config contradicts itself or the environment.
      ProgramError: a node failed that cannot be restarted, or was restarted too often.
      Interrupted: SIGINT or SIGTERM was received; the message says whether there is a checkpoint.
    """
    check_packages(experiment)
    before = read_result(directory)  # the earlier commands' result, if this one resumes a run
    limit = experiment.program.max_restarts if experiment.program.on_loss == "resume" else 0
    restarts = RestartPolicy(limit, *timing.RESTARTS)
    setup: Setup | None = None
    try:
        while True:
            started = time.monotonic()
            with _started(experiment, directory) as launch:
                # An agent that does not fit, or a replay that is too large, fails here, before any
                # node starts.
                if setup is None:
                    setup = _made(experiment, directory, start_from, display, profiled)
                received = launch(setup, display)
            result = read_result(directory)
            if result is not None and result != before:  # its seconds have grown
                return result
            lived = time.monotonic() - started
            pause = None if received else _pause(setup, restarts, lived, display)
            if pause is not None:
                received = _wait(pause, display)
            if received:
                saved = checkpoint.latest(directory.checkpoints) is not None
                raise Interrupted(received, saved=saved)
            if pause is None:
                raise ProgramError(_why(setup))
            newest = resume_point(directory)
            setup = dataclasses.replace(setup, restored=newest or setup.restored)
    finally:
        release_record(str(directory.failures))


def _made(
    experiment: Experiment,
    directory: RunDir,
    start_from: Path | None,
    display: ProgressDisplay,
    profiled: Updates | None,
) -> Setup:
    """Returns the program's setup, and makes an empty record of failures."""
    listens = display.listener is not None
    spec = environment_spec(experiment)
    setup = Setup(experiment, directory, spec, start_from, listens, profiled)
    for own in setup.learning:
        if own.policy:
            print(f"{own.policy} ", end="", file=display.stream)
        announce_replay(own.experiment, own.step, display.stream)
    reserve_record(str(directory.failures))
    return setup


def _pause(
    setup: Setup, restarts: RestartPolicy, lived: float, display: ProgressDisplay
) -> float | None:
    """Returns the seconds until all nodes start again after a loss; None if they do not."""
    record = setup.directory.failures
    failure = cause(read_failures(record))
    if failure is None or not is_accident(failure):
        return None
    end = End(reason=str(failure["reason"]), passing=True)
    pause = restarts.failed(lived, end)
    if pause is not None:
        node = str(failure["node"])
        record_failure(str(record), node=node, end=end, restarts=True, pause=pause, program=True)
        display.write_line(restart_line(read_failures(record)[-1]))
    return pause


def _wait(seconds: float, display: ProgressDisplay) -> int:
    """Waits for some seconds, or until a signal; returns that signal, or 0."""
    until = time.monotonic() + seconds
    with StopSignals(display.write_line) as signals:
        while not signals.received and time.monotonic() < until:
            time.sleep(timing.LAUNCHER_POLL)
        return signals.received or 0


_Launch = Callable[[Setup, ProgressDisplay], int]


@contextlib.contextmanager
def _started(experiment: Experiment, directory: RunDir) -> Iterator[_Launch]:
    """Chooses the transport between nodes, and starts the launcher's process if there is one.

    The launcher imports the nodes' packages, which takes as long as this process's own work.

    Yields:
      A function that runs the nodes until all have ended. It returns SIGINT or SIGTERM if received,
      else 0.
    """
    program = experiment.program
    # Hosts of a cluster share a run directory on disk; elsewhere keys are not where results are.
    where = str(directory.path) if program.launch == "ray" and not directory.is_stored else ""
    with transports.chosen(transport_name(program), where):
        if program.launch == "threads":
            from rlstack.programs.program.launch.threads import run_threads

            yield run_threads
        elif program.launch == "ray":
            from rlstack.programs.program.launch.ray.program import run_ray

            yield run_ray
        elif program.launch == "hosts":
            from rlstack.programs.program.launch import hosts, launcher, processes

            with processes.started(launcher.LOCAL, directory) as process:
                yield functools.partial(hosts.run_hosts, process)
        elif program.launch == "launchpad":
            from rlstack.programs.program.launch import processes
            from rlstack.programs.program.launch.launchpad.launch import MANAGER, run_launchpad

            with processes.started(MANAGER, directory) as process:
                yield functools.partial(run_launchpad, process)
        else:
            from rlstack.programs.program.launch import launcher, processes

            with processes.started(launcher.LOCAL, directory) as process:
                yield functools.partial(processes.run_processes, process)


def transport_name(program: ProgramConfig) -> str:
    """Returns the name of the transport for the calls between nodes."""
    if program.transport != "auto":
        return program.transport
    return "direct" if program.launch == "threads" else transports.default()


def check_packages(experiment: Experiment) -> None:
    """Checks that the packages of the launcher, the transport and the replay are installed.

    Raises:
      ValueError: a package is missing; the message names an alternative.
    """
    launch = experiment.program.launch
    if experiment.program.interface and launch != "ray":  # whose hosts may have other ones
        _check_interface(experiment.program.interface)
    if launch == "launchpad" and importlib.util.find_spec("launchpad") is None:
        raise ValueError(
            "Experiment: launch launchpad needs Launchpad, which exists for CPython 3.10 only and "
            "is not installed here. Use --launch processes, which needs no package. In a "
            "checkout, `make train LANE=launchpad` makes an environment with Launchpad."
        )
    transport = transport_name(experiment.program)
    if not transports.is_installed(transport):
        raise ValueError(
            f"Experiment: program.transport {transport} must be installed; it is not. "
            "`rlstack doctor` says how to get it; --program.transport names another one."
        )
    replays = [experiment.replay]
    if experiment.policies:
        replays = [member.experiment.replay for member in divide(experiment).learning]
    in_reverb = any(replay.chosen_service == "reverb" for replay in replays)
    if (
        in_reverb
        and experiment.layout.has_replay_node
        and importlib.util.find_spec("reverb") is None
    ):
        raise ValueError(
            "Experiment: replay.service reverb needs Reverb, which exists for CPython 3.10 only "
            "and is not installed here. Use --replay.service table, which needs no package; "
            "in a checkout, `make venv LANE=launchpad` makes an environment with Reverb."
        )
    if launch == "ray":
        from rlstack.programs.program.launch.ray import cluster

        cluster.load()


def _check_interface(interface: str) -> None:
    try:
        address = address_of(interface)
        with socket.create_server((address, 0), family=family(address)):
            pass
    except ValueError as error:
        raise ValueError(f"Experiment: program.{error}") from error
    except OSError as error:
        raise ValueError(
            "Experiment: program.interface must be an address of this host, where servers can "
            f"listen; got {interface!r}: {error.strerror}."
        ) from error


def _why(setup: Setup) -> str:
    """Returns the error that ended the program."""
    directory = setup.directory
    failure = cause(read_failures(directory.failures))
    if failure is not None:
        reason, text = str(failure["reason"]), str(failure.get("traceback", ""))
        # Libraries in C++ abort without descriptors; only the node's output then says why.
        output = _end_of(_log_of(setup, failure["node"]))
        advice = errors.advice(reason + text + output)
        return (
            f"node {failure['node']} failed: {reason.rstrip('.')}. {advice}{' ' * bool(advice)}"
            f"The output of the nodes is in {directory.node_logs}.\n"
            f"{text if text != reason else ''}".rstrip()
        )
    output = _end_of(directory.node_logs / "launcher")[-2000:]
    why = f"the program ended without a result; see {directory.node_logs}."
    return f"{why} {errors.advice(output)}\n{output}".rstrip()


def _log_of(setup: Setup, name: str) -> Path:
    """Returns the file with the output of a node."""
    from rlstack.programs.program.launch.wiring import indexed
    from rlstack.programs.program.topologies import graph_of

    logs = setup.directory.node_logs
    for node, index in indexed(graph_of(setup)):
        if node.name == name:
            return logs / node.group / str(index)
    group = logs / name.split("/")[0]
    return group / "0" if group.is_dir() else logs / name  # a node that runs several learners


def _end_of(log: Path) -> str:
    """Returns the end of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_END:] if log.is_file() else ""
