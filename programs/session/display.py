"""Progress of a run: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

from rlstack.storage.loggers import Scalar, to_scalar

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table

    from rlstack.programs.session.callbacks import Callbacks

NodeState = Mapping[str, float | str]  # column name -> value, such as "frames/s" -> 310.0

_LIVE_PERIOD = 0.25  # seconds between two drawings: looks smooth and costs almost nothing
_PHASE_SHOWN = 2.0  # seconds until a phase is named: shorter ones need no explanation
_RATE_WINDOW = 15.0  # seconds over which frames per second are measured
_MAX_SHOWN = 8  # returns and losses
_BAR = 30  # columns of the progress bar, or fewer where the terminal is narrow
_BESIDE_BAR = 76  # columns of the rest of its line
_END_FIRST = {"actor", "inferencer"}  # nodes that a program needs no more while it ends
_NOT_TAKEN = (OSError, ValueError)  # what a stream raises; the second one after it was closed


class _Lasting:
    """A wrapper that loses text instead of failing; other attributes are the wrapped stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text; an error of the stream is ignored."""
        with contextlib.suppress(*_NOT_TAKEN):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream; an error of the stream is ignored."""
        with contextlib.suppress(*_NOT_TAKEN):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: TextIO | None = None) -> TextIO:
    """Wraps a text stream, so that a failing stream does not end a run.

    The reader may go away (`| head`), the disk may be full, and the terminal may be closed. Text is
    then lost until the stream accepts text again.

    Args:
      stream: the stream to wrap; standard error by default.
    """
    return cast(TextIO, _Lasting(sys.stderr if stream is None else stream))


