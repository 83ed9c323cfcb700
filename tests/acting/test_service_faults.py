"""The inference service: restarted clients, wrong requests, failures and closing."""

import threading
import time

import numpy as np
import pytest

from rlstack import rpc
from rlstack.acting.inference import Inference
from rlstack.acting.inference_client import InferenceClient
from rlstack.acting.inference_service import InferenceError, InferenceService
from rlstack.acting.request_queue import ServiceClosedError, StaleIncarnationError
from rlstack.configs.acting import ServiceConfig
from rlstack.rpc import RemoteObject, StoppedError, codec
from tests.acting.services import (
    PATIENT,
    Call,
    Fragile,
    Source,
    ask,
    counts,
    queued,
    started,
    steps,
)
from tests.agent_cases import MID

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_thread_left")]


# Incarnations and ownership.


def test_an_actor_that_comes_back_starts_afresh_and_alone(serve):
    service = serve()
    for _ in range(3):
        ask(service, "a", [0, 2])
    assert counts(ask(service, "a", [2, 0], incarnation=1)) == [1, 1]
    with pytest.raises(StaleIncarnationError, match=r"must call as incarnation 1, .* got 0"):
        ask(service, "a", [0], incarnation=0)
    assert counts(ask(service, "a", [0], incarnation=1)) == [2]
    # Rows that the client no longer uses are free, with a reset state.
    ask(service, "a", [5], incarnation=2)
    call = Call(ask, service, "c", [2])
    queued(service, 1)
    ask(service, "a", [5], incarnation=2)
    assert counts(call.result()) == [1]


def test_the_service_numbers_incarnations_without_a_clock(serve):
    service = serve()
    assert [service.next_incarnation("a") for _ in range(2)] == [0, 1]
    assert service.next_incarnation("b") == 0
    ask(service, "a", [0], incarnation=7)
    later = service.next_incarnation("a")
    assert later == 8
    assert counts(ask(service, "a", [0], incarnation=later)) == [1]
    with pytest.raises(StaleIncarnationError):
        ask(service, "a", [0], incarnation=7)


def test_a_new_incarnation_resets_its_own_rows_only(serve):
    service = serve(ServiceConfig(max_wait_ms=0))
    for _ in range(3):
        ask(service, 0, [0, 1])
        ask(service, 1, [2, 3])
    assert counts(ask(service, 0, [1], incarnation=7)) == [1]
    assert service._inferencer.save()["table"]["count"].tolist() == [0, 1, 3, 3, 0, 0, 0, 0]


def test_what_an_earlier_incarnation_left_in_the_queue_is_refused(serve):
    service = serve()
    ask(service, "absent", [7])
    old = Call(ask, service, "a", [0, 1])
    queued(service, 1)
    new = Call(ask, service, "a", [0, 1], incarnation=1)
    with pytest.raises(StaleIncarnationError, match="'a' has been restarted"):
        old.result()
    ask(service, "absent", [7])
    assert counts(new.result()) == [1, 1]
    # The refused request no longer waits, so the service waits for the client as before.
    call = Call(ask, service, "absent", [7])
    queued(service, 1)
    ask(service, "a", [0], incarnation=1)
    call.result()


def test_what_an_earlier_incarnation_still_has_acted_on_does_not_reach_the_next(serve):
    source = Source()
    service = serve(source=source)
    ask(service, "a", [0])
    source.gate.clear()
    old = Call(ask, service, "a", [0])
    queued(service, 0)
    while source.calls < 2:  # until the worker acts on it
        time.sleep(0.001)
    new = Call(ask, service, "a", [0], incarnation=1)
    queued(service, 1)
    source.gate.set()
    assert counts(old.result()) == [2] and counts(new.result()) == [1]


def test_an_environment_has_one_client_and_one_question_at_a_time(serve):
    service = serve()
    ask(service, "a", [0, 1])
    with pytest.raises(ValueError, match="got 1 from 'b', but 'a' owns it"):
        ask(service, "b", [2, 1])
    first = Call(ask, service, "c", [2, 3])
    queued(service, 1)
    with pytest.raises(ValueError, match=r"'c' must wait .* got \[3\] while \[2 3\] wait"):
        ask(service, "c", [3])
    other = Call(ask, service, "c", [4])  # a call for another of its environments is allowed
    queued(service, 2)
    ask(service, "a", [0])
    assert counts(first.result()) == [1, 1] and counts(other.result()) == [1]


# Failures.


