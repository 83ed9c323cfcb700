"""Which failure is said to have ended a program, and what a restart prints."""

import threading
from types import SimpleNamespace

import pytest

from rlstack.learning.learner import NonFiniteError
from rlstack.programs.program.failures import (
    cause,
    is_accident,
    read_failures,
    restart_line,
    since_restart,
)
from rlstack.programs.program.heartbeat import Heartbeat
from rlstack.programs.program.stopping import NodeLostError, end_of
from rlstack.programs.program.supervisor import End, record_failure
from rlstack.programs.run import launch
from rlstack.replay import ReplayClosedError
from rlstack.rpc import UnavailableError
from rlstack.storage.checkpoint import CheckpointWriteError


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "failures.jsonl"

    def add(node, error, **fields):
        fields = {"restarts": False, **fields}
        record_failure(str(path), node=node, end=end_of(error), incarnation=0, **fields)
        found = cause(read_failures(path))
        return None if found is None else (found["node"], found["reason"].split(":")[0])

    add.path = path
    return add


def test_a_failure_that_was_recovered_ended_nothing(record):
    assert record("actor/0", ArithmeticError("recovered"), restarts=True) is None
    assert record("learner", FloatingPointError("nan")) == ("learner", "FloatingPointError")


def test_a_node_that_failed_because_another_had_is_not_to_blame(record):
    """The learner closes the replay before it has recorded its own error."""
    assert record("actor/0", ReplayClosedError("closed")) == ("actor/0", "ReplayClosedError")
    assert record("actor/1", UnavailableError("gone"))[0] == "actor/0"
    nan = NonFiniteError("nan", {}, None)
    assert record("learner", nan, ending=True) == ("learner", "NonFiniteError")
    assert record("evaluator", ValueError("later"))[0] == "evaluator"


def test_what_failed_before_the_whole_program_started_again_does_not_count(record):
    killed = End(reason="killed by SIGKILL", passing=True)
    record_failure(str(record.path), node="learner", end=killed, restarts=False)
    (lost,) = failures = read_failures(record.path)
    assert cause(failures) == lost and is_accident(lost)
    record_failure(
        str(record.path), node="learner", end=killed, restarts=True, pause=0.2, program=True
    )
    failures = read_failures(record.path)
    assert cause(failures) is None and since_restart(failures) == []
    assert restart_line(failures[-1]) == "learner: killed by SIGKILL; all nodes restart in 0.2 s"
    assert record("learner", FloatingPointError("nan")) == ("learner", "FloatingPointError")
    assert not is_accident(cause(read_failures(record.path)))


def test_a_node_that_failed_again_and_again_is_no_accident(record):
    killed = End(reason="killed by SIGKILL", passing=True)
    record_failure(str(record.path), node="actor/0", end=killed, restarts=False, incarnation=10)
    assert not is_accident(cause(read_failures(record.path)))


def test_a_node_that_is_lost_is_named_though_another_reports_it(record):
    lost = NodeLostError("coordinator", "it has not answered learner for 30 s")
    assert record("learner", lost) == ("coordinator", "NodeLostError")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device; free space there. The log file is", "metrics.jsonl"),
        CheckpointWriteError("could not write\na checkpoint. Free space there (df)."),
    ],
)
def test_a_full_disk_is_told_without_a_traceback(record, monkeypatch, tmp_path, error):
    try:
        raise error from ValueError("of a library")
    except OSError as raised:
        record("learner", raised)
    monkeypatch.setattr(launch, "_log_of", lambda *_: tmp_path / "none")
    directory = SimpleNamespace(failures=record.path, node_logs=tmp_path / "logs")
    why = launch._why(SimpleNamespace(directory=directory))
    kind = type(error).__name__
    assert why.startswith(f"node learner failed: {kind}: ") and "ree space there" in why
    assert why.endswith(f"is in {tmp_path / 'logs'}.") and why.count(kind) == 1


def test_other_errors_are_told_with_their_traceback(record, monkeypatch, tmp_path):
    try:
        raise OSError(2, "No such file")
    except OSError as error:
        record("learner", error)
    monkeypatch.setattr(launch, "_log_of", lambda *_: tmp_path / "none")
    directory = SimpleNamespace(failures=record.path, node_logs=tmp_path / "logs")
    why = launch._why(SimpleNamespace(directory=directory))
    assert "Traceback (most recent" in why and "test_failures.py" in why


def test_torn_and_foreign_lines_are_skipped(record):
    record("actor/0", ValueError("one"), restarts=True)
    with open(record.path, "ab") as file:
        file.write(b'[1, 2]\n"text"\n{"node": 1}\n{"node": "act')
    assert record("actor/1", ValueError("two"))[0] == "actor/1"
    with open(record.path, "ab") as file:
        file.write(b'{"node": "actor/2", "reason": "Unterminat')
    assert [f["node"] for f in read_failures(record.path)] == ["actor/0", "actor/1"]


def test_a_missing_record_has_no_failures(tmp_path):
    assert read_failures(tmp_path / "none") == []
    assert cause([]) is None


def test_a_restart_is_one_line_with_its_reason(record):
    record("actor/0", ValueError("first line\nsecond"), restarts=True, pause=0.4)
    (failure,) = read_failures(record.path)
    assert restart_line(failure) == "actor/0: ValueError: first line; restarts in 0.4 s"


class _Coordinator:
    """Counts signs of life; the first gets no answer."""

    def __init__(self, heard):
        self.heard = heard

    def __copy__(self):
        return _Coordinator(self.heard)

    def call(self, method, args, timeout):
        self.heard.append((method, args))
        if len(self.heard) == 1:
            raise UnavailableError("no answer")

    def close(self):
        pass


@pytest.mark.timeout(30)
def test_a_busy_node_shows_signs_of_life(monkeypatch):
    monkeypatch.setattr("rlstack.programs.session.timing.HEARTBEAT", 0.01)
    heard, before = [], threading.active_count()
    heartbeat = Heartbeat(_Coordinator(heard), "learner")
    while len(heard) < 3:
        pass
    heartbeat.close()
    assert set(heard) == {("alive", ("learner",))}
    assert threading.active_count() == before
