"""`rlstack top` and `rlstack dashboard`, in a module of their own that does not import JAX."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import tyro

from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.session.run_dir import RunDir, RunDirError
from rlstack.programs.tools.serve.local_http import PortError


@dataclasses.dataclass(frozen=True)
class _TopOptions:
    """Show running and finished programs in a table that updates, from their files alone. Ctrl-C
    ends it."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Directories of runs, or of folders with runs."""
    once: bool = False
    """Print the table once. This is so too if the output is no terminal."""
    limit: int = 20
    """Most runs to show. Running ones come first, then the newest."""


def top(args: list[str]) -> int:
    """Runs `rlstack top`; returns the exit code."""
    return _run("rlstack top", lambda: _top(args))


def _top(args: list[str]) -> None:
    from rich.console import Console

    from rlstack.programs.tools.status import top

    chosen = parse(_TopOptions, "rlstack top", args)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width
    top.show(chosen.run_dirs, console, once=chosen.once, limit=chosen.limit)


@dataclasses.dataclass(frozen=True)
class _DashboardOptions:
    """Show running and finished programs on a web page of this machine, from their files alone:
    learning curves, nodes, waits, and comparison of runs. Ctrl-C ends it."""

    directory: tyro.conf.Positional[Path] = Path("runs")
    """The directory of a run or a study, or a folder that holds some. Runs that appear
    later are shown too."""
    port: int = 6080
    """The port of the page. 0 takes a free one."""
    limit: int = 30
    """Most runs to show: those with the newest logs."""


def dashboard(args: list[str]) -> int:
    """Runs `rlstack dashboard`; returns the exit code."""
    return _run("rlstack dashboard", lambda: _dashboard(args))


def _dashboard(args: list[str]) -> None:
    from rlstack.programs.tools.status.dashboard import Dashboard
    from rlstack.programs.tools.status.server import DashboardServer

    chosen = parse(_DashboardOptions, "rlstack dashboard", args)
    with DashboardServer(Dashboard(chosen.directory, chosen.limit), chosen.port) as server:
        print(f"{server.address} shows {RunDir(chosen.directory).name}; Ctrl-C ends it", flush=True)
        server.serve_forever()


def _run(name: str, command: Callable[[], None]) -> int:
    """Runs a command, which Ctrl-C ends; returns the exit code."""
    try:
        command()
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except (RunDirError, PortError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
