"""Loggers of the user's own and experiment trackers, which can neither end nor delay a run."""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstack.checks import no_exits
from rlstack.programs.session import errors
from rlstack.references import Hook, check_callable, load_hook, name_of, nearest
from rlstack.storage.loggers import Logger, to_scalar

READY = ("jsonl", "tensorboard", "terminal")
TRACKERS = {
    "wandb": "rlstack.storage.trackers:Wandb",
    "mlflow": "rlstack.storage.trackers:MLflow",
    "trackio": "rlstack.storage.trackers:Trackio",
}

_FIELD = "Experiment: loggers"
_WANTED = "(run_dir) -> Logger of rlstack.storage.loggers"
_MAX_WAITING = 10_000  # lines that a logger may be behind
_CLOSE_SECONDS = 10.0  # for a logger to write its waiting lines, and to close
_TRACKER_SECONDS = 60.0  # the same limit for a tracker, which may start late and must upload


def is_own(logger: Hook) -> bool:
    """Whether a logger of the config is the user's own, or a tracker."""
    return not isinstance(logger, str) or ":" in logger or logger in TRACKERS


def check_loggers(loggers: Sequence[Hook]) -> None:
    """Checks the loggers of a config.

    Raises:
      ValueError: there is no logger of that name, the logger cannot be imported, or its package is
        missing.
      WrongKindError: a user's logger is not a function of the run directory.
    """
    known = dict.fromkeys((*READY, *TRACKERS))
    for logger in loggers:
        if isinstance(logger, str) and logger in TRACKERS:
            if importlib.util.find_spec(logger) is None:
                raise ValueError(
                    f"{_FIELD} {logger} needs the package {logger}, which is not installed. "
                    f"`rlstack doctor` prints the command that installs the extra {logger}."
                )
        elif is_own(logger):
            rule = f"{_FIELD} {name_of(logger)} must be a function {_WANTED}"
            check_callable(rule, load_hook(_FIELD, logger), Path())
        elif logger not in READY:
            raise ValueError(
                f'{_FIELD} must be the name of a logger or "module:callable"; got '
                f"{logger!r}{nearest(str(logger), known)}"
            )


def own_loggers(
    loggers: Sequence[Hook], run_dir: Path, tell: Callable[[str], None]
) -> list[Logger]:
    """Returns the user's own loggers among those of a config, each in a thread of its own.

    Args:
      loggers: the loggers that the config names.
      run_dir: the argument that each logger's function gets.
      tell: shows the user a line; called once for each logger that fails.
    """
    return [_Guarded(logger, run_dir, tell) for logger in loggers if is_own(logger)]


class _Guarded:
    """Runs a user's logger in a thread, so that it cannot delay a run; shows its failures once."""

    def __init__(self, logger: Hook, run_dir: Path, tell: Callable[[str], None]) -> None:
        self._run_dir, self._tell, self._name = run_dir, tell, name_of(logger)
        self._hook = TRACKERS.get(self._name, logger)
        self._patience = _TRACKER_SECONDS if self._name in TRACKERS else _CLOSE_SECONDS
        self._has_failed = False
        # What to do with the logger; None for nothing more.
        self._calls: queue.Queue[Callable[[Any], object] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"logger {self._name}", daemon=True)
        self._thread.start()

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Passes a line to the thread."""
        line = {name: to_scalar("Logger.write", name, value) for name, value in logs.items()}
        self._pass(lambda made: made.write(step, line))

    def write_video(self, step: int, path: Path) -> None:
        """Passes a video to the thread, if the logger has a method for it."""
        self._pass(
            lambda made: made.write_video(step, path) if hasattr(made, "write_video") else None
        )

    def _pass(self, call: Callable[[Any], object]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"is {_MAX_WAITING} lines behind, and loses lines")

    def close(self) -> None:
        """Waits until all lines are written and the logger is closed, but not for ever."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=self._patience)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._fail(f"did not close within {self._patience:g} s, and may lose lines")

    def _run(self) -> None:
        made = self._attempt(lambda: load_hook(_FIELD, self._hook)(self._run_dir))
        if made is None:
            self._fail("made no logger")
        while (call := self._calls.get()) is not None:
            if made is not None:
                self._attempt(call, made)
        if made is not None:
            self._attempt(lambda: made.close())

    def _attempt(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            with no_exits():
                return call(*arguments)
        except Exception as error:
            self._fail(f"raised {errors.described(error)}")
            return None

    def _fail(self, what: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._tell(f"the logger {self._name} {what}; the run goes on.")
