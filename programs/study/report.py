"""The report of a study: its table, its pictures, its page, and the best experiment of a search."""

from __future__ import annotations

import importlib.util
import os
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlstack.math.intervals import Band
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.study import pbt
from rlstack.programs.study.space import Range, shown
from rlstack.programs.study.study import (
    SearchConfig,
    Study,
    Trial,
    finished,
    short_names,
    unfinished,
)
from rlstack.programs.tools.charts import Curve, Lines, Points
from rlstack.programs.tools.report import Pictures, page, tables
from rlstack.programs.tools.report import report as reports
from rlstack.programs.tools.report.runs import Unfinished
from rlstack.programs.tools.report.tables import Table
from rlstack.storage import files

FILE = "report.md"
BEST = "best.json"
_CURVES = 10  # number of curves, those of the best trials
_ERROR = 160  # characters of an error in the table


def write(study: Study, root: Path, trials: Sequence[Trial]) -> str:
    """Writes the table and the page of a study, and the best experiment of a search.

    The files contain the directory's name but not its path, so that they can be shared.

    Args:
      study: the study.
      root: its directory.
      trials: its trials so far; those of a grid are read from their directories.

    Returns:
      The text to print, with a command that can be run here; "" if no run has finished.
    """
    if isinstance(study.scheduler, SearchConfig):
        return _write_search(study, root, trials)
    name = root.resolve().name
    if study.is_grid:
        groups, command = finished(root), f"rlstack report {name}"
    else:
        done: list[str | Path] = [root / trial.name for trial in trials if trial.result is not None]
        groups = {f"{study.base.preset} population": done} if done else {}
        command = f"rlstack train --resume {name}"
    if not groups:
        return ""
    pictures: Pictures = "png" if importlib.util.find_spec("matplotlib") else "none"
    missing = [Unfinished("", *one) for one in unfinished(root)]
    made, path = reports.make([("", groups)], unfinished=missing), root / FILE
    reports.write_markdown(made, path, command, pictures)
    reports.write_page(made, path.with_suffix(".html"), command)
    if study.is_grid:
        warnings = "".join(f"\nWarning: {text}" for text in made.warnings)
        return f"\n{tables.markdown(tables.of_groups(made.groups))}\n{warnings}\n{path}"
    lineage = pbt.read_lineage(root, study)
    members = tables.markdown(_table(study, trials))
    text = f"\n## Members\n\nThey copied each other, so none can be repeated alone.\n\n{members}\n"
    if lineage.copies:
        text += f"\n## Lineage\n\n{tables.markdown(_copies(study, lineage))}\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
    best = max(trials, key=_value)
    counts = f"{lineage.selections} selections, {len(lineage.copies)} copies"
    return f"\n{members}\n\n{counts}; the best is {root / best.name}\n{path}"


def text_of(values: Mapping[str, Option]) -> str:
    """Returns values in one line."""
    names = short_names(values)
    return " ".join(f"{n}={shown(v)}" for n, v in zip(names, values.values(), strict=True))


def _write_search(study: Study, root: Path, trials: Sequence[Trial]) -> str:
    complete = [one for one in trials if one.state == "complete" and one.value is not None]
    best = max(complete, key=_value, default=None)
    if best is not None:
        files.write(root / BEST, to_json(study.experiment(best.values)))
    ((name, _),) = reports.named([root])
    path, title, table = root / FILE, f"Sweep of {study.base.preset}", _table(study, trials)
    intro = _summary(trials, best)

    def markdown(directory: str) -> str:
        parts = [f"# {title}\n", intro]
        if best is not None:
            line = f"As options: `{_options(best.values)}`"
            parts.append(f"\n```sh\n{_command(directory)}\n```\n\n{line}")
        return "\n".join([*parts, "", tables.markdown(table)])

    files.write(path, markdown(name) + "\n")
    train = "" if best is None else f" To train its values: {_command(name)}"
    plots, sections = _plots(study, complete), [("Trials", table)]
    files.write(path.with_suffix(".html"), page.html(title, intro + train, plots, sections))
    near = os.path.relpath(root)
    return f"\n{markdown(str(root) if near.startswith('..') else near)}\n\n{path}"


