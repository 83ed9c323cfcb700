"""The command `rlstack`.

Each command imports only what it needs, when it runs: `rlstack --help` must not wait for JAX, and
signals must have handlers before anything that takes long is imported.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Sequence

from rlstack.programs.session import module_path, signals

USAGE = """\
usage: rlstack COMMAND ...

commands:
  train PRESET [options]   train a preset; `rlstack train PRESET --help` explains the options
  train FILE [options]     train the experiment of a config file, such as RUN_DIR/config.json
  train --resume RUN_DIR   continue a run from its newest checkpoint
  sweep PRESET [options]   train a grid of values and seeds, or search values with Optuna
  sweep --resume DIR       go on with a sweep
  benchmark SUITE          train an agent on the tasks of a benchmark, and write a page of scores;
                           --list shows the benchmarks
  cluster KIND PRESET      print a file that trains a preset on a cluster: kuberay, jobset, slurm or
                           skypilot
  eval RUN_DIR             evaluate the last or best params of a run with the greedy policy
  diff RUN_A RUN_B         show which options of two runs differ, and both results
  report DIR ...           compare finished runs: statistics, tables, pictures, an HTML page
  record RUN_DIR           play episodes with a run's newest params into a dataset for train --data
  play ENV                 play an entity environment by hand, alone or guided by a run's agent
  play RUN_DIR --seat SEAT play in one seat of a game, with a run's policies in the others
  watch RUN_DIR ...        show how a run's agent plays, in the terminal or as a video; several runs
                           of a game of several seats play against one another
  serve RUN_DIR            answer requests of other programs for a policy's actions, over HTTP or in
                           the game protocol
  export RUN_DIR           write a run's policy as npz, StableHLO or ONNX, for use without rlstack
  top [RUN_DIR ...]        show running and finished programs in a table that updates
  dashboard [DIR]          show runs on a local web page: curves, nodes, waits, comparison
  check agent AGENT        check that an agent keeps the contract of agents; `check env ENV` does so
                           for an environment
  presets [options]        list the presets, all or those of an agent or environment
  doctor                   check which features work here and say how to enable the others
  rerun DUMP_DIR           repeat an update that gave NaN
  completion SHELL         print a script that completes commands and options in bash or zsh

options:
  --module NAME            first import a module with agents and presets of your own, for a command
                           that reads a preset or a run
  -h, --help               print this text; `rlstack COMMAND --help` explains a command
  --version                print the version and the commit
"""
_DOCTOR_USAGE = """\
usage: rlstack doctor

Checks Python, packages, memory and topologies on this machine. Prints what works and, for
everything else, the reason and how to enable it. The exit code is 0 if single_process works.
"""
_COMPILING = (
    "train",
    "sweep",
    "benchmark",
    "eval",
    "record",
    "play",
    "watch",
    "serve",
    "export",
    "rerun",
)


def _command_first(args: Sequence[str]) -> list[str]:
    """Returns the arguments with each --module behind the command."""
    first = 0
    while first < len(args) and args[first].partition("=")[0] == "--module":
        first += 1 if "=" in args[first] else 2
    return [*args[first : first + 1], *args[:first], *args[first + 1 :]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code.

    Args:
      argv: the command and its arguments. By default those of this process, which then belongs to
        the command: signals end it without a traceback.
    """
    args = _command_first(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _complete_streams()
    # Ctrl-C ends some commands as usual: they have nothing to save.
    if argv is None and args[:1] not in (["top"], ["dashboard"]):
        signals.watch(args[0] if args else "")
    # "module:callable" and --module find modules in the current directory, after the stack's own.
    module_path.arrange()
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        import rlstack
        from rlstack.programs.session.result import git_commit

        print(f"rlstack {rlstack.__version__} (commit {git_commit()})")
        return 0
    command, *rest = args
    if command == "doctor":
        if rest and rest[0] in ("-h", "--help"):
            print(_DOCTOR_USAGE, end="")
            return 0
        from rlstack.programs.cli import doctor

        return doctor.main()
    if command in ("top", "dashboard"):  # without JAX
        from rlstack.programs.cli import status

        return status.top(rest) if command == "top" else status.dashboard(rest)
    if argv is None and command in _COMPILING:
        from rlstack.programs.program.launch import compiled

        compiled.keep()
    with contextlib.ExitStack() as stack:
        if argv is None and command == "train":
            from rlstack.programs.program.launch import launcher

            if launcher.is_needed(rest):
                stack.enter_context(launcher.early())
        code = _run(command, rest, argv is None)
    if argv is None:
        gc.freeze()  # else Python collects garbage when it exits, which takes 0.2 s after training
    return code


def _run(command: str, args: list[str], in_own_process: bool) -> int:
    """Imports the commands and runs one of them; returns the exit code."""
    try:
        with module_path.imported_for_good() if in_own_process else contextlib.nullcontext():
            from rlstack.programs.cli import commands

            commands.find(command)
    except ImportError as error:
        if os.environ.get("RLSTACK_TRACEBACK"):
            raise
        print(f"rlstack: {error}. {_how_to_repair()}", file=sys.stderr)
        return 1
    return commands.main(command, args)


def _how_to_repair() -> str:
    """Returns what to do after an import that failed."""
    from rlstack.programs.cli import features

    others = features.owners("rlstack") - {"rlstack"}
    return "".join(f"{name} also installs a package named rlstack. " for name in sorted(others)) + (
        "`rlstack doctor` checks the packages."
    )


def _complete_streams() -> None:
    """Makes standard streams that take every text: output is no reason for a run to end.

    A closed stream becomes the null device. Otherwise the next file that the process opens would
    get its descriptor, and libraries would print into that file. Characters that the encoding
    lacks are printed as escape codes.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