@pytest.mark.parametrize(
    ("ids", "timestep", "message"),
    [
        ([0, 8], steps([MID] * 2), r"distinct and in \[0, 8\); got \[0 8\]"),
        ([-1, 0], steps([MID] * 2), "distinct and in"),
        ([3, 1, 3], steps([MID] * 3), "distinct and in"),
        ([0, 1], steps([MID] * 3), r"one for each of the 3 rows .* got int64 \[2\]"),
        ([0.0], steps([MID]), "must be integers"),
        ([], steps([]), "at least one"),
        ([0], steps([MID], np.zeros((1, 4), np.int32)), r"\.observation\['seen'\] must be int32 "),
        ([0], steps([MID], np.zeros((1, 3))), r"must be int32 \[1, 3\]; got float64 \[1, 3\]"),
        ([0], steps([MID])._replace(observation=np.zeros(1)), "must have the structure"),
        (None, steps([MID] * 3), r"got int32 \[8\]"),
    ],
)
def test_a_wrong_request_is_refused_and_harms_nobody(serve, ids, timestep, message):
    service = serve()
    ask(service, "good", [7])
    call = Call(ask, service, "late", [6])
    queued(service, 1)
    with pytest.raises(ValueError, match=message):
        service.inference("bad", 0, None if ids is None else np.array(ids), timestep)
    assert counts(ask(service, "good", [7])) == [2] and counts(call.result()) == [1]


def test_a_failure_reaches_every_caller_of_its_batch_and_nobody_else(serve):
    service = serve(agent=Fragile())
    assert counts(ask(service, "a", [0])) == [1]
    good = Call(ask, service, "b", [1])
    queued(service, 1)
    poison = steps([MID], np.full((1, 3), -1, np.int32))
    bad = Call(service.inference, "a", 0, np.array([0]), poison)
    for call in (good, bad):
        with pytest.raises(InferenceError, match="poisoned observation") as caught:
            call.result()
        assert "batch of 2 requests" in str(caught.value) and "Traceback" in str(caught.value)
    assert good.error is not bad.error
    # State and key are as before the failed batch.
    again = Call(ask, service, "b", [1])
    queued(service, 1)
    assert counts(ask(service, "a", [0])) == [2] and counts(again.result()) == [1]


def test_a_failure_seen_late_leaves_no_trace(serve, monkeypatch):
    service = serve()
    ask(service, "a", [0])

    def broken(*arguments):
        raise RuntimeError("the result never came")

    with monkeypatch.context() as patch:  # as if JAX computed asynchronously
        patch.setattr("rlstack.acting.packing.Packing.unpack", broken)
        with pytest.raises(InferenceError, match="the result never came"):
            ask(service, "a", [0])
    assert counts(ask(service, "a", [0])) == [2]


def test_a_failing_source_of_params_is_told_and_forgotten(serve):
    source = Source()
    service = serve(source=source)
    source.published = None
    with pytest.raises(InferenceError, match="TypeError"):
        ask(service, "a", [0])
    source.published = 3, 30
    answer = ask(service, "a", [0])
    assert counts(answer) == [31] and answer.params_version.tolist() == [3]


def test_nobody_waits_for_ever(serve):
    source = Source()
    service = serve(ServiceConfig(timeout_s=0.1, live_s=1000), source=source)
    ask(service, "absent", [7])
    source.gate.clear()
    acted_on = Call(ask, service, "a", [0])  # the worker acts on it
    while source.calls < 2:
        time.sleep(0.001)
    waiting = Call(ask, service, "b", [1])
    with pytest.raises(TimeoutError, match=r"within 0.1 s; .* 'a' is being acted on"):
        acted_on.result()
    with pytest.raises(TimeoutError, match="'b' waits in the queue with 0 others"):
        waiting.result()
    source.gate.set()
    assert counts(ask(service, "b", [1])) == [1]  # the withdrawn request was not acted on


def test_a_caller_need_not_wait(serve):
    service = serve(PATIENT)
    ask(service, "absent", [7])
    ids = np.array([0])
    answer = service.submit("a", 0, ids, steps([MID]))
    assert not answer.done()
    with pytest.raises(ValueError, match="'a' must wait"):
        service.submit("a", 0, ids, steps([MID]))
    last = service.submit("absent", 0, np.array([7]), steps([MID]))  # it acts for both
    assert counts(answer.result(0)) == [1] and counts(last.result(0)) == [2]
    first = service.submit("a", 0, ids, steps([MID]))
    service.close()
    with pytest.raises(ServiceClosedError):
        first.result(0)


