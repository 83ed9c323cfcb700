"""Programs of several nodes: `python -m benchmarks.topologies [--quick] [--only TEXT]`.

Calls between processes use the transport `--transport`, by default that of this installation.

- heavy: frames/s of N actors in heavy_env, divided by N times the frames/s of one actor. A step of
  the environment sleeps 10 ms. The measurement starts when all actors act.
- service: environments per second served by the inference service, divided by those of bare calls
  with the transport's library: one for each environment ("each", which has a target), or for each
  client ("all").
- learner: updates/s with samples from a Reverb server in another process, or from a node with the
  stack's own table ("table"), divided by those with samples from memory.
- startup: 12 s divided by the seconds from `rlstack.programs.run.train.run` to the first logged
update of a
  distributed program of six processes.

Each program runs in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from benchmarks import topologies_learner, topologies_service
from benchmarks.children import Child, answer
from benchmarks.report import Comparison, Result, alternate
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.session.signals import Interrupted
from rlstack.replay import ReplayConfig
from rlstack.rpc import transports

NAME = "topologies"
START_SECONDS = 12.0
# Targets of the ratios, by the prefix of the setting's name.
TARGETS = {
    "heavy/": 0.95,
    "service/each/": 5.0,
    "learner/reverb/": 0.8,
    "learner/table/": 0.9,
    "startup/": 1.0,
}
_NEVER = 10**9  # frames
_PATIENCE = 180.0  # seconds to wait for a program's progress


class Setting(NamedTuple):
    """One measurement."""

    name: str
    measure: Callable[[Setting, Result], None]
    size: int  # number of actors or clients, or the batch size
    seconds: float  # length of a measurement; for learners, its number of updates
    repeats: int


class Program:
    """A program that runs in a child process, observed through its logs."""

    def __init__(self, experiment: Experiment, directory: Path) -> None:
        self._metrics = directory / "run" / "metrics.jsonl"
        config = directory / "config.json"
        config.write_text(to_json(experiment))
        self._child = Child("benchmarks.topologies", "--run", str(config), str(directory / "run"))
        self.began = self._child.hear()

    @property
    def pid(self) -> int:
        """The process id of the child, whose descendants are the nodes."""
        return self._child.process.pid

    def wait(self, found: Callable[[], Any], patience: float = _PATIENCE) -> Any:
        """Waits until `found` returns something other than None; returns that."""
        until = time.monotonic() + patience
        while (value := found()) is None:
            if self._child.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"Program.wait: the program ended, or took over {patience:g} s; see its "
                    "output above."
                )
            time.sleep(0.05)
        return value

    def rows(self) -> list[dict[str, Any]]:
        """Returns the lines of its logs so far."""
        text = self._metrics.read_text() if self._metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def first(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """Returns the first line of its logs for which `holds` is true; None if there is none."""
        return next((row for row in self.rows() if holds(row)), None)

    def nodes(self) -> dict[str, psutil.Process]:
        """Returns the processes of its nodes by name, from their titles."""
        found = {}
        for process in psutil.Process(self.pid).children(recursive=True):
            title = re.match(r"rlstack: ([\w/]+) ", " ".join(process.cmdline()))
            if title is not None and title[1] != "launcher":
                found[title[1]] = process
        return found

    def close(self) -> None:
        """Interrupts the program and waits for its end."""
        self._child.close(signal.SIGINT)


@contextlib.contextmanager
def running(experiment: Experiment) -> Iterator[tuple[Program, Path]]:
    """Runs a program in a context; gives it and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        program = Program(experiment, Path(folder))
        try:
            yield program, Path(folder)
        finally:
            program.close()


def _transport() -> Literal["zmq", "courier"]:
    return "zmq" if transports.current() == "zmq" else "courier"


def _heavy_experiment(num_actors: int, started: Path) -> Experiment:
    env = EnvConfig(
        "benchmarks.slow_env:Slow", num_envs=1, type="for_loop", options={"started": str(started)}
    )
    return Experiment(
        preset="benchmark-heavy",
        agent=PPOConfig(num_epochs=2, num_minibatches=1),
        env=env,
        network=NetworkConfig(hidden_sizes=(64,)),
        replay=ReplayConfig(sampler="fifo", batch_size=8, unroll_length=16, max_size=64),
        frames=_NEVER,
        topology="heavy_env",
        program=ProgramConfig(num_actors=num_actors, transport=_transport()),
        log_period=20,
        checkpoint_period=_NEVER,
    )


def _frames_per_second(num_actors: int, seconds: float) -> float:
    """Returns the frames/s of a program, measured for some seconds while all its actors act."""
    with tempfile.TemporaryDirectory() as notes:
        started = Path(notes) / "started"

        def all_act() -> bool | None:
            lines = started.read_text().splitlines() if started.exists() else []
            return True if len(set(lines)) == num_actors else None

        with running(_heavy_experiment(num_actors, started)) as (program, _):
            program.wait(all_act)
            start = time.time() + 2.0  # the first update compiles
            last = program.wait(lambda: program.first(lambda r: r["wall_time"] > start + seconds))
            first = program.first(lambda row: row["wall_time"] > start)
            assert first is not None
            frames = last["env_frames"] - first["env_frames"]
            return frames / (last["wall_time"] - first["wall_time"])