def _command(directory: str) -> str:
    """Returns the command that trains the best values of the search in a directory."""
    return f"rlstack train {shlex.quote(os.path.join(directory, BEST))}"


def _summary(trials: Sequence[Trial], best: Trial | None) -> str:
    counts = Counter(trial.state for trial in trials)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    text = f"{len(trials)} trial{'s' if len(trials) != 1 else ''}: {states or 'none has begun'}."
    if best is not None:
        text += f" The best is trial {best.number}, with return {_value(best):.1f}."
    return text


def _table(study: Study, trials: Sequence[Trial]) -> Table:
    """Returns the trials, those with the highest returns first."""
    is_search, names = isinstance(study.scheduler, SearchConfig), list(study.values)
    first, last = ("trial", "seconds") if is_search else ("member", "frames")

    def row(trial: Trial) -> list[str]:
        frames = "" if trial.result is None else str(trial.result.env_frames)
        return [
            str(trial.number) if is_search else trial.name,
            *(shown(trial.values[name]) if name in trial.values else "" for name in names),
            "" if trial.value is None else f"{trial.value:.1f}",
            _state(trial),
            frames if not is_search else f"{trial.seconds:.0f}" if trial.seconds else "",
        ]

    ranked = sorted(trials, key=lambda t: (t.state != "complete", -_value(t), t.number))
    return [first, *short_names(names), "return", "state", last], [row(one) for one in ranked]


def _state(trial: Trial) -> str:
    """Returns the state of a trial, with the beginning of its error; its log has all of it."""
    error = textwrap.shorten(trial.error.replace("|", "/"), _ERROR, placeholder=" ...")
    return f"{trial.state}: {error}" if error else trial.state


def _plots(study: Study, complete: Sequence[Trial]) -> dict[str, Lines | Points]:
    if not complete:
        return {}
    best = np.maximum.accumulate([_value(trial) for trial in complete])
    found: dict[str, Lines | Points] = {
        "best": Lines(
            "Best return so far",
            "complete trials",
            "return",
            [_curve("best", np.arange(1, len(best) + 1), best)],
        )
    }
    for name, values in study.values.items():
        if not isinstance(values, Range):
            continue
        points = [
            (f"trial {t.number}: {shown(t.values[name])}", float(t.values[name]), _value(t))
            for t in complete
        ]
        found[name] = Points(f"Return by {name}", name, "return", points, values.log)
    ranked = sorted(complete, key=lambda trial: -_value(trial))[:_CURVES]
    curves = [
        _curve(
            f"trial {trial.number}",
            np.array(list(trial.evaluations.keys())),
            np.array(list(trial.evaluations.values())),
        )
        for trial in ranked
        if trial.evaluations and np.isfinite(list(trial.evaluations.values())).all()
    ]
    if curves:
        title = f"Evaluations of the best {len(curves)} trials"
        found["evaluations"] = Lines(title, "evaluation", "return", curves)
    return found


def _curve(name: str, x: np.ndarray, y: np.ndarray) -> Curve:
    return Curve(name, x, Band(y, y, y))


def _value(trial: Trial) -> float:
    return float("-inf") if trial.value is None else trial.value


def _options(values: Mapping[str, Option]) -> str:
    """Returns values as the command line takes them, without rounding."""
    words = [
        f"--{name} {shlex.quote(v if isinstance(v, str) else repr(v))}"
        for name, v in values.items()
    ]
    return " ".join(words)


def _copies(study: Study, lineage: pbt.Lineage) -> Table:
    """Returns a row for each copy: when, who, of whom, and the values before and after."""
    names = short_names(study.values)
    columns = ["selection", "frames", "member", "score", "copies", "score of it", *names]
    rows = [
        [
            *(str(copy.selection), str(copy.frames)),
            *(f"member-{copy.member}", shown(copy.score)),
            *(f"member-{copy.source}", shown(copy.source_score)),
            *(f"{shown(copy.before[n])} → {shown(copy.after[n])}" for n in study.values),
        ]
        for copy in lineage.copies
    ]
    return columns, rows
