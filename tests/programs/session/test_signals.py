"""How SIGINT and SIGTERM stop a process: as requests, and at once."""

import contextlib
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlstack.programs.session.signals import StopSignals

pytestmark = pytest.mark.timeout(60)

# The second lock waits for ever, in C, where Python runs no handlers.
IN_C = (
    "import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; m = b'\\0' * 64; lock(m); lock(m)"
)


@contextlib.contextmanager
def command(*body):
    """Runs code after `watch`, in a process; yields it when the code has printed "ready"."""
    lines = ["from rlstack.programs.session import signals", "signals.watch('train')", *body]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process, seconds):
    """Waits for the end, which must come within a time; returns the exit code and what it said."""
    begun = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - begun < seconds
    return process.returncode, said


READY = "print('ready', flush=True)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_at_once_also_in_c(number):
    with command(READY, IN_C) as process:
        process.send_signal(number)
        code, said = end(process, 1.5)
    assert code == 128 + number
    assert said == f"rlstack train: stopped by {number.name}; there was nothing to save yet.\n"


def test_within_stop_signals_the_first_is_a_request_and_the_second_ends_at_once():
    body = f"with signals.StopSignals() as stop:\n  {READY}\n  {IN_C}"
    with command(body) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(3.0)
        assert process.poll() is None  # there may be something to save
        process.send_signal(signal.SIGINT)
        code, said = end(process, 1.5)
    assert code == 130
    assert said.count("\n") == 1
    assert "the second signal" in said


@pytest.mark.slow
@pytest.mark.chosen
def test_a_request_that_takes_its_time_is_explained_once():
    body = "import sys, time\nwith signals.StopSignals(tell=lambda text: sys.stderr.write(text)):\n"
    with command(f"{body}  {READY}\n  time.sleep(7.0)") as process:
        process.send_signal(signal.SIGTERM)
        code, said = end(process, 10.0)
    assert code == 0
    # Python 3.13 and newer know the code behind -c.
    at = r"<string>:(\d+)(?:: time\.sleep\(7\.0\))? returns"
    (line,) = re.findall(f"SIGTERM was received: what is called at {at}", said)
    assert int(line) >= 4  # the sleep


@pytest.mark.slow
@pytest.mark.chosen
def test_a_request_that_a_compilation_ignores_ends_a_command_that_has_nothing_to_save():
    body = f"with signals.StopSignals(has_progress=lambda: False):\n  {READY}\n  {IN_C}"
    with command(body) as process:
        process.send_signal(signal.SIGINT)
        code, said = end(process, 4.0)
    assert (code, "nothing to save yet" in said) == (130, True)


@pytest.mark.slow
@pytest.mark.chosen
def test_it_does_so_too_if_python_ran_the_handler_before_the_thread_saw_the_signal():
    body = "with signals.StopSignals(has_progress=lambda: False):\n"
    body += f"  {READY}\n  import signal; signal.raise_signal(signal.SIGINT)\n  {IN_C}"
    with command(body) as process:
        code, said = end(process, 4.0)
    assert (code, "nothing to save yet" in said) == (130, True)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_request_that_is_noticed_may_take_its_time():
    body = (
        "import time, sys\n"
        f"with signals.StopSignals(has_progress=lambda: False) as stop:\n  {READY}\n"
        "  while not stop.received: time.sleep(0.01)\n"
        "  time.sleep(3.0)\nsys.exit(stop.received)"
    )
    with command(body) as process:
        process.send_signal(signal.SIGTERM)
        assert end(process, 6.0) == (signal.SIGTERM, "")


def test_after_stop_signals_the_line_says_that_everything_is_saved():
    with command(f"with signals.StopSignals(): pass\n{READY}\n{IN_C}") as process:
        process.send_signal(signal.SIGINT)
        assert "everything is saved" in end(process, 1.5)[1]


def test_functions_clean_up_before_a_sudden_end(tmp_path):
    body = (
        f"import pathlib, time\npath = pathlib.Path({str(tmp_path / 'left')!r})\npath.touch()\n"
        "signals.at_sudden_end(path.unlink)\n"
        "signals.at_sudden_end(lambda: 1 / 0)\n"
        "forget = signals.at_sudden_end(lambda: time.sleep(60))\nforget()"
    )
    with command(f"{body}\n{READY}\n{IN_C}") as process:
        process.send_signal(signal.SIGINT)
        assert end(process, 1.5)[0] == 130
    assert not (tmp_path / "left").exists()


def test_threads_that_miss_what_was_cleaned_up_say_nothing(tmp_path):
    path = tmp_path / "left"
    body = (
        f"import pathlib, threading, time\npath = pathlib.Path({str(path)!r})\npath.touch()\n"
        "def read():\n  while True: path.read_text()\n"
        "signals.at_sudden_end(lambda: (path.unlink(), time.sleep(0.3)))\n"
        "threading.Thread(target=read, daemon=True).start()"
    )
    with command(f"{body}\n{READY}\n{IN_C}") as process:
        process.send_signal(signal.SIGINT)
        code, said = end(process, 1.5)
    assert code == 130 and said.count("\n") == 1, said


def test_signals_of_a_forked_child_do_not_reach_the_parent():
    body = (
        "import os, time, signal\n"
        "with signals.StopSignals() as stop:\n"
        "  child = os.fork()\n"
        "  if child == 0: time.sleep(60)\n"
        f"  time.sleep(0.3)\n  {READY}\n"
        "  print(os.waitpid(child, 0)[1], stop.received, flush=True)"
    )
    with command(body) as process:
        (child,) = psutil.Process(process.pid).children()
        child.terminate()
        assert process.stdout.readline() == f"{int(signal.SIGTERM)} None\n"
        assert process.wait(10) == 0


def test_without_watch_a_second_signal_has_its_usual_effect():
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert stop.received is None
        signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# Prints whether the main thread has an alternate stack, which handlers of Python run on.
HAS_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
stack = Stack()
assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
print(bool(stack.start) and stack.size > 4096)
"""

# Multiplies matrices while signals come every 0.2 ms, and compares the products bit for bit.
MULTIPLIES = """
import os, signal, time
os.environ["XLA_FLAGS"] = ""
from rlstack.programs.build import xla
xla.configure(convolutions=False)
import jax, numpy as np
a, b = np.random.default_rng(0).standard_normal((2, 64, 2048), np.float32)
product = jax.jit(lambda a, b: a @ b.T)
expected = np.array(product(a, b))
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
end = time.monotonic() + 6.0
while time.monotonic() < end:
    for _ in range(20):
        assert np.array_equal(product(a, b), expected)
signal.setitimer(signal.ITIMER_REAL, 0.0)
print("equal")
"""


def output(*body):
    """Returns what code prints in a process, which must succeed."""
    code = ["from rlstack.programs.session import signals", *body]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_handlers_have_a_stack_of_their_own():
    assert output(HAS_STACK) == "False"
    assert output("signals.watch('train')", HAS_STACK) == "True"
    assert output("signals.StopSignals().__enter__()", HAS_STACK) == "True"


def test_handlers_of_a_node_have_a_stack_of_their_own(tmp_path):
    script = tmp_path / "node.py"
    script.write_text(HAS_STACK)
    command_line = [
        sys.executable,
        "-m",
        "rlstack.programs.program.launch.launchpad.titled",
        "a title",
        str(script),
    ]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=50)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


@pytest.mark.slow
@pytest.mark.chosen
def test_signals_leave_products_and_the_heap_as_they_are():
    assert output("signals.watch('train')", MULTIPLIES) == "equal"
