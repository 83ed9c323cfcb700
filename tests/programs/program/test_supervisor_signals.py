"""The supervisor of one node: signals from elsewhere, and a node that is silent."""

import signal
import subprocess
import time

import pytest

from rlstack.programs.program import supervisor as supervisor_module
from rlstack.programs.program.supervisor import SIGNALLED
from tests.programs.program.supervised import ENDS, SAYS, SIGNS, TELLS, WAITS

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ending():
    """The signals with which supervisors tell this process that the program ends."""
    received = []
    before = signal.signal(supervisor_module.ENDING, lambda number, _: received.append(number))
    yield received
    signal.signal(supervisor_module.ENDING, before)


def send_from_elsewhere(number, pid):
    subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)


SAVES = (
    "signal.signal(signal.SIGTERM, lambda *_: (print('saves', flush=True), time.sleep(2.0),\n"
    "    print('saved', flush=True), os._exit(0)))\n"
)


def wait_until(condition):
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "max_restarts", [0, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.chosen])]
)
def test_a_signal_from_elsewhere_is_recorded_and_the_parent_told_while_the_child_saves(
    start, ending, max_restarts
):
    supervisor = start(SAVES + WAITS, max_restarts=max_restarts)
    supervisor.wait_for_output()
    send_from_elsewhere(signal.SIGTERM, supervisor.process.pid)
    supervisor.wait_for_output(2)
    wait_until(lambda: ending)
    assert supervisor.out.read_text().splitlines()[1:] == ["saves"]  # not yet saved
    (failure,) = supervisor.failures()
    assert failure["reason"].startswith("its supervisor got a signal")
    assert not failure["restarts"]
    assert supervisor.wait(5.0) == SIGNALLED
    assert supervisor.out.read_text().splitlines()[1:] == ["saves", "saved"]
    assert len(ending) == len(supervisor.failures()) == 1


def test_a_signal_to_a_needed_child_alone_is_told_to_the_parent_while_it_saves(start, ending):
    busy = "print('busy', flush=True)\nwhile True: time.sleep(60)"
    code = SIGNS + "signal.signal(signal.SIGTERM, lambda *_: None)\n" + SAYS + busy
    supervisor = start(code, max_restarts=0, grace=1.0)
    pid = int(supervisor.wait_for_output(2)[0].split()[1])
    begun = time.monotonic()
    send_from_elsewhere(signal.SIGTERM, pid)
    wait_until(lambda: ending)
    (failure,) = supervisor.failures()
    assert failure["reason"].startswith("it was told to end by a signal")
    assert supervisor.wait(5.0) == SIGNALLED
    assert time.monotonic() - begun < 4.0  # the grace; the child does not heed it
    assert len(supervisor.failures()) == 1


def test_a_signal_to_a_child_that_may_be_restarted_only_restarts_it(start, ending):
    code = (
        SIGNS + TELLS + "from rlstack.programs.program.supervisor import STOPPED\n"
        "signal.signal(signal.SIGTERM, lambda *_: (tell(STOPPED), os._exit(0)))\n"
        "if os.environ['RLSTACK_INCARNATION'] == '1': tell(End(ordered=True)); os._exit(0)\n"
    )
    supervisor = start(code + WAITS, max_restarts=1)
    send_from_elsewhere(signal.SIGTERM, int(supervisor.wait_for_output()[0].split()[1]))
    assert supervisor.wait() == 0
    assert [f["restarts"] for f in supervisor.failures()] == [True]
    assert ending == []


@pytest.mark.slow
@pytest.mark.chosen
def test_a_child_that_is_silent_is_killed_and_started_again(start):
    first = "if os.environ['RLSTACK_INCARNATION'] == '0': os.kill(os.getpid(), signal.SIGSTOP)\n"
    supervisor = start(SIGNS + SAYS + first + ENDS, silence=3.0)
    assert supervisor.wait() == 0
    (failure,) = supervisor.failures()
    assert failure["reason"] == "it gave no sign of life for 3 s: it hung, or was stopped"
    assert failure["restarts"]


@pytest.mark.slow
@pytest.mark.chosen
def test_a_child_that_works_for_long_is_not_silent(start):
    supervisor = start(
        SIGNS + SAYS + "import ctypes; ctypes.CDLL(None).sleep(5)\n" + ENDS, silence=3.0
    )
    assert supervisor.wait() == 0
    assert supervisor.failures() == []
