"""Loggers of scalars: to JSON lines, to TensorBoard, to memory, or to several of these.

Every logger takes the number of environment frames so far and a flat mapping of scalars. Values may
be Python numbers or arrays of one element (numpy or JAX). This module does not import JAX. It
imports TensorBoard's writer only when one is made.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlstack.storage import jsonl

Scalar = bool | int | float


class Logger(Protocol):
    """Receives scalars during a run."""

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Records `logs` (name -> scalar) at `step` environment frames."""

    def close(self) -> None:
        """Writes buffered values and closes files; a second call does nothing."""


def to_scalar(where: str, name: str, value: Any) -> Scalar:
    """Returns a log value as a Python number.

    Args:
      where: the caller, for the error message.
      name: the log's name, for the error message.
      value: a Python number, or a numpy or JAX array of one element.

    Raises:
      TypeError: `value` is neither of these.
    """
    if isinstance(value, bool | int | float):
        return value
    size = getattr(value, "size", None)
    if size == 1:
        found = value.item()
        if isinstance(found, bool | int | float):
            return found
    shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"{where}: every log must be one number; {name!r} is a {type(value).__name__}{shape}. "
        "Reduce it (mean, min, max) before it is logged."
    )


def to_json(value: Any) -> Any:
    """Returns `value` with numpy scalars as Python numbers, and NaN and infinities as strings.

    JSON has no NaN and no infinity. They become "nan", "inf" and "-inf", which Python's `float`
    reads back, so that every JSON reader can read the file of a diverged run.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if not isinstance(value, str | bytes) and hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class JsonlLogger:
    """One JSON object per line: `env_frames`, `wall_time` (Unix seconds) and the logs.

    Each line is written to the operating system before `write` returns, so a crash of the process
    loses nothing. An existing file is continued; an incomplete last line of a killed process is
    removed first. A line that cannot be written leaves nothing in the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Callable[[], float] = time.time,
        *,
        before_write: Callable[[], None] | None = None,
    ):
        """Opens the file.

        Args:
          path: the path of the file.
          clock: returns Unix seconds.
          before_write: called before each line; `write` raises its exceptions.
        """
        self._clock, self._before_write = clock, before_write
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        jsonl.drop_torn_line(Path(path))
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close())

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Appends one line.

        Raises:
          TypeError: a log is not one number.
          ValueError: the logger is closed, or a log is named env_frames or wall_time.
          OSError: the file system refuses the write, for example because the disk is full.
        """
        if self._file.closed:
            raise ValueError("JsonlLogger.write: the logger must be open; it was closed.")
        record: dict[str, Any] = {"env_frames": int(step), "wall_time": self._clock()}
        for name, value in logs.items():
            if name in ("env_frames", "wall_time"):
                raise ValueError(
                    f"JsonlLogger.write: logs must not be called {name!r}, which the logger itself "
                    "writes. Rename the log."
                )
            record[name] = to_json(to_scalar("JsonlLogger.write", name, value))
        if self._before_write is not None:
            self._before_write()
        line = memoryview(json.dumps(record, allow_nan=False).encode() + b"\n")
        start = os.fstat(self._file.fileno()).st_size
        try:
            while line:  # an unbuffered write may write only a part
                line = line[self._file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next line would continue this part
                os.ftruncate(self._file.fileno(), start)
            raise OSError(
                error.errno,
                f"{error.strerror}; free space there and go on from the last checkpoint with "
                "--resume. The log file is",
                str(self._path),
            ) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardLogger:
    """Writes scalars to TensorBoard event files in `directory`, against environment frames."""

    def __init__(
        self, directory: str | os.PathLike[str], flush_secs: int = 10, *, after: int | None = None
    ):
        """Opens a new event file.

        Args:
          directory: the directory of the event files.
          flush_secs: seconds between two flushes.
          after: TensorBoard no longer shows what earlier files hold after these frames. None:
              it shows everything.
        """
        from tensorboardX import SummaryWriter  # takes a third of a second
        from tensorboardX.summary import scalar

        self._scalar: Callable[[str, float], Any] = scalar
        self._tags: dict[str, str] = {}  # log name -> its tag, in characters that TensorBoard takes
        # An unbounded queue, because a bounded one would block forever if its thread failed.
        self._writer: Any = SummaryWriter(
            str(directory),
            max_queue=0,
            flush_secs=flush_secs,
            purge_step=None if after is None else after + 1,
        )
        events = self._writer.file_writer.event_writer
        self._directory, self._thread, self._queue = directory, events._worker, events._event_queue
        self._file = self._thread._record_writer = _EventFile(events)

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Adds one point to each scalar.

        Raises:
          TypeError: a log is not one number.
          ValueError: the logger is closed.
          OSError: earlier events could not be written, for example because the disk is full.
        """
        if self._writer is None:
            raise ValueError("TensorBoardLogger.write: the logger must be open; it was closed.")
        if not self._thread.is_alive():
            error = self._file.error or OSError(errno.EIO, "Events could not be written")
            raise OSError(
                error.errno,
                f"{error.strerror}; free space there and go on from the last checkpoint with "
                "--resume. The directory of event files is",
                str(self._directory),
            ) from error
        # One event for all, because each passes through a queue of processes and two threads.
        event = self._scalar("", 0.0)
        del event.value[:]
        for name, value in logs.items():
            number = float(to_scalar("TensorBoardLogger.write", name, value))
            if name not in self._tags:
                self._tags[name] = self._scalar(name, number).value[0].tag
            event.value.add(tag=self._tags[name], simple_value=number)
        if event.value:
            self._writer.file_writer.add_summary(event, int(step))

    def close(self) -> None:
        """Writes buffered events and closes the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            # On a full disk the last events are lost; `write` has already raised the error.
            if self._thread.is_alive():
                try:
                    writer.close()
                    self._queue.join_thread()  # which the writer tells to end
                    return
                except OSError as error:
                    self._file.give_up(error)
            self._queue.cancel_join_thread()  # else the exiting process would wait for them


class _EventFile:
    """Stores the error that ended the writing thread of a `TensorBoardLogger`."""

    def __init__(self, events: Any):
        self._events, self._writer = events, events._ev_writer
        self.error: OSError | None = None

    def give_up(self, error: OSError) -> None:
        """Stops writing; otherwise the process would try again at its end, with more tracebacks."""
        self.error = error
        self._events._closed = True
        with contextlib.suppress(OSError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:  # for what the file still buffers
                os.dup2(nowhere, self._writer._py_recordio_writer._writer.fileno())
            finally:
                os.close(nowhere)

    def write_event(self, event: Any) -> None:
        with self._kept():
            self._writer.write_event(event)

    def flush(self) -> None:
        with self._kept():
            self._writer.flush()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.give_up(error)
            raise SystemExit from error  # ends the thread without a traceback


class InMemoryLogger:
    """Keeps everything in `records`: `(step, logs)` pairs with Python numbers; for tests."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Scalar]]] = []
        self.closed = False

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Appends one record.

        Raises:
          TypeError: a log is not one number.
        """
        converted = {name: to_scalar("InMemoryLogger.write", name, v) for name, v in logs.items()}
        self.records.append((int(step), converted))

    def series(self, name: str) -> list[tuple[int, Scalar]]:
        """Returns the `(step, value)` pairs of one log."""
        return [(step, logs[name]) for step, logs in self.records if name in logs]

    def close(self) -> None:
        """Records that it was closed."""
        self.closed = True


class NewestLogs:
    """A logger that holds the newest value of each name."""

    def __init__(self) -> None:
        self.logs: dict[str, float] = {}

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Takes one line of logs."""
        del step
        self.logs.update({name: float(value) for name, value in logs.items()})

    def close(self) -> None:
        """Does nothing."""


class Fanout:
    """Writes to each of `loggers` in order, converting every value once."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = tuple(loggers)

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Writes to every logger.

        Raises:
          TypeError: a log is not one number.
        """
        converted = {name: to_scalar("Fanout.write", name, value) for name, value in logs.items()}
        for logger in self._loggers:
            logger.write(step, converted)

    def write_video(self, step: int, path: Path) -> None:
        """Passes a video on to the loggers that have a method for it.

        Args:
          step: environment frames.
          path: the path of the file.
        """
        for logger in self._loggers:
            write_video = getattr(logger, "write_video", None)
            if write_video is not None:
                write_video(step, path)

    def close(self) -> None:
        """Closes every logger, also after one fails; then raises the first failure."""
        failure: BaseException | None = None
        for logger in self._loggers:
            try:
                logger.close()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
