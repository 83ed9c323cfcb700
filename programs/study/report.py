"""The table and the page of a sweep."""

from __future__ import annotations

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
from rlstack.programs.study.optuna import Row
from rlstack.programs.study.space import Choices
from rlstack.programs.study.sweep import Sweep
from rlstack.programs.study.trials import short_names
from rlstack.programs.tools.charts import Curve, Lines, Points
from rlstack.programs.tools.report import page, tables
from rlstack.programs.tools.report.report import named
from rlstack.programs.tools.report.tables import Table
from rlstack.storage import files

FILE = "report.md"
BEST = "best.json"
_CURVES = 10  # number of curves, those of the best trials
_ERROR = 160  # characters of an error in the table


def write(sweep: Sweep, root: Path, rows: Sequence[Row]) -> str:
    """Writes the table, the page and the best experiment of a sweep.

    The files contain the directory's name but not its path, so that they can be shared.

    Args:
      sweep: the sweep.
      root: the directory of the sweep.
      rows: the sweep's trials so far.

    Returns:
      The text of the table, with a command that can be run here.
    """
    best = best_of(rows)
    if best is not None:
        files.write(root / BEST, to_json(sweep.with_values(best.values)))
    ((name, _),) = named([root])
    files.write(root / FILE, _markdown(sweep, rows, name) + "\n")
    intro = _summary(rows, best)
    if best is not None:
        intro += f" To train its values: {command(name)}"
    title, table = _title(sweep), _table(sweep, rows)
    files.write(
        (root / FILE).with_suffix(".html"),
        page.html(title, intro, _plots(sweep, rows), [("Trials", table)]),
    )
    near = os.path.relpath(root)
    return _markdown(sweep, rows, str(root) if near.startswith("..") else near)


def best_of(rows: Sequence[Row]) -> Row | None:
    """Returns the complete trial with the highest return; None if no trial is complete."""
    complete = [row for row in rows if row.state == "complete" and row.value is not None]
    return max(complete, key=_value, default=None)


def command(directory: str) -> str:
    """Returns the command that trains the best values of the sweep in a directory."""
    return f"rlstack train {shlex.quote(os.path.join(directory, BEST))}"


def text_of(values: Mapping[str, Option]) -> str:
    """Returns values in one line."""
    return " ".join(
        f"{name}={_text(value)}"
        for name, value in zip(short_names(values), values.values(), strict=True)
    )


def _title(sweep: Sweep) -> str:
    return f"Sweep of {sweep.base.preset}"


def _markdown(sweep: Sweep, rows: Sequence[Row], directory: str) -> str:
    """Returns the best trial and the table of all as Markdown, with this name of the directory."""
    best = best_of(rows)
    parts = [f"# {_title(sweep)}\n", _summary(rows, best)]
    if best is not None:
        parts.append(f"\n```sh\n{command(directory)}\n```\n\nAs options: `{_options(best.values)}`")
    return "\n".join([*parts, "", tables.markdown(_table(sweep, rows))])


def _summary(rows: Sequence[Row], best: Row | None) -> str:
    counts = Counter(row.state for row in rows)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    text = f"{len(rows)} trial{'s' if len(rows) != 1 else ''}: {states or 'none has begun'}."
    if best is not None:
        text += f" The best is trial {best.number}, with return {_value(best):.1f}."
    return text


def _table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    """Returns the trials, those with the highest returns first."""
    names = list(sweep.values)
    columns = ["trial", *short_names(names), "return", "state", "seconds"]
    cells = [
        [
            str(row.number),
            *(_text(row.values[name]) if name in row.values else "" for name in names),
            "" if row.value is None else f"{row.value:.1f}",
            _state(row),
            f"{row.seconds:.0f}" if row.seconds else "",
        ]
        for row in sorted(rows, key=lambda row: (row.state != "complete", -_value(row), row.number))
    ]
    return columns, cells


def _state(row: Row) -> str:
    """Returns the state of a trial, with the beginning of its error; its log has all of it."""
    error = textwrap.shorten(row.error.replace("|", "/"), _ERROR, placeholder=" ...")
    return f"{row.state}: {error}" if error else row.state


def _plots(sweep: Sweep, rows: Sequence[Row]) -> dict[str, Lines | Points]:
    complete = [row for row in rows if row.state == "complete"]
    if not complete:
        return {}
    best = np.maximum.accumulate([_value(row) for row in complete])
    found: dict[str, Lines | Points] = {
        "best": Lines(
            "Best return so far",
            "complete trials",
            "return",
            [_curve("best", np.arange(1, len(best) + 1), best)],
        )
    }
    for name, values in sweep.values.items():
        if isinstance(values, Choices):
            continue
        points = [
            (f"trial {row.number}: {_text(row.values[name])}", float(row.values[name]), _value(row))
            for row in complete
        ]
        found[name] = Points(f"Return by {name}", name, "return", points, values.log)
    ranked = sorted(complete, key=lambda row: -_value(row))[:_CURVES]
    curves = [
        _curve(
            f"trial {row.number}",
            np.array(list(row.evaluations.keys())),
            np.array(list(row.evaluations.values())),
        )
        for row in ranked
        if row.evaluations and np.isfinite(list(row.evaluations.values())).all()
    ]
    if curves:
        title = f"Evaluations of the best {len(curves)} trials"
        found["evaluations"] = Lines(title, "evaluation", "return", curves)
    return found


def _curve(name: str, x: np.ndarray, y: np.ndarray) -> Curve:
    return Curve(name, x, Band(y, y, y))


def _value(row: Row) -> float:
    return float("-inf") if row.value is None else row.value


def _options(values: Mapping[str, Option]) -> str:
    """Returns values as the command line takes them, without rounding."""
    words = [
        f"--{name} {shlex.quote(v if isinstance(v, str) else repr(v))}"
        for name, v in values.items()
    ]
    return " ".join(words)


def _text(value: Option) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
