"""The supervisor of one node: restarts, signals, and what it records."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlstack.programs.program.failures import release_record, reserve_record
from rlstack.programs.program.launch.launchpad import supervised
from rlstack.programs.program.supervisor import (
    PARENT,
    SIGNALLED,
    End,
    RestartPolicy,
    describe,
    record_failure,
)
from rlstack.programs.session import module_path, timing
from tests.programs.program.supervised import ENDS, SAYS, TELLS, WAITS

pytestmark = pytest.mark.timeout(60)


def policy(max_restarts):
    return RestartPolicy(max_restarts, *timing.RESTARTS)


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
    supervisor = start(SAYS + ENDS)
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
    code = "if os.environ['RLSTACK_INCARNATION'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
    supervisor = start(SAYS + code + ENDS)
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
    assert supervisor.wait(5.0) == SIGNALLED
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
    assert supervisor.wait() == SIGNALLED
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
        "import sys; from rlstack.programs.program.supervisor import End, record_failure\n"
        "end = End(reason='x' * 500)\n"
        "for i in range(200): record_failure(sys.argv[1], node=sys.argv[2], end=end)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-S", "-c", code, str(path), str(n)], cwd=os.getcwd())
        for n in range(3)
    ]
    assert [w.wait(30) for w in writers] == [0, 0, 0]
    lines = [json.loads(line) for line in path.open()]
    assert sorted(line["node"] for line in lines) == ["0"] * 200 + ["1"] * 200 + ["2"] * 200


def test_an_end_that_nobody_ordered_is_a_failure_whatever_its_code(start):
    supervisor = start(SAYS + "sys.exit(0)", max_restarts=1)
    assert supervisor.wait() == 1
    failures = supervisor.failures()
    assert [f["restarts"] for f in failures] == [True, False]
    assert "exit code 0 before the program did" in failures[0]["reason"]


def test_a_signal_to_the_child_alone_is_a_failure_also_if_it_ends_cleanly(start):
    """As when a daemon that watches memory sends SIGTERM: Launchpad's handler ends the node."""
    code = (
        "from rlstack.programs.program.supervisor import STOPPED, tell\n"
        "signal.signal(signal.SIGTERM, lambda *_: (tell(STOPPED), os._exit(0)))\n"
    )
    supervisor = start(code + WAITS, max_restarts=0)
    os.kill(int(supervisor.wait_for_output()[0].split()[1]), signal.SIGTERM)
    assert supervisor.wait(5.0) == 1
    (failure,) = supervisor.failures()
    assert "that the program did not send" in failure["reason"]


def told(reason="ValueError: no", ran=0.0, **fields):
    return End(reason=reason, traceback="Traceback ...", ran_seconds=ran, **fields)


def test_what_the_child_tells_is_recorded_once(start):
    end = told("ValueError: no", node="coordinator", secondary=True)
    supervisor = start(TELLS + f"tell({end!r})\nsys.exit(1)", max_restarts=0)
    assert supervisor.wait() == 1
    (failure,) = supervisor.failures()
    assert (failure["node"], failure["reported_by"]) == ("coordinator", "actor/7")
    assert (failure["reason"], failure["traceback"]) == ("ValueError: no", "Traceback ...")
    assert failure["secondary"]


def test_an_error_that_comes_back_at_once_with_the_same_text_is_final():
    restarts = policy(10)
    assert restarts.failed(5.0, told("ValueError: <f at 0x7f01>", ran=3600.0)) == 0.2
    assert restarts.failed(5.0, told("ValueError: <f at 0x7f02>", ran=1.0)) is None


def test_errors_of_one_kind_are_the_same_error_whatever_they_say():
    restarts = policy(10)
    assert restarts.failed(5.0, told("NonFiniteError: update 9", kind="NonFiniteError")) == 0.2
    assert restarts.failed(5.0, told("NonFiniteError: update 12", kind="NonFiniteError")) is None


