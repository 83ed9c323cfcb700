"""The supervisor of one node: restarts, signals, and what it records."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from programs import timing
from programs.nodes import supervisor as supervisor_module
from programs.nodes.supervisor import RestartPolicy

pytestmark = pytest.mark.timeout(60)


def policy(max_restarts):
    return RestartPolicy(max_restarts, *timing.RESTARTS)


class Supervised:
    """A supervisor with a child that runs Python code."""

    def __init__(self, tmp_path, code, max_restarts=3, grace=5.0):
        self.record, self.out = tmp_path / "failures.jsonl", tmp_path / "out"
        child = [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"]
        command = [sys.executable, "-S", supervisor_module.__file__, str(self.record), "actor/7"]
        times = map(str, (max_restarts, grace, *timing.RESTARTS))
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(
                [*command, *times, *child],
                stdout=out,
                stderr=subprocess.PIPE,
            )

    def wait(self, timeout=20.0):
        self.stderr = self.process.communicate(timeout=timeout)[1].decode()
        return self.process.returncode

    def wait_for_output(self, lines=1):
        until = time.monotonic() + 20.0
        while (text := self.out.read_text()).count("\n") < lines:  # a line may arrive in parts
            assert time.monotonic() < until, text
            time.sleep(0.01)
        return text.splitlines()

    def failures(self):
        return [json.loads(line) for line in self.record.open()] if self.record.exists() else []


@pytest.fixture
def start(tmp_path):
    made = []

    def start(*args, **kwargs):
        made.append(Supervised(tmp_path, *args, **kwargs))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        one.process.stderr.close()


SAYS = "print(os.environ['RLSTACK_INCARNATION'], os.getpid(), flush=True)\n"
WAITS = SAYS + "time.sleep(60)"


def gone(pid, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_pauses_double_up_to_a_limit_and_tries_end():
    restarts = policy(8)
    pauses = [restarts.failed(1.0) for _ in range(9)]
    assert pauses[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert pauses[6:] == [10.0, 10.0, None]
    assert restarts.failures == 9


def test_who_lived_long_is_forgiven_earlier_failures():
    restarts = policy(2)
    assert [restarts.failed(1.0), restarts.failed(1.0)] == pytest.approx([0.2, 0.4])
    assert [restarts.failed(61.0) for _ in range(5)] == [0.2] * 5
    assert restarts.failures == 7
    assert [restarts.failed(1.0), restarts.failed(1.0)] == [0.4, None]


def test_nothing_is_tried_again_where_no_restart_is_allowed():
    assert policy(0).failed(1.0) is None
    assert policy(0).failed(100.0) is None


def test_a_success_ends_it_without_a_record(start):
    supervisor = start(SAYS)
    assert supervisor.wait() == 0
    assert len(supervisor.wait_for_output()) == 1
    assert supervisor.failures() == []


def test_a_failing_child_is_started_again_until_the_limit(start):
    begun = time.time()
    supervisor = start(SAYS + "sys.exit(5)", max_restarts=2)
    assert supervisor.wait() == 5
    assert time.time() - begun >= 0.6  # two pauses
    assert [line.split()[0] for line in supervisor.wait_for_output(3)] == ["0", "1", "2"]
    failures = supervisor.failures()
    assert [f["restarts"] for f in failures] == [True, True, False]
    assert [f["incarnation"] for f in failures] == [0, 1, 2]
    assert {(f["node"], f["reason"]) for f in failures} == {("actor/7", "exit code 5")}
    assert all(begun <= f["time"] <= time.time() for f in failures)
    assert "after 2 restarts" in supervisor.stderr


def test_a_killed_child_is_started_again_and_may_then_succeed(start):
    code = (
        SAYS + "if os.environ['RLSTACK_INCARNATION'] == '0': os.kill(os.getpid(), signal.SIGKILL)"
    )
    supervisor = start(code)
    assert supervisor.wait() == 0
    assert [(f["reason"], f["restarts"]) for f in supervisor.failures()] == [
        ("killed by SIGKILL", True)
    ]


def test_a_child_that_was_killed_for_good_gives_the_shells_code(start):
    supervisor = start("os.kill(os.getpid(), signal.SIGKILL)", max_restarts=0)
    assert supervisor.wait() == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_child_which_is_not_started_again(start, number):
    code = f"signal.signal({int(number)}, lambda *_: (print('bye', flush=True), sys.exit(3)))\n"
    supervisor = start(code + WAITS)
    supervisor.wait_for_output()
    supervisor.process.send_signal(number)
    supervisor.wait(5.0)
    lines = supervisor.wait_for_output(2)
    assert lines[1] == "bye"
    assert len(lines) == 2
    assert supervisor.failures() == []


def test_a_signal_during_the_pause_before_a_restart_ends_it(start):
    supervisor = start("sys.exit(1)", max_restarts=20)
    until = time.monotonic() + 20.0
    while len(supervisor.failures()) < 4:  # the next pause takes 1.6 s
        assert time.monotonic() < until
        time.sleep(0.01)
    begun = time.monotonic()
    supervisor.process.terminate()
    assert supervisor.wait() == 0
    assert time.monotonic() - begun < 1.0
    assert len(supervisor.failures()) == 4


def test_a_child_that_does_not_heed_the_signal_is_killed_after_the_grace(start):
    supervisor = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS, grace=0.5)
    pid = int(supervisor.wait_for_output()[0].split()[1])
    begun = time.monotonic()
    supervisor.process.terminate()
    supervisor.wait(5.0)
    assert 0.4 < time.monotonic() - begun < 3.0
    assert gone(pid, 1.0)


def test_a_second_signal_does_not_lengthen_the_grace(start):
    supervisor = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS, grace=1.0)
    supervisor.wait_for_output()
    begun = time.monotonic()
    for _ in range(4):
        supervisor.process.terminate()
        time.sleep(0.3)
    supervisor.wait(5.0)
    assert time.monotonic() - begun < 2.5


def test_the_child_goes_when_its_supervisor_is_killed(start):
    supervisor = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS)
    pid = int(supervisor.wait_for_output()[0].split()[1])
    supervisor.process.kill()
    assert gone(pid, 5.0)


def test_lines_of_many_writers_do_not_mix(tmp_path):
    path = tmp_path / "record"
    code = (
        "import sys; from programs.nodes.supervisor import record_failure\n"
        "for i in range(200): record_failure(sys.argv[1], node=sys.argv[2], text='x' * 500)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-S", "-c", code, str(path), str(n)], cwd=os.getcwd())
        for n in range(3)
    ]
    assert [w.wait(30) for w in writers] == [0, 0, 0]
    lines = [json.loads(line) for line in path.open()]
    assert sorted(line["node"] for line in lines) == ["0"] * 200 + ["1"] * 200 + ["2"] * 200
