"""What loggers and watchers cost a run: `python -m benchmarks.loggers [--quick]`.

`loggers/...`: PPO on CartPole in a single process with several loggers, relative to the same with
metrics.jsonl alone: `default` has those of a preset, `all` also the trackers that are installed,
which write to files on this machine. A measurement ends when every logger has taken all lines, so
that no logger works while the reference is measured; what trackers do in processes of their own may
last longer. `.../cpu` are frames for each second of processor time of all threads, which depend
less on what else the machine does.

`watching/...`: the same run while `rlstack top` or a page of `rlstack dashboard` shows it, relative
to the run alone. The watchers are processes that are stopped for the reference; `watcher` is the
share of a core that they take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.children import Child, answer, children, cpu_seconds
from benchmarks.report import Comparison, Result, alternate, rate
from benchmarks.single_process import UNROLL, Ours, Setting, experiment
from rlstack.programs.build import xla
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.own_loggers import READY, TRACKERS
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.programs.session.progress import Progress, open_logs
from rlstack.programs.session.run_dir import RunDir
from rlstack.references import load_hook
from rlstack.storage.loggers import Fanout, Logger

NAME = "loggers"
TARGET = 0.98  # of the frames/s with metrics.jsonl alone
_PERIOD = 2.0  # seconds between two looks of a watcher, as of `rlstack top` and of the page
_RUN = Setting("ppo", "CartPole-v1", 8, 0.0, 0)


class Case(NamedTuple):
    """One comparison."""

    name: str
    what: str  # the loggers, "default" or "all", or the watcher, "top" or "dashboard"
    seconds: float  # of one measurement
    repeats: int


FULL = (
    Case("loggers/default", "default", 4.0, 9),
    Case("loggers/all", "all", 4.0, 9),
    Case("watching/top", "top", 3 * _PERIOD, 7),
    Case("watching/dashboard", "dashboard", 3 * _PERIOD, 7),
)
QUICK = tuple(case._replace(seconds=0.5, repeats=3) for case in FULL)


class Counted:
    """A tracker that counts the lines that it has taken."""

    made: list[Counted] = []  # noqa: RUF012  (one run at a time)

    def __init__(self, logger: Logger) -> None:
        self.lines = 0
        self._logger = logger
        self.made.append(self)

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Passes a line on."""
        self._logger.write(step, logs)
        self.lines += 1

    def close(self) -> None:
        """Closes the tracker."""
        self._logger.close()


def counted(name: str) -> Callable[[Path], Counted]:
    """Returns a function that makes a tracker."""

    def make(run_dir: Path) -> Counted:
        return Counted(load_hook("benchmark", TRACKERS[name])(run_dir))

    return make