def test_close_wakes_all_callers_and_leaves_no_thread():
    source = Source()
    service = started(ServiceConfig(live_s=1000), source)
    ask(service, "absent", [7])
    source.gate.clear()
    calls = [Call(ask, service, 0, [0])]  # the worker acts on it
    while source.calls < 2:
        time.sleep(0.001)
    calls += [Call(ask, service, i, [i]) for i in (1, 2, 3)]
    queued(service, 3)
    with pytest.raises(TimeoutError, match=r"the present batch must end within 0.01 s"):
        service.close(timeout=0.01)
    for call in calls:  # although the batch has not ended
        with pytest.raises(ServiceClosedError):
            call.result()
    source.gate.set()
    service.close()
    with pytest.raises(ServiceClosedError, match="the service is closed"):
        ask(service, 0, [0])


def test_close_lets_a_caller_that_acts_for_others_finish():
    source = Source()
    service = started(PATIENT, source)
    ask(service, 0, [0])
    ask_other = Call(ask, service, 1, [1])
    queued(service, 1)
    source.gate.clear()
    last = Call(ask, service, 0, [0])
    while source.calls < 2:
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match="the present batch must end"):
        service.close(timeout=0.01)
    with pytest.raises(ServiceClosedError):
        ask_other.result()
    source.gate.set()
    service.close()
    with pytest.raises(ServiceClosedError):  # like all the others of its batch
        last.result()


def test_an_interrupted_caller_tells_those_it_acted_for(serve):
    class Interrupted(Source):
        def get_params(self, newer_than=-1):
            if self.calls == 1:
                self.calls += 1
                raise KeyboardInterrupt
            return super().get_params(newer_than)

    service = serve(source=Interrupted())
    ask(service, 0, [0])
    other = Call(ask, service, 1, [1])
    queued(service, 1)
    with pytest.raises(KeyboardInterrupt):
        ask(service, 0, [0])
    with pytest.raises(InferenceError, match="KeyboardInterrupt"):
        other.result()
    other = Call(ask, service, 1, [1])
    queued(service, 1)
    assert counts(ask(service, 0, [0])) == [2] and counts(other.result()) == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_batch": 0}, "max_batch must be at least 1; got 0"),
        ({"max_wait_ms": -1}, "max_wait_ms must be at least 0"),
        ({"live_s": float("nan")}, "live_s must be at least 0"),
        ({"timeout_s": 0}, "timeout_s must be positive; got 0"),
        ({"sync_interval": 0}, "sync_interval must be at least 1"),
        ({"batch_sizes": (4, 4)}, r"batch_sizes must be positive, in growing order; got \(4, 4\)"),
        ({"batch_sizes": (0, 4)}, "batch_sizes must be positive, in growing order"),
    ],
)
def test_configs_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ServiceConfig(**wrong)


# The first batch, which is compiled and may take long.


def test_a_first_batch_that_is_compiled_for_long_is_no_fault(serve):
    source = Source()
    service = serve(ServiceConfig(timeout_s=0.2, live_s=1000), source=source)
    source.gate.clear()  # as if XLA compiled
    first = Call(ask, service, "a", [0])
    while source.calls < 1:
        time.sleep(0.001)
    behind = Call(ask, service, "b", [1])
    time.sleep(0.7)
    assert first.is_alive() and behind.is_alive()
    source.gate.set()
    assert counts(first.result()) == counts(behind.result()) == [1]


@pytest.mark.launchpad
def test_a_call_that_is_sent_again_gets_the_answer_of_the_first(serve):
    pytest.importorskip("courier")
    codec.register(Inference)
    source, stopped = Source(), threading.Event()
    service = serve(source=source)
    with rpc.serve(service) as server:
        node = RemoteObject(server.address, InferenceService, name="inferencer", timeout=0.2)
        client = InferenceClient(node, "a", 0, stopped.is_set, timeout=0.5)
        source.gate.clear()
        call = Call(client.inference, np.array([0]), steps([MID]))
        time.sleep(1.2)  # several deadlines of the call, and the whole wait for a lost service
        assert call.is_alive()
        source.gate.set()
        assert counts(call.result()) == [1]
        assert counts(client.inference(np.array([0]), steps([MID]))) == [2]  # it has acted once
        source.gate.clear()
        call = Call(client.inference, np.array([0]), steps([MID]))
        time.sleep(0.3)
        stopped.set()
        with pytest.raises(StoppedError):
            call.result()
        source.gate.set()
        node.close()
