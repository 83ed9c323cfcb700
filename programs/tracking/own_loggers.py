"""Loggers of the user's own, which can neither end nor delay a run."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstack.references import Hook, check_callable, load_hook, name_of, nearest
from rlstack.storage.loggers import Logger, Scalar, to_scalar

READY = ("jsonl", "tensorboard", "terminal")

_FIELD = "Experiment: loggers"
_WANTED = "(run_dir) -> Logger of rlstack.storage.loggers"
_MAX_WAITING = 10_000  # lines that a logger may be behind
_CLOSE_SECONDS = 10.0  # for a logger to write what it is behind, and to close


def is_own(logger: Hook) -> bool:
    """Whether a logger of the config is the user's own."""
    return not isinstance(logger, str) or ":" in logger


def check_loggers(loggers: Sequence[Hook]) -> None:
    """Checks the loggers of a config.

    Raises:
      ValueError: there is no logger of that name, or it cannot be imported.
      WrongKindError: it is not a function of the run directory.
    """
    for logger in loggers:
        if is_own(logger):
            rule = f"{_FIELD} {name_of(logger)} must be a function {_WANTED}"
            check_callable(rule, load_hook(_FIELD, logger), Path())
        elif logger not in READY:
            raise ValueError(
                f'{_FIELD} must be {", ".join(READY)} or "module:callable"; got '
                f"{logger!r}{nearest(str(logger), dict.fromkeys(READY))}."
            )


def own_loggers(
    loggers: Sequence[Hook], run_dir: Path, tell: Callable[[str], None]
) -> list[Logger]:
    """Returns the user's own loggers among those of a config, each in a thread of its own.

    Args:
      loggers: of the config.
      run_dir: the argument of their functions.
      tell: shows the user a line; called once for each logger that fails.
    """
    return [_Guarded(logger, run_dir, tell) for logger in loggers if is_own(logger)]


class _Guarded:
    """A user's logger in a thread: its failures are told once, and its delays delay nothing."""

    def __init__(self, logger: Hook, run_dir: Path, tell: Callable[[str], None]) -> None:
        self._hook, self._run_dir, self._tell = logger, run_dir, tell
        self._name = name_of(logger)
        self._has_failed = False
        self._lines: queue.Queue[tuple[int, dict[str, Scalar]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"logger {self._name}", daemon=True)
        self._thread.start()

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Passes a line to the thread."""
        line = {name: to_scalar("Logger.write", name, value) for name, value in logs.items()}
        try:
            self._lines.put_nowait((step, line))
        except queue.Full:
            self._fail(f"is {_MAX_WAITING} lines behind, and loses lines")

    def close(self) -> None:
        """Waits until all lines are written and the logger is closed, but not for ever."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail(f"did not close within {_CLOSE_SECONDS:g} s, and may lose lines")

    def _run(self) -> None:
        made = self._attempt(lambda: load_hook(_FIELD, self._hook)(self._run_dir))
        if made is None:
            self._fail("made no logger")
        while (line := self._lines.get()) is not None:
            if made is not None:
                self._attempt(lambda step, logs: made.write(step, logs), *line)
        if made is not None:
            self._attempt(lambda: made.close())

    def _attempt(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self._fail(f"raised {type(error).__name__}: {error}")
            return None

    def _fail(self, what: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._tell(f"the logger {self._name} {what}; the run goes on.")
