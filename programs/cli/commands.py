"""Runs a command, and prints its errors."""

from __future__ import annotations

import importlib
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TextIO

import rlstack
from rlstack.checks import ReportedError, no_exits, place_of
from rlstack.programs.cli.options import HelpPrinted, UsageError
from rlstack.programs.config import own_modules
from rlstack.programs.session import errors
from rlstack.programs.session.display import lasting
from rlstack.programs.session.signals import Interrupted
from rlstack.references import nearest


def main(command: str, args: list[str]) -> int:
    """Runs a command; returns the exit code."""
    run = find(command)
    if run is None:
        hint = nearest(command, [*COMMANDS, *WITHOUT_JAX])
        return _fail(f"rlstack: there is no command {command!r}{hint}")
    try:
        with no_exits(HelpPrinted):
            modules, args = _take_modules(args)
            own_modules.load_all(modules)
            code = run(args, modules) if command in _TAKE_MODULES else run(args)
        print(end="", flush=True)
        return code
    except Interrupted as stop:
        _fail(f"rlstack {command}: {stop}")
        return stop.exit_code
    except UsageError as error:
        _fail(f"rlstack {command}: {error}")
        return 2
    except FloatingPointError:  # JAX_DEBUG_NANS: the traceback shows the operation
        raise
    except Exception as error:
        # As with `| head`. Another pipe, such as one of an environment, may break too.
        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
            # Python would fail again when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if os.environ.get("RLSTACK_TRACEBACK"):
            raise
        text = _describe(error).removeprefix(f"{command}: ")  # of a function with this name
        advice = errors.advice(text)
        return _fail(f"rlstack {command}: {text}{'' if advice in text else f' {advice}'}")


# The module of this package, and its function, for each command. Only that module is imported.
COMMANDS = {
    "train": ("train", "main"),
    "sweep": ("sweep", "main"),
    "benchmark": ("benchmark", "main"),
    "cluster": ("cluster", "main"),
    "eval": ("finished", "evaluate"),
    "diff": ("finished", "diff"),
    "report": ("finished", "report"),
    "check": ("check", "main"),
    "record": ("finished", "record"),
    "play": ("finished", "play"),
    "watch": ("finished", "watch"),
    "serve": ("serve", "main"),
    "export": ("finished", "export"),
    "presets": ("presets", "main"),
    "rerun": ("finished", "rerun"),
    "completion": ("completion", "main"),
}
WITHOUT_JAX = ("doctor", "top", "dashboard")  # `rlstack.programs.__main__` runs them itself


# They take modules of the user's, for processes of their own.
_TAKE_MODULES = ("train", "sweep", "benchmark", "cluster")


def find(command: str) -> Callable[..., int] | None:
    """Imports what a command needs and returns its function; None if there is no such command."""
    command = "presets" if command == "list" else command  # the name of earlier versions
    if command not in COMMANDS:
        return None
    module, name = COMMANDS[command]
    return getattr(importlib.import_module(f"rlstack.programs.cli.{module}"), name)


def _take_modules(args: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Returns the modules that ``--module`` names, and the other arguments."""
    modules, rest = [], []
    left = iter(args)
    for arg in left:
        name, _, value = arg.partition("=")
        if name != "--module":
            rest.append(arg)
            continue
        value = value or next(left, "")
        if not value or value.startswith("-"):
            raise UsageError("--module must be followed by the name of a module")
        modules.append(value)
    return tuple(modules), rest


def _describe(error: Exception) -> str:
    """Returns an error as text, with its place in the user's code if it passed through any."""
    frames = traceback.extract_tb(error.__traceback__)
    is_own = isinstance(error, _OWN)
    is_own |= isinstance(error, TypeError) and frames[-1].filename.startswith(_STACK)
    if is_own:
        return f"{error}{errors.where(error)}"
    text = " ".join(str(error).split())
    where = errors.where(error) or f" (in {place_of(error)})"
    return f"{type(error).__name__}: {text}{where}; RLSTACK_TRACEBACK=1 shows the traceback"


_OWN = (ReportedError, ValueError, OSError, ArithmeticError)
_STACK = os.path.dirname(os.path.abspath(rlstack.__file__)) + os.sep


def _is_unread(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # it is no file
        return False
    return bool(poll.poll(0))  # it reports only errors, because no other events are registered


def _fail(message: str) -> int:
    print(message, file=lasting())
    return 1
