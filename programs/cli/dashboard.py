"""`rlstack dashboard`. It is apart from the other commands because it does not import JAX."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import tyro

from programs.cli.options import UsageError, parse
from programs.status.dashboard import Dashboard
from programs.status.server import DEFAULT_PORT, DashboardServer, PortError
from programs.tracking.run_dir import RunDirError


@dataclasses.dataclass(frozen=True)
class _DashboardOptions:
    """Show running and finished programs on a web page of this machine, from their files alone:
    learning curves, nodes, waits, and comparison of runs. Ctrl-C ends it."""

    directory: tyro.conf.Positional[Path] = Path("runs")
    """The directory of a run, a set or a sweep, or a folder that holds some. Runs that appear
    later are shown too."""
    port: int = DEFAULT_PORT
    """The port of the page. 0 takes a free one."""
    limit: int = 30
    """Most runs to show: those with the newest logs."""


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code."""
    try:
        chosen = parse(_DashboardOptions, "rlstack dashboard", args)
        with DashboardServer(Dashboard(chosen.directory, chosen.limit), chosen.port) as server:
            print(f"{server.address} shows {chosen.directory}; Ctrl-C ends it", flush=True)
            server.serve_forever()
    except UsageError as error:
        print(f"rlstack dashboard: {error}", file=sys.stderr)
        return 2
    except (RunDirError, PortError, ValueError) as error:
        print(f"rlstack dashboard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