@pytest.mark.parametrize(
    "second",
    [told("ValueError: other"), told(ran=30.0), told(passing=True), End()],
    ids=["another text", "after much work", "a host is away", "killed"],
)
def test_other_errors_are_tried_again(second):
    restarts = policy(10)
    assert restarts.failed(5.0, told()) == pytest.approx(0.2)
    assert restarts.failed(5.0, second) == pytest.approx(0.4)


def test_an_error_before_a_program_ends_is_recorded_although_a_signal_came(start):
    """The learner may still save the inputs of a failed update when another node's failure ends
    the program."""
    code = (
        f"def fail(*_): tell({told('NonFiniteError: nan')!r}); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, fail)\n"
    )
    supervisor = start(TELLS + code + WAITS)
    supervisor.wait_for_output()
    supervisor.process.terminate()
    assert supervisor.wait() == SIGNALLED
    (failure,) = supervisor.failures()
    assert (failure["reason"], failure["ending"]) == ("NonFiniteError: nan", True)
    assert not failure["restarts"]


def test_all_signals_have_a_name(start):
    number = signal.SIGRTMIN + 3
    assert describe(-number) == f"killed by signal {int(number)}"
    supervisor = start(f"os.kill(os.getpid(), {int(number)})", max_restarts=0)
    assert supervisor.wait() == 128 + number
    assert supervisor.failures()[0]["reason"] == f"killed by signal {int(number)}"


def test_a_parent_that_was_gone_before_it_looked_is_noticed(start):
    gone_parent = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone_parent.wait()
    begun = time.monotonic()
    supervisor = start(WAITS, env={PARENT: str(gone_parent.pid)})
    assert supervisor.wait() == -signal.SIGTERM
    assert time.monotonic() - begun < 5.0
    assert supervisor.out.read_text() == ""


def test_a_full_disk_stops_neither_restarts_nor_the_record(tmp_path):
    """The record is on a small file system of its own, which is full."""
    code = (
        "import os, signal\n"
        "n = os.environ['RLSTACK_INCARNATION']\n"
        "from rlstack.programs.program.supervisor import End, tell\n"
        "tell(End(reason='failure ' + n, traceback='x' * 5000) if n < '2' else End(ordered=True))"
    )
    times = " ".join(map(str, timing.RESTARTS))
    script = f"""
        mount -t tmpfs -o size=256k tmpfs {tmp_path} && cd {os.getcwd()} || exit 99
        {sys.executable} -c 'from rlstack.programs.program import failures as s
s.reserve_record("{tmp_path}/record")'
        cat /dev/zero > {tmp_path}/filler
        {sys.executable} -S {supervised.__file__} {tmp_path}/record actor/7 5 0 3 {times} \
            {sys.executable} -S -c "$CODE" > {tmp_path}/log 2>&1
        echo "code $?"; cat {tmp_path}/record
    """
    command = ["unshare", "-rm", "sh", "-c", script]
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "CODE": code, "PYTHONPATH": module_path.for_children()},
    )
    code, *lines = done.stdout.splitlines()
    assert code == "code 0", done.stdout + done.stderr
    assert [json.loads(line)["reason"] for line in lines] == ["failure 0", "failure 1"]


def test_a_failure_that_cannot_be_recorded_is_printed(tmp_path, capfd):
    record_failure(str(tmp_path / "none" / "record"), node="actor/7", end=told())
    assert "actor/7: ValueError: no (not recorded" in capfd.readouterr().err


def test_a_line_after_a_torn_one_is_whole(tmp_path):
    path = tmp_path / "record"
    path.write_bytes(b'{"node": "act')
    record_failure(str(path), node="actor/7", end=told(), restarts=False)
    assert json.loads(path.read_text().splitlines()[1])["node"] == "actor/7"


def test_a_record_without_failures_is_removed(tmp_path):
    path = tmp_path / "record"
    reserve_record(str(path))
    assert path.stat().st_size == 0
    release_record(str(path))
    assert not path.exists()
    reserve_record(str(path))
    record_failure(str(path), node="actor/7", end=told())
    release_record(str(path))
    assert len(path.read_text().splitlines()) == 1
    assert path.stat().st_blocks * 512 < 1 << 16
