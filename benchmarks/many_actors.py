"""A program of many actor processes on one machine: `python -m benchmarks.many_actors [--quick]`.

It tests what controls a large program, not its speed: each environment sleeps for most of the time,
so that hundreds of actors fit on a few cores. The actors ask inference services. The benchmark
measures how long the program takes to start, the memory of an actor (its share of the pages that
processes share), and the coordinator's processor time. Then it kills ten actors, waits until their
next incarnations act, interrupts the program, and looks for what is left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.children import cpu_seconds
from benchmarks.topologies import Program
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.replay.shared_memory.block import FOLDER

NAME = "many_actors"
_NEVER = 10**9
_KILLED = 10
_START = 600.0  # seconds for all actors to start on a busy machine


class Figures(NamedTuple):
    """What was measured; times in seconds, memory in MB."""

    actors: int
    all_act: float  # from the command's start until every actor has made a step
    first_update: float  # from the command's start until the first update is logged
    actor_mb: float  # an actor's process
    supervisor_mb: float  # its supervisor's process
    program_mb: float  # all processes
    frames_per_second: float
    updates_per_second: float
    coordinator: float  # share of a core
    machine: float  # cores that the program uses
    replaced: float  # from SIGKILL of ten actors until their next incarnations act
    restarts: float  # that the logs count
    lost_frames: float  # that the logs count
    ended: float  # from SIGINT until the command has ended
    left: list[str]  # processes and files that are still there


def _experiment(actors: int, step: float, started: Path) -> Experiment:
    chosen = preset("cartpole-ppo")
    options: dict[str, int | float | bool | str] = {"started": str(started), "seconds": step}
    return dataclasses.replace(
        chosen,
        preset="",
        topology="distributed",
        env=EnvConfig("benchmarks.slow_env:Slow", num_envs=1, type="for_loop", options=options),
        replay=dataclasses.replace(
            chosen.replay, service="table", batch_size=32, unroll_length=16, max_size=2 * actors
        ),
        frames=_NEVER,
        log_period=actors,
        checkpoint_period=_NEVER,
        evaluator=EvaluatorConfig(num_envs=1, period=_NEVER, episodes=1),
        program=ProgramConfig(num_actors=actors, num_inferencers=2, transport="zmq"),
    )


def measure(actors: int, seconds: float, step: float) -> Figures:
    """Runs the program.

    Args:
      actors: number of actors.
      seconds: length of the measurement of rates.
      step: seconds of a step of an environment.
    """
    before = _in_memory()
    with tempfile.TemporaryDirectory() as folder:
        started, temporary = Path(folder, "started"), Path(folder, "tmp")
        with _temporary_files_in(temporary):
            program = Program(_experiment(actors, step, started), Path(folder))
        try:
            program.wait(lambda: len(_lines(started)) >= actors or None, _START)
            all_act = time.time() - program.began
            row = program.wait(lambda: program.first(lambda r: r.get("learner/steps", 0) >= 1))
            first_update = row["wall_time"] - program.began
            rates = _Rates(program)
            time.sleep(seconds)
            rates.stop()
            memory = _memory(program.pid)
            nodes = program.nodes()
            killed = [nodes[f"actor/{rank}"] for rank in range(_KILLED)]
            now = time.monotonic()
            for process in killed:
                process.kill()
            program.wait(lambda: len(_lines(started)) >= actors + _KILLED or None)
            replaced = time.monotonic() - now
            last = program.wait(
                lambda: program.first(lambda r: r.get("program/restarts", 0) >= _KILLED)
            )
            processes = psutil.Process(program.pid).children(recursive=True)
        finally:
            now = time.monotonic()
            program.close()
        ended = time.monotonic() - now
        left = [f"process {p.pid}" for p in processes if _runs(p)]
        left += [*sorted(_in_memory() - before), *sorted(os.listdir(temporary))]
        return Figures(
            actors=actors,
            all_act=all_act,
            first_update=first_update,
            actor_mb=memory.actor,
            supervisor_mb=memory.supervisor,
            program_mb=memory.program,
            frames_per_second=rates.frames,
            updates_per_second=rates.updates,
            coordinator=rates.coordinator,
            machine=rates.machine,
            replaced=replaced,
            restarts=last["program/restarts"],
            lost_frames=last["program/lost_frames"],
            ended=ended,
            left=left,
        )


class _Rates:
    """What a program does a second, from the start of this object to `stop`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._before = self._read()
        self.frames = self.updates = self.coordinator = self.machine = 0.0

    def stop(self) -> None:
        """Sets the rates."""
        differences = [b - a for a, b in zip(self._before, self._read(), strict=True)]
        seconds, logged, frames, updates, coordinator, program = differences
        self.frames, self.updates = frames / logged, updates / logged
        self.coordinator, self.machine = coordinator / seconds, program / seconds

    def _read(self) -> tuple[float, ...]:
        row = [row for row in self._program.rows() if "learner/steps" in row][-1]
        nodes = self._program.nodes()
        used = {name: cpu_seconds(process) for name, process in nodes.items()}
        return (
            time.monotonic(),
            row["wall_time"],
            row["env_frames"],
            row["learner/steps"],
            used["coordinator"],
            sum(used.values()),
        )


class _Memory(NamedTuple):
    actor: float
    supervisor: float
    program: float


def _memory(root: int) -> _Memory:
    """Returns the proportional memory of processes in MB, means over actors and supervisors."""
    found: dict[str, list[float]] = {"actor/": [], "supervisor:actor/": [], "": []}
    for process in psutil.Process(root).children(recursive=True):
        title = " ".join(process.cmdline()).removeprefix("rlstack: ")
        size = process.memory_full_info().pss / 1e6
        for prefix, sizes in found.items():
            if title.startswith(prefix):
                sizes.append(size)
    actor, supervisor, program = found.values()
    return _Memory(sum(actor) / len(actor), sum(supervisor) / len(supervisor), sum(program))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _in_memory() -> set[str]:
    """Returns the files in memory of nodes' processes, but for those of programs that run."""
    found = set()
    for name in os.listdir(FOLDER):
        path = os.path.join(FOLDER, name)
        if name.startswith("rlstack-") and not _is_used(path):
            found.add(path)
    return found


def _is_used(path: str) -> bool:
    """Whether processes use the folder of a host; others than these folders are not known."""
    try:
        with open(os.path.join(path, "users"), "rb") as users:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Lets processes that are started in the body make their temporary files in a folder."""
    folder.mkdir()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(arguments: list[str] | None = None) -> int:
    """Measures; prints the figures and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_actors")
    parser.add_argument("--actors", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the measurement")
    parser.add_argument("--step", type=float, default=0.2, help="seconds of an environment's step")
    parser.add_argument("--quick", action="store_true", help="40 actors, five seconds")
    args = parser.parse_args(arguments)
    actors, seconds = (40, 5.0) if args.quick else (args.actors, args.seconds)
    figures = measure(actors, seconds, args.step)
    for name, value in figures._asdict().items():
        print(f"{name:20} {value if isinstance(value, list) else f'{value:10.2f}'}")
    print(json.dumps({"name": NAME, **figures._asdict()}))
    return 1 if figures.left else 0


if __name__ == "__main__":
    sys.exit(main())
