"""`rlstack top`. It is apart from the other commands because it does not import JAX."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import tyro

from programs.cli.options import UsageError, parse
from programs.tracking.run_dir import RunDirError


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


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code."""
    from rich.console import Console

    from programs.status import top

    try:
        chosen = parse(_TopOptions, "rlstack top", args)
        console = Console()
        if not console.is_terminal:
            console = Console(width=200)  # a pipe has no width
        top.show(chosen.run_dirs, console, once=chosen.once, limit=chosen.limit)
    except UsageError as error:
        print(f"rlstack top: {error}", file=sys.stderr)
        return 2
    except RunDirError as error:
        print(f"rlstack top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
