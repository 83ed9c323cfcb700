"""`rlstack benchmark`: the field's benchmarks, their pages, and a watch for slower learning."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import tyro

from rlstack.programs.cli import features
from rlstack.programs.cli.experiment_options import all_seeds
from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.cli.sweep import launching
from rlstack.programs.config.program_config import ProgramConfig, RayConfig
from rlstack.programs.session.run_dir import RunDir, new_directory
from rlstack.programs.study.benchmark import suites
from rlstack.programs.study.benchmark.suites import Suite

_ROOT = Path("runs/benchmarks")


@dataclasses.dataclass(frozen=True)
class _BenchmarkOptions:
    """Train an agent on all tasks of a benchmark, and write a page of its scores.

    What has finished is not trained again, and what was interrupted continues. Before it trains,
    the command says what is left to do and how long that takes.
    """

    suite: tyro.conf.Positional[str] = ""
    """The name of the benchmark; --list shows all."""
    list: bool = False
    """Show all benchmarks: tasks, budgets, agents, and what must be installed."""
    agent: str = ""
    """An agent of the benchmark; or a preset, of which the benchmark replaces the environment."""
    seeds: tuple[int, ...] = ()
    """`--seeds 5` trains the seeds 1 to 5, `--seeds 3 8` 3 and 8. By default as many as the
    benchmark says: ten where one compiled program trains all seeds of a task."""
    budget: int = 0
    """Frames of each run, at most those of its task. By default the benchmark's: other scores are
    not comparable."""
    tasks: tuple[str, ...] = ()
    """The names of some tasks. By default all."""
    settings: Literal["all", "few"] = "all"
    """few: of tasks with many settings, only those that the benchmark names."""
    jobs: int = 1
    """Number of runs of a task at the same time, each in a process of its own."""
    launch: Literal["local", "ray"] = "local"
    """local: train on this machine. ray: train on the hosts of a Ray cluster, which must all see
    the directory of the runs."""
    ray_address: str = ""
    """With --launch ray: host:port of the head of the cluster. By default $RAY_ADDRESS."""
    run_dir: Path | None = None
    """The directory of the runs. By default runs/benchmarks/SUITE/AGENT, with the budget if it is
    not the benchmark's; for a benchmark with bands a new one each time."""
    out: Path = _ROOT
    """The folder of the page, its pictures, and the scores in data/."""
    page: bool = False
    """Train nothing: write the page again from the scores in --out."""
    dry_run: bool = False
    """Train nothing: check the environments, and say what training would cost."""
    measure: float = 0.0
    """Seconds for which the first task is trained, to measure how fast this machine is."""


def main(args: list[str], modules: tuple[str, ...] = ()) -> int:
    """Runs the command; returns the exit code."""
    chosen = parse(_BenchmarkOptions, "rlstack benchmark", args)
    if chosen.list:
        print("\n".join(_listed(suites.read(name)) for name in suites.names()))
        return 0
    if not chosen.suite:
        raise UsageError("the name of a benchmark must come first; --list shows all")
    suite = suites.read(chosen.suite)
    if chosen.page:
        from rlstack.programs.study.benchmark import page, records

        print(page.write(suite, records.read_all(suite, chosen.out), chosen.out))
        return 0
    if missing := suites.missing(suite):
        raise UsageError(f"{suite.name} needs {', '.join(missing)}: {features.how_to_get(missing)}")
    return _train(suite, chosen, modules)


def _train(suite: Suite, chosen: _BenchmarkOptions, modules: tuple[str, ...]) -> int:
    if chosen.run_dir is not None and RunDir.at(chosen.run_dir).is_stored:
        raise UsageError(
            "--run-dir of a benchmark must be on a file system; single runs may be in object stores"
        )
    from rlstack.programs.study.benchmark import page, recordings, records, runs, watch

    row, agent = suite.agent(chosen.agent), suite.name_of(chosen.agent)
    seeds = all_seeds(chosen.seeds)
    root = chosen.run_dir or _directory(suite, agent, chosen.budget)
    jobs = runs.jobs_of(
        suite,
        agent,
        root,
        seeds=seeds,
        frames=chosen.budget,
        tasks=chosen.tasks,
        few=chosen.settings == "few",
        modules=modules,
    )
    for task in () if chosen.tasks else suite.tasks:
        if task.missing:
            print(f"{task.name} is left out: no {', no '.join(task.missing)}", file=sys.stderr)
    runs.check(jobs)
    folder = recordings.folder_of(root)
    to_record = recordings.missing(suite, [job.task for job in jobs], folder)
    if to_record:
        print(f"{suite.name}: first data are recorded of {', '.join(to_record)}", file=sys.stderr)
        if chosen.dry_run:
            return 0
        recordings.make(suite, to_record, folder)
    rate, where = row.rate, row.machine
    if chosen.measure:
        rate = runs.measure(jobs[0], chosen.measure)
        where = f"this machine with {jobs[0].task.name}, for {chosen.measure:g} s"
    cost = runs.cost(jobs, at_once=chosen.jobs, stored=rate, machine_of=where)
    print(f"{suite.name}, {agent}: {cost}", file=sys.stderr, flush=True)
    if chosen.dry_run:
        return 0
    cfg = ProgramConfig(ray=RayConfig(address=chosen.ray_address))
    with launching(chosen.launch, cfg) as launch:
        runs.train(jobs, at_once=chosen.jobs, **launch)
    record = records.collect(suite, agent, jobs)
    records.write(suite, record, chosen.out, chosen.budget)
    print(page.write(suite, records.read_all(suite, chosen.out), chosen.out))
    for found in watch.compare(suite, [record]):
        print(found)
    if not (chosen.seeds or chosen.budget):  # bands are for these
        watch.check(suite, record)
    return 0


def _directory(suite: Suite, agent: str, budget: int) -> Path:
    if any(task.band for task in suite.tasks):
        return new_directory(_ROOT, suite.name)
    reduced = f"-{budget}" if budget and budget != suite.frames else ""
    return _ROOT / suite.name / f"{Path(agent).stem}{reduced}"


def _listed(suite: Suite) -> str:
    """Returns what `--list` shows of a suite."""
    frames = f"{suite.frames:,} frames" if suite.frames else "the frames of each task"
    few, every = (sum(suite.runs_of(task, few) for task in suite.tasks) for few in (True, False))
    seeds = f"{suite.seeds} seeds"
    if few < every:
        seeds = f"{every} runs of all settings, {few} of few"
    lines = [
        f"{suite.name}: {suite.title}. {len(suite.tasks)} tasks, {frames}, {seeds}",
        f"  tasks: {', '.join(task.name for task in suite.tasks)}",
        f"  agents: {', '.join(suite.agents)}",
        f"  protocol: {suite.protocol}",
    ]
    if missing := suites.missing(suite):
        lines.append(f"  missing here: {', '.join(missing)}. {features.how_to_get(missing)}")
    return "\n".join(lines)
