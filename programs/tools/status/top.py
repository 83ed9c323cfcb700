"""The table of ``rlstack top``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlstack.programs.session.metrics import processes
from rlstack.programs.session.metrics.processes import NodeProcess
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.status.runs import NodeRows, RunReader, RunStatus, find_runs

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

_PERIOD = 2.0  # seconds between two looks
_RETURN, _EVALUATION = "actor/episode_return", "evaluator/episode_return"
_COLUMNS = (
    *("run", "state", "frames", "done", "frames/s", "return", "evaluation", "updates"),
    *("actors wait", "learner waits", "restarts", "last line", "left"),
)
_NODE_COLUMNS = ("node", "state", "pid", "cores", "memory", "restarts")


class Top:
    """The state of several runs as a table."""

    def __init__(self, paths: Sequence[Path], limit: int = 20) -> None:
        """Finds the runs.

        Args:
          paths: directories of runs, or of folders with runs.
          limit: most runs to show. Running ones come first, then the newest.

        Raises:
          RunDirError: a directory holds no runs.
          ValueError: `limit` is below 1.
        """
        if limit < 1:
            raise ValueError(f"--limit must be at least 1; got {limit}")
        self._paths, self._limit = paths, limit
        self._readers: dict[Path, RunReader] = {}
        self._rows = NodeRows()
        self._find()

    def render(self) -> Group:
        """Returns a table of the current state."""
        from rich.console import Group
        from rich.table import Table

        self._find()
        statuses = [reader.read() for reader in self._readers.values()]
        statuses.sort(key=lambda status: (not status.active, status.silence))
        hidden = len(statuses) - self._limit
        found = processes.find()
        runs = Table(*_COLUMNS, box=None, padding=(0, 2, 0, 0))
        tables: list[Table | str] = [runs]
        for status in statuses[: self._limit]:
            runs.add_row(*_cells(status))
            if status.active:
                tables.append(self._nodes(status, found.get(str(status.path), {})))
        if hidden > 0:
            tables.append(f"{hidden} more runs; --limit shows more")
        return Group(*tables)

    def _find(self) -> None:
        for path in self._paths:
            for run in find_runs(path) or [path]:
                if run not in self._readers:
                    self._readers[run] = RunReader(run)

    def _nodes(self, status: RunStatus, found: Mapping[str, NodeProcess]) -> Table:
        from rich.table import Table

        title = RunDir(status.path).name
        table = Table(*_NODE_COLUMNS, title=title, box=None, padding=(0, 2, 0, 0))
        table.title_justify = "left"
        for row in self._rows.of(status, found):
            if row.process is None:
                table.add_row(row.name, row.state, "", "", "", str(row.restarts))
                continue
            pid, cores = str(row.process.pid), f"{row.cores:.2f}"
            memory = f"{row.process.memory / 2**20:,.0f} MiB"
            table.add_row(row.name, row.state, pid, cores, memory, str(row.restarts))
        return table


def show(paths: Sequence[Path], console: Console, *, once: bool, limit: int) -> None:
    """Shows the table until the user presses Ctrl-C, or once.

    Args:
      paths: directories of runs, or of folders with runs.
      console: shows the table; once only, if it is not a terminal.
      once: True to print the table and return.
      limit: maximum number of runs to show.

    Raises:
      RunDirError: a directory holds no runs.
      ValueError: `limit` is below 1.
    """
    from rich.live import Live

    top = Top(paths, limit)
    if once or not console.is_terminal:
        console.print(top.render())
        return
    with Live(top.render(), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_PERIOD)
            live.update(top.render(), refresh=True)


def _cells(status: RunStatus) -> list[str]:
    logs = status.logs
    done = status.frames / status.budget if status.budget else 0.0
    return [
        f"{status.path.name} ({status.preset}, {status.topology})",
        status.state,
        f"{status.frames:,}/{status.budget:,}",
        f"{min(1.0, done):.0%}",
        f"{status.rate:,.0f}" if status.rate else "",
        _number(logs.get(_RETURN)),
        _number(logs.get(_EVALUATION)),
        f"{logs['learner/steps']:,.0f}" if "learner/steps" in logs else "",
        _share(status.actors_wait),
        _share(status.learner_waits),
        str(status.num_restarts),
        _duration(status.silence) if status.active else "",
        _duration(status.seconds_left),
    ]


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