class ProgressDisplay:
    """A logger that shows frames, frames/s, times, episode returns and losses.

    On a terminal it draws one display that updates in place; other output appears above it.
    Elsewhere it prints a line at most every `line_period` seconds. `close` restores the terminal;
    it also runs at the end of a `with` block and at exit. A stream that takes no text ends no run.

    Attributes:
      listener: the user's callbacks, which are told what happens; None if there are none.
    """

    def __init__(
        self,
        total_frames: int,
        stream: TextIO | None = None,
        *,
        start_frames: int = 0,
        line_period: float = 5.0,
        shows_progress: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Creates the display; the first logs make it visible.

        Args:
          total_frames: the run's budget, at least 1.
          stream: receives the display; standard error by default.
          start_frames: frames of the earlier runs, if this run resumes one.
          line_period: seconds between two plain lines.
          shows_progress: False to show only the texts of `write_line` and `phase`.
          clock: returns the time in seconds, from any starting point.

        Raises:
          ValueError: `total_frames` is below 1.
        """
        if total_frames < 1:
            raise ValueError(
                f"ProgressDisplay: total_frames must be at least 1; got {total_frames}."
            )
        self.listener: Callbacks | None = None
        self._total = total_frames
        self._stream = lasting(stream)
        self._terminal = self._stream.isatty()
        self._period = _LIVE_PERIOD if self._terminal else line_period
        self._shows_progress = shows_progress
        self._clock = clock
        self._frames = self._start_frames = start_frames
        self._logs: dict[str, Scalar] = {}
        self._nodes: Mapping[str, NodeState] = {}
        self._activity = ""
        self._began = clock()
        self._history: deque[tuple[float, int]] = deque([(self._began, start_frames)])
        self._shown_at: float | None = None
        self._pending = False
        self._live: Live | None = None
        self._closed = False

    @property
    def began(self) -> float:
        """The clock's time at which the displayed elapsed time starts."""
        return self._began

    @property
    def stream(self) -> TextIO:
        """The stream that the display writes to; see `lasting`."""
        return self._stream

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, logs: Mapping[str, object]) -> None:
        """Stores new logs; updates the display if the period has passed since the last update.

        Raises:
          TypeError: a log is not a single number.
        """
        for name, value in logs.items():
            self._logs[name] = to_scalar("ProgressDisplay.write", name, value)
        self._frames = max(self._frames, int(step))
        now = self._clock()
        self._history.append((now, self._frames))
        while len(self._history) > 2 and self._history[1][0] < now - _RATE_WINDOW:
            self._history.popleft()
        self._pending = True
        self._show_if_due(now)

    def write_activity(self, text: str) -> None:
        """Shows an activity other than training, such as "evaluating"; "" ends the activity."""
        started = bool(text) and not self._activity
        if text != self._activity and self._terminal:
            self._pending = True  # the display stays on the screen, so it must show the end too
        self._activity = text
        if started and not self._closed:
            self._show(self._clock())
        elif text:
            self._show_if_due(self._clock())

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows what the program does while the body runs, if that takes more than 2 seconds.

        The line is printed by a timer's thread, so the body must release Python's lock at times.
        """
        timer = threading.Timer(_PHASE_SHOWN, self.write_line, (f"{text} ...",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def write_nodes(self, nodes: Mapping[str, NodeState]) -> None:
        """Sets the state of each node of a program: node name -> column name -> value.

        If the nodes report frames/s, the display shows their sum as the program's rate. A rate from
        the display's own clock and window would differ from that sum.
        """
        if self._activity or self._fraction() == 1:
            nodes = {name: _at_the_end(name, node) for name, node in nodes.items()}
        self._nodes = nodes

    def write_line(self, text: str) -> None:
        """Prints a line, above the display on a terminal."""
        if self._live is not None and not self._closed:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Shows the last logs and restores the terminal; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._pending:
                self._show(self._clock())
        finally:
            if self._live is not None:
                self._live.update(self._last_frame())
                self._live.stop()
                atexit.unregister(self.close)

    def frames_per_second(self) -> float:
        """Returns frames per second over the last seconds; 0 before the first logs."""
        of_nodes = [float(node["frames/s"]) for node in self._nodes.values() if "frames/s" in node]
        if of_nodes:
            return sum(of_nodes)
        (then, before), (now, frames) = self._history[0], self._history[-1]
        return (frames - before) / (now - then) if now > then else 0.0

    def line(self) -> str:
        """Returns the text of a plain line."""
        parts = [
            f"frames {self._frames:,}/{self._total:,} ({self._fraction():.0%})",
            f"{self.frames_per_second():,.0f} frames/s",
            *(f"{name} {_number(value)}" for name, value in self._shown_logs()),
            f"{self._elapsed()} elapsed, {self._time_left()} left",
            *([self._activity] if self._activity else []),
            *self._problems(),
        ]
        return " | ".join(parts)

    def _show_if_due(self, now: float) -> None:
        if not self._closed and (self._shown_at is None or now - self._shown_at >= self._period):
            self._show(now)

    def _show(self, now: float) -> None:
        if not self._shows_progress:
            return
        self._shown_at = now
        self._pending = False
        if self._terminal:
            self._draw()
        else:
            print(self.line(), file=self._stream, flush=True)

    def _draw(self) -> None:
        from rich.console import Console  # imported here because plain lines do not need rich
        from rich.live import Live

        if self._live is None:
            # No refresh thread: the display changes only when logs come.
            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, transient=False)
            atexit.register(self.close)
            self._live.start()
        self._live.update(self._render(), refresh=True)

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar = _BAR
        if self._live is not None:
            bar = max(1, min(_BAR, self._live.console.width - _BESIDE_BAR))
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=self._total, completed=min(self._frames, self._total), width=bar),
            f"{self._fraction():.0%}",
            f"{self._frames:,}/{self._total:,} frames",
            f"{self.frames_per_second():,.0f} frames/s",
            f"{self._elapsed()} elapsed, {self._time_left()} left",
        )
        if self._activity:
            head.add_row("", self._activity)
        body = self._render_logs()
        return Group(head, body, self._render_nodes()) if self._nodes else Group(head, body)

    def _last_frame(self) -> Group:
        """Returns what stays on the terminal: no bar and no nodes, which have ended."""
        from rich.console import Group
        from rich.text import Text

        seconds, made = self._clock() - self._began, self._frames - self._start_frames
        parts = [
            f"{self._frames:,}/{self._total:,} frames ({self._fraction():.0%})",
            f"{made / seconds if seconds > 0 else 0.0:,.0f} frames/s on average",
            f"{self._elapsed()} elapsed",
            *self._problems(),
        ]
        return Group(Text(" | ".join(parts)), self._render_logs())

    def _render_logs(self) -> Table:
        from rich.table import Table

        body = Table.grid(padding=(0, 2))
        for name, value in self._shown_logs():
            body.add_row(name, _number(value))
        return body

    def _render_nodes(self) -> Table:
        from rich.table import Table

        columns = list(dict.fromkeys(name for node in self._nodes.values() for name in node))
        table = Table("node", *columns, box=None, padding=(0, 2, 0, 0))
        for name, node in self._nodes.items():
            table.add_row(name, *(_cell(column, node.get(column, "")) for column in columns))
        return table

    def _problems(self) -> list[str]:
        """Returns silent nodes and restarts, for a plain line."""
        silent = [name for name, node in self._nodes.items() if node.get("state") == "silent"]
        restarts = sum(int(node.get("restarts", 0)) for node in self._nodes.values())
        parts = [f"silent: {', '.join(silent)}"] if silent else []
        return [*parts, f"{restarts} restarts"] if restarts else parts

    def _fraction(self) -> float:
        return min(1.0, self._frames / self._total)

    def _time_left(self) -> str:
        rate = self.frames_per_second()
        left = self._total - self._frames
        if left <= 0:
            return "0:00"
        if rate <= 0:
            return "?"
        return _duration(left / rate)

    def _elapsed(self) -> str:
        return _duration(self._clock() - self._began)

    def _shown_logs(self) -> list[tuple[str, Scalar]]:
        """Returns the logs to show: episode returns first, then losses."""
        order = [
            [name for name in self._logs if word in name.rsplit("/", 1)[-1]]
            for word in ("return", "loss")
        ]
        names = list(dict.fromkeys(name for group in order for name in group))
        return [(name, self._logs[name]) for name in names[:_MAX_SHOWN]]


def _at_the_end(name: str, node: NodeState) -> NodeState:
    """Returns the state of a node of a program that ends; nodes that act have ended by then."""
    ended = node.get("state") == "silent" and _END_FIRST & set(name.split("/"))
    return {**node, "state": "ended"} if ended else node


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _cell(column: str, value: float | str) -> str:
    if column == "pid" or isinstance(value, str):
        return str(value)
    return f"{value:,.0f}" if column == "frames/s" else _number(value)  # as in the first line


def _number(value: Scalar) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
