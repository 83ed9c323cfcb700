"""The progress display: its content, its period, and how it restores a terminal."""

import errno
import io
import os
import pty
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from rlstack.programs.session.display import ProgressDisplay


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_plain_lines_show_progress_speed_returns_losses_and_time_left():
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(10_000, stream, clock=clock)
    clock.now += 2.0
    display.write(
        2_000,
        {"learner/loss": 0.12345, "actor/episode_return": np.float32(21.5), "learner/entropy": 1.0},
    )
    assert stream.getvalue() == (
        "frames 2,000/10,000 (20%) | 1,000 frames/s | actor/episode_return 21.5 | "
        "learner/loss 0.1235 | 0:02 elapsed, 0:08 left\n"
    )


def test_plain_lines_come_once_a_period_and_at_the_end():
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(1_000, stream, clock=clock, line_period=5.0)
    for frames in range(1, 1_001):
        clock.now += 0.011
        display.write(frames, {"return": frames})
    display.close()
    display.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4  # 11 s: at 0, 5 and 10, and at the end
    assert lines[-1].startswith("frames 1,000/1,000 (100%)")
    assert "return 1,000" in lines[-1]
    assert lines[-1].endswith("0:11 elapsed, 0:00 left")


def test_an_activity_is_shown_when_it_begins_and_once_a_period():
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(10, stream, clock=clock, line_period=5.0)
    display.write(10, {"return": 1.0})
    for ended in range(12):
        display.write_activity(f"evaluating, {ended}/12 episodes")
        clock.now += 1.0
    display.write_activity("")
    display.close()
    lines = stream.getvalue().splitlines()
    found = [line.rsplit(" | ", 1)[1] for line in lines[1:]]
    assert found == [f"evaluating, {ended}/12 episodes" for ended in (0, 5, 10)]


def test_logs_of_several_writes_are_shown_together_and_nan_is_shown():
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(10, stream, clock=clock, line_period=0.0)
    display.write(1, {"loss": float("nan")})
    display.write(2, {"episode_return": 3})
    assert "episode_return 3 | loss nan" in stream.getvalue().splitlines()[-1]


def test_a_resumed_run_does_not_count_the_frames_before_it():
    clock = Clock()
    display = ProgressDisplay(10_000, io.StringIO(), start_frames=5_000, clock=clock)
    assert display.frames_per_second() == 0.0
    assert display.line().endswith("? left")
    clock.now += 1.0
    display.write(5_100, {})
    assert display.frames_per_second() == pytest.approx(100.0)
    assert display.line().endswith("0:49 left")


def test_speed_is_measured_over_the_last_seconds():
    clock = Clock()
    display = ProgressDisplay(10**9, io.StringIO(), clock=clock)
    frames = 0
    for second in range(100):
        clock.now += 1.0
        frames += 10 if second < 50 else 1_000
        display.write(frames, {})
    assert display.frames_per_second() == pytest.approx(1_000.0)


def test_process_ids_have_no_separators():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with ProgressDisplay(10, stream) as display:
        display.write_nodes({"actor/0": {"state": "up", "pid": 123456, "frames/s": 1234.5}})
        display.write(1, {})
    assert "123456" in stream.getvalue() and "1234" in stream.getvalue()


def silent(*names):
    return {name: {"state": "silent", "restarts": 0, "frames/s": 0.0} for name in names}


@pytest.mark.parametrize("ends_by", ["frames", "evaluating"])
def test_actors_of_a_program_that_ends_are_not_silent(ends_by):
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(100, stream, clock=clock, line_period=0.0)
    nodes = silent("actor/0", "fox/actor/1", "inferencer/0", "evaluator", "learner")
    display.write_nodes(nodes)
    display.write(50, {"return": 1.0})
    (line,) = stream.getvalue().splitlines()
    assert "silent: actor/0, fox/actor/1, inferencer/0, evaluator, learner" in line
    display.write_activity("evaluating" if ends_by == "evaluating" else "")
    display.write(100 if ends_by == "frames" else 60, {"return": 1.0})
    display.write_nodes(nodes)
    clock.now += 1.0
    display.write(100, {"return": 2.0})
    assert "silent: evaluator, learner" in stream.getvalue().splitlines()[-1]