def _measure_heavy(setting: Setting, result: Result) -> None:
    comparison = alternate(
        lambda: _frames_per_second(setting.size, setting.seconds),
        lambda: setting.size * _frames_per_second(1, setting.seconds),
        setting.repeats,
    )
    result.add(setting.name, comparison, {})


def _measure_service(setting: Setting, result: Result) -> None:
    _, way, sizes = setting.name.split("/")
    clients, num_envs = map(int, sizes.split("x"))
    found = topologies_service.measure(
        topologies_service.Setting(clients, num_envs, setting.seconds, setting.repeats), way
    )
    result.add(setting.name, found.comparison, {})
    for side, latencies in found.latency_ms.items():
        for percentile, value in latencies.items():
            result.medians[setting.name][f"{side}_latency_ms_{percentile}"] = value


def _measure_learner(setting: Setting, result: Result) -> None:
    _, service, name = setting.name.split("/")
    kind, updates = name.split("_")[0], int(setting.seconds)
    chosen = topologies_learner.Setting(kind, setting.size, updates, setting.repeats, service)
    result.add(setting.name, *topologies_learner.measure(chosen))


def start_seconds() -> float:
    """Returns the seconds from the call of `train.run` to the first update."""
    experiment = dataclasses.replace(
        preset("cartpole-ppo"),
        topology="distributed",
        frames=_NEVER,
        program=ProgramConfig(num_actors=1, transport=_transport()),
        evaluator=EvaluatorConfig(episodes=1, num_envs=1, period="off"),
        log_period=64,
    )
    with running(experiment) as (program, _):
        row = program.wait(lambda: program.first(lambda row: row.get("learner/steps", 0) >= 1))
        return row["wall_time"] - program.began


def _measure_startup(setting: Setting, result: Result) -> None:
    seconds = [start_seconds() for _ in range(setting.repeats)]
    comparison = Comparison(tuple(1 / s for s in seconds), (1 / START_SECONDS,) * len(seconds))
    result.add(setting.name, comparison, {})
    result.medians[setting.name]["seconds"] = round(statistics.median(seconds), 2)


FULL = (
    Setting("heavy/8_actors", _measure_heavy, 8, 15.0, 3),
    Setting("service/each/4x32", _measure_service, 4, 2.0, 9),
    Setting("service/all/4x32", _measure_service, 4, 2.0, 9),
    Setting("learner/reverb/dqn_128", _measure_learner, 128, 400, 9),
    Setting("learner/reverb/dqn_256", _measure_learner, 256, 300, 9),
    Setting("learner/reverb/qrdqn_128", _measure_learner, 128, 150, 9),
    Setting("learner/reverb/rainbow_128", _measure_learner, 128, 150, 9),
    Setting("learner/reverb/iqn_64", _measure_learner, 64, 200, 9),
    Setting("learner/reverb/ppo_8", _measure_learner, 8, 150, 9),
    Setting("learner/table/dqn_128", _measure_learner, 128, 400, 9),
    Setting("learner/table/dqn_256", _measure_learner, 256, 300, 9),
    Setting("learner/table/rainbow_128", _measure_learner, 128, 150, 9),
    Setting("learner/table/ppo_8", _measure_learner, 8, 150, 9),
    Setting("startup/6_processes", _measure_startup, 6, 0.0, 5),
)
QUICK = (
    Setting("heavy/2_actors", _measure_heavy, 2, 4.0, 1),
    Setting("service/each/4x32", _measure_service, 4, 0.5, 3),
    Setting("service/all/4x32", _measure_service, 4, 0.5, 3),
    Setting("learner/reverb/dqn_128", _measure_learner, 128, 50, 3),
    Setting("learner/reverb/ppo_8", _measure_learner, 8, 20, 3),
    Setting("learner/table/dqn_128", _measure_learner, 128, 50, 3),
    Setting("startup/6_processes", _measure_startup, 6, 0.0, 1),
)


def _run(config: str, run_dir: str) -> None:
    """Runs in the child: trains until interrupted."""
    experiment = from_json(Path(config).read_text(), config)
    answer(time.time())
    with contextlib.suppress(Interrupted):
        train.run(experiment, run_dir, stream=io.StringIO())


def main(arguments: list[str] | None = None) -> None:
    """Measures; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.topologies")
    parser.add_argument("--quick", action="store_true", help="a few minutes, fewer actors")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with TEXT in the name")
    parser.add_argument("--transport", choices=("zmq", "courier"), default=transports.default())
    parser.add_argument("--repeats", type=int, help="number of measurements of each program")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.run:
        _run(*args.run)
        return
    settings = [s for s in (QUICK if args.quick else FULL) if args.only in s.name]
    if args.repeats is not None:
        settings = [s._replace(repeats=args.repeats) for s in settings]
    if importlib.util.find_spec("reverb") is None:
        settings = [s for s in settings if not s.name.startswith("learner/reverb/")]
    if not settings:
        parser.error(f"--only: no setting has a name that contains {args.only!r}")
    result = Result.empty(NAME)
    with transports.chosen(args.transport):
        for setting in settings:
            load = os.getloadavg()[0]
            print(f"{setting.name} (load {load:.1f}) ...", file=sys.stderr, flush=True)
            setting.measure(setting, result)
    print(result.table(0.0))
    for name in result.ratios:
        for kind, target in TARGETS.items():
            if name.startswith(kind):
                print(result.verdict(name, target))
    print(result.line())


if __name__ == "__main__":
    main()