class Logged(Ours):
    """A single process that logs to files, as `rlstack.programs.run.train` does."""

    def __init__(self, cfg: Experiment, directory: RunDir, loggers: tuple[Any, ...]) -> None:
        """Makes the process and its loggers, and waits until trackers have started."""
        super().__init__(cfg)
        trackers = sum(not isinstance(logger, str) for logger in loggers)
        Counted.made.clear()
        logged = dataclasses.replace(cfg, loggers=loggers)
        opened = open_logs(directory, Progress(), logged, self._fail)
        parts: list[Logger] = [opened]
        if "terminal" in loggers:
            parts.append(ProgressDisplay(cfg.frames, io.StringIO()))
        self.logger = Fanout(parts)
        self._lines = 0
        self._failure = ""
        while len(Counted.made) < trackers:
            self._check()
            time.sleep(0.05)
        self._trackers = tuple(Counted.made)
        self.periodic = PeriodicActions(
            cfg, _Lines(self), evaluate=lambda frames: None, checkpoint=lambda frames: None
        )

    def _fail(self, text: str) -> None:
        self._failure = text

    def _check(self) -> None:
        if self._failure:
            raise RuntimeError(f"benchmarks.loggers: {self._failure}")

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Counts a line, and passes it on."""
        self._lines += 1
        self.logger.write(step, logs)

    def train_and_log(self, steps: int) -> None:
        """Trains, and waits until all lines are written."""
        self.train(steps)
        while any(tracker.lines < self._lines for tracker in self._trackers):
            self._check()
            time.sleep(0.001)

    def close(self) -> None:
        """Closes the process and the loggers."""
        self.program.close()
        self.logger.close()


class _Lines:
    """The logger of the periodic actions."""

    def __init__(self, run: Logged) -> None:
        self._run = run

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        self._run.write(step, logs)

    def close(self) -> None:
        """Does nothing: the run closes its loggers."""


@contextlib.contextmanager
def opened(folder: Path, name: str, loggers: tuple[Any, ...]) -> Iterator[Logged]:
    """Yields a run in a directory of its own, as other commands see it."""
    names = tuple(logger for logger in loggers if isinstance(logger, str))
    cfg = dataclasses.replace(experiment(_RUN), preset=name, loggers=names)
    with RunDir.create(folder / name, name, cfg.seed).claimed() as directory:
        directory.write_config(to_json(cfg))
        run = Logged(cfg, directory, loggers)
        try:
            yield run
        finally:
            run.close()


def _loggers(what: str) -> tuple[Any, ...]:
    """Returns the loggers of a case; of trackers those whose packages are installed."""
    if what == "default":
        return READY
    trackers = [name for name in TRACKERS if importlib.util.find_spec(name)]
    print(f"trackers: {', '.join(trackers) or 'none is installed'}", file=sys.stderr)
    return (*READY, *map(counted, trackers))


def _steps(run: Logged, seconds: float) -> int:
    """Compiles everything; returns the number of steps in a measurement."""
    run.train_and_log(UNROLL + 1)
    run.train_and_log(UNROLL)
    per_unroll = 1 / rate(1, lambda: run.train_and_log(8 * UNROLL)) / 8
    return max(1, round(seconds / per_unroll)) * UNROLL


def _logging(case: Case, folder: Path, result: Result) -> None:
    with (
        opened(folder, "several", _loggers(case.what)) as ours,
        opened(folder, "jsonl", ("jsonl",)) as reference,
    ):
        steps = _steps(ours, case.seconds)
        _steps(reference, 0.0)
        frames = steps * _RUN.num_envs
        processor: dict[str, list[float]] = {"ours": [], "reference": []}

        def measured(side: str, run: Logged) -> float:
            start = time.process_time()
            found = rate(frames, lambda: run.train_and_log(steps))
            processor[side].append(frames / (time.process_time() - start))
            return found

        comparison = alternate(
            lambda: measured("ours", ours), lambda: measured("reference", reference), case.repeats
        )
        result.add(case.name, comparison, {})
        rates = Comparison(tuple(processor["ours"]), tuple(processor["reference"]))
        result.add(f"{case.name}/cpu", rates, {})


def _watching(case: Case, folder: Path, result: Result) -> None:
    arguments = ("--watch", case.what, "--folder", str(folder))
    with (
        opened(folder, "watched", ("jsonl",)) as run,
        children(Child("benchmarks.loggers", *arguments)) as (watcher,),
    ):
        steps = _steps(run, case.seconds)
        watcher.hear()  # it has looked once
        frames = steps * _RUN.num_envs
        process, seconds = psutil.Process(watcher.process.pid), [0.0, 0.0]

        def watched() -> float:
            watcher.process.send_signal(signal.SIGCONT)
            before = cpu_seconds(process)
            found = rate(frames, lambda: run.train_and_log(steps))
            seconds[0] += cpu_seconds(process) - before
            seconds[1] += frames / found
            return found

        def alone() -> float:
            watcher.process.send_signal(signal.SIGSTOP)
            return rate(frames, lambda: run.train_and_log(steps))

        try:
            comparison = alternate(watched, alone, case.repeats)
            result.add(case.name, comparison, {"ours": {"watcher": seconds[0] / seconds[1]}})
        finally:
            watcher.process.send_signal(signal.SIGCONT)


def _watch(what: str, folder: Path) -> None:
    """In a child: looks at the runs of a folder again and again, until the input is closed."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    look = _top(folder) if what == "top" else _page(folder)
    look()
    answer("looked")
    while not ended.wait(_PERIOD):
        look()


def _top(folder: Path) -> Callable[[], object]:
    from rich.console import Console

    from rlstack.programs.tools.status.top import Top

    top, console = Top([folder]), Console(file=io.StringIO(), width=200, force_terminal=True)
    return lambda: console.print(top.render())


def _page(folder: Path) -> Callable[[], object]:
    """Returns a look at the data of the dashboard, as its page asks for them."""
    from rlstack.programs.tools.status.dashboard import Dashboard
    from rlstack.programs.tools.status.server import DashboardServer

    server = DashboardServer(Dashboard(folder), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = "&".join(f"name={name}" for name in ("actor%2Fepisode_return", "learner%2Floss"))
    asked = ("state.json", f"plots.json?run=watched&{names}")

    def look() -> None:
        for path in asked:
            with urllib.request.urlopen(server.address + path) as got:
                got.read()

    return look


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loggers")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in the name")
    parser.add_argument("--watch", choices=("top", "dashboard"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.watch:
        _watch(args.watch, args.folder)
        return
    cases = [case for case in (QUICK if args.quick else FULL) if args.only in case.name]
    if not cases:
        parser.error(f"--only: no case has a name that contains {args.only!r}")
    xla.configure(convolutions=False)
    result = Result.empty(NAME)
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(WANDB_MODE="offline", TRACKIO_DIR=f"{name}/trackio")
        os.environ.pop("MLFLOW_TRACKING_URI", None)  # its database is in the run directory
        for case in cases:
            print(f"{case.name} ...", file=sys.stderr, flush=True)
            measure = _logging if case.name.startswith("loggers/") else _watching
            measure(case, Path(tempfile.mkdtemp(dir=name)), result)
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
