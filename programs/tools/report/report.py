"""`rlstack report`: writes the files of a report."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlstack.programs.tools.report import Pictures, page, plots, statistics, tables
from rlstack.programs.tools.report.normalisation import Normalisation
from rlstack.programs.tools.report.runs import (
    By,
    Group,
    Run,
    Unfinished,
    methods,
    read,
    read_groups,
)
from rlstack.programs.tools.report.statistics import FEW, Statistics

_NAMED = 8  # groups of runs that a warning names; the table has all
Groups = Mapping[str, Sequence[str | Path]]  # directories of runs that differ in their seeds

_HEAD = """\
# Results

Returns of the evaluations at the end of training, one row for each preset. Policies are greedy,
unless `evaluator.epsilon` is listed below. Written by `{command}` from the run directories.
`rlstack train PRESET --seed SEED`, with the options listed below if there are any, repeats a run at
its commit with the versions of `requirements.lock`. Other commits, versions and machines round
differently, and returns then differ as between seeds.
"""
_INTERVALS = (
    "Brackets are 95 % intervals by stratified bootstrap over runs (Agarwal et al. 2021, "
    "https://arxiv.org/abs/2108.13264)."
)


class Report(NamedTuple):
    """The content of a report."""

    groups: Mapping[str, Sequence[Run]]  # runs that differ in their seeds, by name
    statistics: Statistics
    unfinished: Sequence[Unfinished] = ()

    @property
    def warnings(self) -> list[str]:
        """Sentences on what makes the numbers less than they seem."""
        found, warnings = self.statistics, []
        if self.unfinished:
            names = dict.fromkeys((one.name, one.task) for one in self.unfinished)
            texts = []
            for name, task in names:
                seeds = [
                    u.experiment.seed for u in self.unfinished if (u.name, u.task) == (name, task)
                ]
                texts.append(f"{name} on {task}, seed {', '.join(map(str, seeds))}")
            if len(texts) > _NAMED:
                texts[_NAMED:] = [f"and {len(texts) - _NAMED} more groups of runs"]
            count, s = len(self.unfinished), "s have" if len(self.unfinished) > 1 else " has"
            warnings.append(
                f"{count} run{s} no result and count{'' if count > 1 else 's'} in no number: "
                f"{'; '.join(texts)}."
            )
        differ = [task for task in found.tasks if statistics.unequal(task, found.methods)]
        if differ:
            texts = [
                f"{method.name} {statistics.frames_of(runs)}"
                for method in found.methods
                if (runs := [run for task in differ for run in method.tasks.get(task, ())])
            ]
            warnings.append(
                f"The budgets on {', '.join(differ)} differ, so final returns are not comparable; "
                f"compare the learning curves at equal frames. Frames: {'; '.join(texts)}."
            )
        lacking = [
            f"{m.name} lacks {', '.join(missing)}"
            for m in found.methods
            if (missing := [task for task in found.tasks if task not in m.tasks])
        ]
        if found.over_tasks and lacking:
            warnings.append(
                "Averages over tasks and profiles of methods with different tasks are not "
                f"comparable: {'; '.join(lacking)}."
            )
        few: dict[tuple[str, int], list[str]] = {}
        for one in found.of_tasks:
            if one.runs < FEW:
                few.setdefault((one.method, one.runs), []).append(one.tasks[0])
        if few:
            every = {method.name: len(method.tasks) for method in found.methods}
            texts = []
            for (method, number), tasks in few.items():
                which = "all tasks" if 1 < len(tasks) == every[method] else ", ".join(tasks)
                texts.append(f"{method} on {which}: {number}")
            warnings.append(
                f"Intervals of fewer than {FEW} runs are too narrow: with 3 runs they contain the "
                "true value in about 76 % of cases, and not in 95 %. Look at the single runs. "
                f"Runs: {'; '.join(texts)}."
            )
        return warnings


def named(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Returns directories with their last names, or where these are equal with what differs."""
    whole = [path.resolve() for path in paths]
    names = [path.name for path in whole]
    same = os.path.commonpath([path.parent for path in whole])
    return [
        (str(full.relative_to(same)) if names.count(full.name) > 1 else full.name, path)
        for full, path in zip(whole, paths, strict=True)
    ]


def make(
    sources: Sequence[tuple[str, Groups]],
    *,
    by: By = "preset",
    normalisation: Normalisation | None = None,
    compare: bool = False,
    unfinished: Sequence[Unfinished] = (),
) -> Report:
    """Reads runs and computes their statistics.

    Args:
      sources: the groups of runs of each directory, with its name.
      by: the property by which runs form methods; see `rlstack.programs.tools.report.runs.methods`.
      normalisation: maps returns to scores that can be averaged over tasks.
      compare: True to compare each pair of methods.
      unfinished: the runs of these directories without a result. They are counted, and may be among
        those of the groups.

    Raises:
      ValueError: no run is finished, a group has a seed twice, or a method has two
        groups of one task; or see `rlstack.programs.tools.report.statistics.compute`.
    """
    named: dict[str, dict[str, list[str | Path]]] = {}
    for source, groups in sources:
        merged = named.setdefault(source if by == "directory" else "", {})
        for name, paths in groups.items():
            merged.setdefault(name, []).extend(paths)
    left_out = {one.path for one in unfinished}
    groups_of = {
        source: [
            group
            for name, paths in sorted(groups.items())
            for group in read_groups(name, [path for path in paths if path not in left_out])
        ]
        for source, groups in named.items()
    }
    if not any(groups_of.values()):
        for one in unfinished:
            read(one.path)  # says how to finish it
    found = statistics.compute(methods(groups_of, by, unfinished), normalisation, compare)
    return Report(_labelled(groups_of), found, unfinished)


