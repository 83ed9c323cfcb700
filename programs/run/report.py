"""`rlstack report`: a table of results and a learning curve for each preset."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from programs.components.restored import read_config
from programs.experiment import Experiment
from programs.tracking.result import Result, read_result
from programs.tracking.run_dir import RunDir
from rlstack.math import intervals
from rlstack.storage import jsonl

_COLUMNS = (
    "preset",
    "agent",
    "environment",
    "frames",
    "return: mean ± deviation (median)",
    "IQM [95 % interval]",
    "by seed",
    "seconds a run",
    "frames/s",
    "commit",
)
_FAULTS = ("preset", "seed", "topology", "launched as", "restarts", "frames lost")
_HEAD = """\
# Results

Greedy returns at the end of training, one row for each preset. Written by `{command}` from the run
directories alone; a run is repeated by `rlstack train PRESET --seed SEED`.

"""
_CURVES = ("evaluator/episode_return", "actor/episode_return")  # the preferred log first
_POINTS = 200  # points of a drawn curve


class Run(NamedTuple):
    """A finished run."""

    experiment: Experiment
    result: Result
    frames: np.ndarray  # [N]
    returns: np.ndarray  # [N] of training episodes that ended near these frames, or evaluations
    restarts: int  # restarts of nodes
    lost_frames: int  # frames of lost nodes that never reached the learner


def write(run_dirs: Sequence[str | Path], out: str | Path, command: str) -> list[str]:
    """Writes a table to ``out``, and the curves to the folder of the same name without suffix.

    Args:
      run_dirs: directories of finished runs; runs of one preset must have different seeds.
      out: a Markdown file.
      command: the command that the text names as its source.

    Returns:
      The names of the presets in the table.

    Raises:
      ValueError: a directory holds no finished run, a preset has a seed twice, or matplotlib is not
        installed.
    """
    presets = by_preset(run_dirs)
    write_groups(presets, out, command)
    return sorted(presets)


def by_preset(run_dirs: Sequence[str | Path]) -> dict[str, list[str | Path]]:
    """Returns directories of finished runs by their presets."""
    presets: dict[str, list[str | Path]] = defaultdict(list)
    for path in run_dirs:
        presets[read(path).result.preset].append(path)
    return dict(presets)


def write_groups(
    groups: Mapping[str, Sequence[str | Path]],
    out: str | Path,
    command: str,
    *,
    pictures: bool = True,
) -> str:
    """Writes a table with a row for each group of runs, and its curves; see `write`.

    Args:
      groups: directories of finished runs of one experiment with different seeds, by name.
      out: a Markdown file.
      command: the command that the text names as its source.
      pictures: whether to draw the curves, which needs matplotlib.

    Returns:
      The table.
    """
    out = Path(out)
    folder = out.with_suffix("")
    runs_of: dict[str, list[Run]] = {}
    rows, shown = [], []
    for name, paths in sorted(groups.items()):
        runs = runs_of[name] = sorted(map(read, paths), key=lambda run: run.result.seed)
        _check_seeds(name, runs)
        rows.append(row(name, runs))
        if pictures:
            folder.mkdir(parents=True, exist_ok=True)
            picture = f"{name.replace(' ', ',')}.png"
            draw(name, runs, folder / picture)
            shown.append(f"![{name}]({folder.name}/{picture})")
    table = _table(_COLUMNS, rows)
    parts = [_HEAD.format(command=command), *table]
    if faults := [fault for name in sorted(runs_of) for fault in _faults(runs_of[name])]:
        parts += ["\n## Nodes that were lost\n", *_table(_FAULTS, faults)]
    if shown:
        parts += ["\n## Learning curves\n", *shown]
    out.write_text("\n".join(parts) + "\n")
    return "\n".join(table)


def read(path: str | Path) -> Run:
    """Reads a run directory.

    Raises:
      ValueError: the directory holds no finished run.
    """
    directory = RunDir.open(path)
    experiment = read_config(directory)
    result = read_result(directory)
    if result is None:
        raise ValueError(
            f"{path} must hold a finished run; its result.json is missing or of "
            f"another version. Finish the run with rlstack train --resume {path}."
        )
    lines = jsonl.read(directory.metrics)
    for curve in _CURVES:
        points = [(line["env_frames"], line[curve]) for line in lines if curve in line]
        if len(points) > 1:
            break
    frames, returns = np.array(points, float).reshape((-1, 2)).T
    restarts, lost = (_newest(lines, f"program/{name}") for name in ("restarts", "lost_frames"))
    return Run(experiment, result, frames, returns, restarts, lost)


def row(name: str, runs: Sequence[Run]) -> str:
    """Returns a preset's row of the table."""
    results = [run.result for run in runs]
    returns = [result.eval_return_mean for result in results]
    experiment = runs[0].experiment
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    digits = 1 if max(map(abs, returns)) >= 10 else 3

    def shown(value: float) -> str:
        return f"{value:,.{digits}f}"

    mean, median = shown(statistics.mean(returns)), shown(statistics.median(returns))
    iqm, low, high = map(shown, intervals.bootstrap(returns))
    cells = [
        name,
        type(experiment.agent).__name__.removesuffix("Config"),
        experiment.env.name.rsplit(":")[-1],
        f"{results[0].env_frames:,}",
        f"{mean} ± {shown(spread)} ({median})",
        f"{iqm} [{low}, {high}]",
        ", ".join(f"{result.seed}: {shown(result.eval_return_mean)}" for result in results),
        f"{statistics.median(result.wall_seconds for result in results):,.0f}",
        f"{statistics.median(result.frames_per_second for result in results):,.0f}",
        ", ".join(sorted({result.git_commit[:7] for result in results})),
    ]
    return _row(cells)


def _newest(lines: Sequence[Mapping[str, float]], name: str) -> int:
    """Returns the last value of a log, 0 if there is none."""
    return next((int(line[name]) for line in reversed(lines) if name in line), 0)


def _faults(runs: Sequence[Run]) -> list[str]:
    """Returns a row for each run that lost nodes and restarted them."""
    return [
        _row(
            [
                run.result.preset,
                run.result.seed,
                run.result.topology,
                run.experiment.program.launch,
                f"{run.restarts:,}",
                f"{run.lost_frames:,}",
            ]
        )
        for run in runs
        if run.restarts
    ]


def draw(name: str, runs: Sequence[Run], path: Path) -> None:
    """Draws the returns of each seed as a thin line and their mean as a thick line.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "matplotlib, which draws the curves, is not installed. "
            "Install the extra: pip install 'rlstack[report]'"
        ) from error
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    runs = [run for run in runs if len(run.frames) > 1]
    for run in runs:
        axes.plot(run.frames, run.returns, linewidth=0.7, alpha=0.5, color="tab:blue")
    if runs:
        grid = np.linspace(
            max(run.frames[0] for run in runs), min(run.frames[-1] for run in runs), _POINTS
        )
        mean = np.mean([np.interp(grid, run.frames, run.returns) for run in runs], axis=0)
        axes.plot(grid, mean, linewidth=2, color="tab:blue")
    axes.set(title=f"{name}, {len(runs)} seeds", xlabel="frames", ylabel="episode return")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _table(columns: Sequence[str], rows: Sequence[str]) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns)), *rows]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _check_seeds(name: str, runs: Sequence[Run]) -> None:
    seeds = [run.result.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"each seed of a preset must occur once; got {name} with seeds "
            f"{', '.join(map(str, seeds))}. Name one directory for each seed."
        )