def test_the_last_frame_is_short_and_has_what_a_run_reached():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    clock, stream = Clock(), Terminal()
    with ProgressDisplay(1_000, stream, start_frames=200, clock=clock) as display:
        display.write_nodes({"actor/0": {"state": "up", "pid": 123, "frames/s": 50.0}})
        display.write_activity("evaluating")
        clock.now += 8.0
        display.write(1_000, {"episode_return": 12.5})
        begin = len(stream.getvalue())
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()[begin:])
    # 800 frames of this command in 8 s.
    assert "1,000/1,000 frames (100%) | 100 frames/s on average | 0:08 elapsed" in last
    assert "episode_return" in last and "12.5" in last
    assert "actor/0" not in last and "evaluating" not in last and "left" not in last


class Failing(io.StringIO):
    """A stream that takes no text while it has an error."""

    def __init__(self, error, terminal):
        super().__init__()
        self.error, self._terminal = error, terminal

    def isatty(self):
        return self._terminal

    def write(self, text):
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.ENOSPC, "full"), ValueError("closed")]
)
def test_a_stream_that_takes_no_text_ends_nothing(error, terminal):
    clock, stream = Clock(), Failing(error, terminal)
    with ProgressDisplay(1_000, stream, clock=clock) as display:
        display.write(100, {"return": 1.0})
        display.write_line("a note")
        display.write_activity("evaluating")
        print("a line of the run", file=display.stream, flush=True)
        stream.error = None
        clock.now += 10.0
        display.write(500, {"return": 2.5})
        assert "return" in stream.getvalue() and "2.5" in stream.getvalue()
        stream.error = error
    assert "a note" not in stream.getvalue()


def test_bad_arguments():
    with pytest.raises(ValueError, match="total_frames"):
        ProgressDisplay(0, io.StringIO())
    with pytest.raises(TypeError, match="'x'"):
        ProgressDisplay(1, io.StringIO()).write(1, {"x": np.zeros(2)})


_ON_A_TERMINAL = """
import sys
from rlstack.programs.session.display import ProgressDisplay
display = ProgressDisplay(100, sys.stderr)
display.write(50, {"episode_return": 12.5, "loss": 0.5})
if sys.argv[1] == "raise":
    raise RuntimeError("boom")  # the display is not closed
display.write(100, {"episode_return": 13.5})
with display:
    print("above")
"""


def _in_terminal(mode):
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_A_TERMINAL, mode],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env=env,
    )
    os.close(slave)
    output, end = b"", time.monotonic() + 40
    try:
        while time.monotonic() < end:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            output += chunk
        code = process.wait(10)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return code, output.decode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["close", "raise"])
def test_a_terminal_shows_one_display_and_gets_its_cursor_back(mode):
    code, output = _in_terminal(mode)
    assert code == (1 if mode == "raise" else 0), output
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "50/100 frames" in text
    assert "episode_return" in text
    assert "12.5" in text
    hidden, shown = output.count("\x1b[?25l"), output.count("\x1b[?25h")
    assert hidden == shown == 1
    if mode == "raise":
        assert "RuntimeError: boom" in text
    else:
        assert "13.5" in text
        assert "100/100 frames" in text


def test_a_phase_is_named_only_if_it_lasts(monkeypatch):
    monkeypatch.setattr("rlstack.programs.session.display._PHASE_SHOWN", 0.05)
    stream = io.StringIO()
    with ProgressDisplay(100, stream) as display:
        with display.phase("making 3 environments"):
            pass
        with pytest.raises(KeyError), display.phase("failing"):
            raise KeyError
        time.sleep(0.2)
        assert stream.getvalue() == ""
        with display.phase("compiling the learner's step"):
            until = time.monotonic() + 10.0
            while not stream.getvalue() and time.monotonic() < until:
                time.sleep(0.01)
    assert stream.getvalue() == "compiling the learner's step ...\n"