def write_markdown(report: Report, out: Path, command: str, pictures: Pictures = "png") -> None:
    """Writes a report in Markdown, and pictures to the folder of the same name without suffix.

    Raises:
      ValueError: matplotlib, which draws the pictures, is not installed.
    """
    parts = [_HEAD.format(command=command)]
    parts += [f"> Warning: {tables.plain(text)}\n" for text in report.warnings]
    parts.append(tables.markdown(tables.of_groups(report.groups)))
    for title, table in _sections(report):
        parts += [f"\n## {title}\n", tables.markdown(table)]
    parts += ["", _INTERVALS]
    if report.statistics.comparisons:
        parts += [
            "\n## Comparison\n",
            *(f"- {tables.plain(sentence(str(one)))}" for one in report.statistics.comparisons),
        ]
    if pictures != "none":
        folder = out.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        drawn = _drawn(report)
        for name, plot in drawn.items():
            plots.draw(plot, folder / f"{name}.{pictures}")
        parts.append("\n## Learning curves\n")
        parts += [
            f"![{plot.title}]({folder.name}/{name}.{pictures})" for name, plot in drawn.items()
        ]
    _write(out, "\n".join(parts) + "\n")


def write_page(report: Report, out: Path, command: str) -> None:
    """Writes a report as one HTML page."""
    found = report.statistics
    sections = [*_sections(report), ("Runs", tables.of_groups(report.groups))]
    intro = f"Returns of the evaluations at the end of training. {_INTERVALS} Written by {command}."
    remarks = [*(f"Warning: {text}" for text in report.warnings)]
    remarks += [sentence(str(one)) for one in found.comparisons]
    text = page.html("Results", intro, plots.of_statistics(found), sections, remarks)
    _write(out, text)


def write_csv(report: Report, out: Path) -> None:
    """Writes the statistics in CSV, a line for each number."""
    _write(out, tables.to_csv(report.statistics))


def write_latex(report: Report, out: Path) -> None:
    """Writes the statistics as tables in LaTeX."""
    _write(out, tables.latex(report.statistics, report.warnings))


def summary(report: Report) -> str:
    """Returns the warnings and the comparisons as lines for a terminal."""
    lines = [f"Warning: {text}" for text in report.warnings]
    return "\n".join([*lines, *(sentence(str(c)) for c in report.statistics.comparisons)])


def sentence(text: str) -> str:
    """Returns a comparison as a sentence; a name at its beginning stays as it is."""
    return f"{text[0].upper() if text.startswith('each of') else text[0]}{text[1:]}."


def _write(out: Path, text: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    # Names of files that are not UTF-8 are lone surrogates here.
    out.write_text(text, encoding="utf-8", errors="backslashreplace")


def _sections(report: Report) -> list[tuple[str, tables.Table]]:
    """Returns the titles and tables below the first one."""
    found = report.statistics
    sections = [
        ("Runs without a result", tables.of_unfinished(report.unfinished)),
        ("Options that differ from the preset", tables.of_options(report.groups)),
        ("All options of presets of your own", tables.of_options(report.groups, known=False)),
        ("Nodes that were lost", tables.of_faults(report.groups)),
        ("Versions", tables.of_versions(report.groups)),
        ("Returns with intervals", tables.of_tasks(found)),
    ]
    if found.normalisation is not None:
        sections.append((f"Scores, {found.normalisation.text}", tables.over_tasks(found)))
    return [(title, table) for title, table in sections if table[1]]


def _drawn(report: Report) -> dict[str, plots.Plot]:
    """Returns the plots that are drawn as pictures, by the names of their files."""
    drawn: dict[str, plots.Plot] = {
        _file_name(name): plots.of_group(name, runs, report.statistics)
        for name, runs in report.groups.items()
    }
    found = report.statistics
    if found.comparisons or found.over_tasks:
        drawn |= {_file_name(name): plot for name, plot in plots.of_statistics(found).items()}
    return drawn


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.,=+-]", "-", name.replace(", ", "-"))


def _labelled(sources: Mapping[str, Sequence[Group]]) -> dict[str, Sequence[Run]]:
    """Returns all groups by name, and by task and directory where several have the name."""
    every = [(source, group) for source, groups in sources.items() for group in groups]
    labels = [
        (g.name, f"{g.name}, {g.task}", f"{source}: {g.name}", f"{source}: {g.name}, {g.task}")
        for source, g in every
    ]
    count = Counter(itertools.chain.from_iterable(labels))
    return {
        next(label for label in choices if count[label] == 1): group.runs
        for choices, (_, group) in zip(labels, every, strict=True)
    }
