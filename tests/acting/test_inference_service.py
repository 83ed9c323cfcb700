"""The inference service: many callers, one batch; everyone gets what a lone Inferencer gives."""

import threading
import time

import jax
import numpy as np
import pytest

from rlstack.acting.inference_service import (
    InferenceError,
    InferenceService,
    ServiceConfig,
    padded_sizes,
)
from rlstack.acting.inferencer import Inferencer, InferencerConfig
from rlstack.acting.params import ParamsPuller
from rlstack.acting.request_queue import ServiceClosedError, StaleIncarnationError
from rlstack.types import TimeStep
from tests.agent_cases import FIRST, LAST, MID, CountingAgent, assert_close, case, random_timesteps

pytestmark = pytest.mark.timeout(60)
KEY = jax.random.PRNGKey(5)
PATIENT = ServiceConfig(max_wait_ms=20_000, live_s=1000, timeout_s=30)


class Echo(CountingAgent):
    """Answers with what it saw and how many steps it has counted in the environment's episode."""

    def actor_step(self, rng_key, params, timestep, state):
        output, state = super().actor_step(rng_key, params, timestep, state)
        seen = timestep.observation["seen"]
        mixed = seen[:, 0] * 1000 + state["count"]
        return output | {"seen": seen, "mixed": mixed}, state


class Fragile(Echo):
    """Fails at run time where it sees a negative number."""

    def actor_step(self, rng_key, params, timestep, state):
        def check(seen):
            if (seen < 0).any():
                raise ValueError("poisoned observation")
            return seen

        seen = timestep.observation["seen"]
        seen = jax.pure_callback(check, jax.ShapeDtypeStruct(seen.shape, seen.dtype), seen)
        observation = {"seen": seen}
        return super().actor_step(
            rng_key, params, timestep._replace(observation=observation), state
        )


class Source:
    """Publishes whatever it is told, when the gate is open."""

    def __init__(self, version=0, params=0):
        self.published = (version, params)
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def get_params(self, newer_than=-1):
        self.calls += 1
        assert self.gate.wait(20)
        return self.published if self.published[0] > newer_than else None


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert [t for t in threading.enumerate() if t not in before] == []


def started(cfg, source, agent=None, num_envs=8):
    return InferenceService(cfg, Inferencer(cfg, agent or Echo(), source, num_envs, KEY))


@pytest.fixture
def serve():
    """Makes services, and closes them at the end."""
    services = []

    def make(cfg=PATIENT, agent=None, source=None, num_envs=8):
        service = started(cfg, source or Source(), agent or Echo(), num_envs)
        services.append(service)
        return service

    yield make
    for service in services:
        service.close()


def steps(step_types, seen=None):
    step_type = np.array(step_types, np.int32)
    zeros = np.zeros(len(step_type), np.float32)
    seen = np.zeros((len(step_type), 3), np.int32) if seen is None else seen
    return TimeStep(step_type, zeros, zeros + 1, {"seen": seen})


def ask(service, client, ids, step_type=MID, incarnation=0):
    return service.inference(client, incarnation, np.array(ids), steps([step_type] * len(ids)))


class Call(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, function, *args, **kwargs):
        super().__init__()
        self.call = lambda: function(*args, **kwargs)
        self.answer = self.error = None
        self.start()

    def run(self):
        try:
            self.answer = self.call()
        except Exception as error:
            self.error = error

    def result(self):
        self.join(20)
        assert not self.is_alive(), "the caller hangs"
        if self.error is not None:
            raise self.error
        return self.answer


def queued(service, number):
    """Waits until so many requests are queued."""
    end = time.monotonic() + 10
    while service.stats()["service/queued"] != number:
        assert time.monotonic() < end, service.stats()
        time.sleep(0.001)


def counts(answer):
    return answer.agent_output["action"].tolist()


def rows(tree, ids):
    return jax.tree.map(lambda x: x[ids], tree)


# What a lone Inferencer gives.


@pytest.mark.parametrize("name", ["ppo-lstm", "ppo-separate", "dqn"])
def test_everyone_gets_what_a_lone_inferencer_gives(serve, name):
    c = case(name)
    cfg = ServiceConfig(max_batch=6, max_wait_ms=2, batch_sizes=(2, 5))
    service = serve(cfg, c.greedy, Source(params=c.params), num_envs=11)
    lone = Inferencer(InferencerConfig(), c.greedy, Source(params=c.params), 11, KEY)
    shares = [np.array(ids) for ids in ([3, 0, 7], [1], [10, 2], [9, 5, 4, 8, 6])]
    rng = np.random.default_rng(0)
    for t in range(8):
        types = rng.choice([FIRST, MID, LAST], 11, p=[0.2, 0.7, 0.1]) if t else [FIRST] * 11
        timestep = random_timesteps(c.setting.obs_spec, types, seed=t)
        expected = lone.inference(None, timestep)
        shares = [rng.permutation(ids) for ids in shares]
        calls = [
            Call(service.inference, f"actor{i}", 0, ids, rows(timestep, ids))
            for i, ids in enumerate(shares)
        ]
        for ids, call in zip(shares, calls, strict=True):
            answer = call.result()
            assert_close(answer.agent_state, rows(expected.agent_state, ids))
            np.testing.assert_array_equal(
                answer.agent_output.action, expected.agent_output.action[ids]
            )
            if name != "dqn":
                assert_close(answer.agent_output, rows(expected.agent_output, ids))
    assert set(service.sizes_seen) <= {2, 5, 10, 11}


@pytest.mark.parametrize("name", ["ppo-lstm", "ppo-separate", "dqn"])
@pytest.mark.parametrize("ids", [None, [0, 1, 2, 3], [2, 0]])
def test_with_one_client_it_is_the_inferencer_bit_for_bit(serve, name, ids):
    c = case(name)
    service = serve(ServiceConfig(batch_sizes=(2,)), c.agent, Source(params=c.params), num_envs=4)
    lone = Inferencer(InferencerConfig(), c.agent, Source(params=c.params), 4, KEY)
    ids = None if ids is None else np.array(ids)
    for t in range(50):
        types = [FIRST if (t + i) % 7 == 0 else MID for i in range(4 if ids is None else len(ids))]
        timestep = random_timesteps(c.setting.obs_spec, types, seed=t)
        answer = service.inference(0, 0, ids, timestep)
        assert_close(answer, lone.inference(ids, timestep), 0, 0)
    assert_close(service._inferencer.save(), lone.save(), 0, 0)


def test_in_lock_step_many_clients_are_one_inferencer_bit_for_bit(serve):
    c = case("ppo-lstm")
    source = Source(params=c.params)
    service = serve(ServiceConfig(lock_step=True, max_batch=2), c.agent, source, num_envs=8)
    lone = Inferencer(InferencerConfig(), c.agent, source, 8, KEY)
    rng = np.random.default_rng(1)
    for t in range(20):
        timestep = random_timesteps(c.setting.obs_spec, [FIRST if t == 0 else MID] * 8, seed=t)
        expected = lone.inference(None, timestep)
        calls = {}
        for client in rng.permutation(4):
            ids = np.arange(2) + 2 * client
            calls[client] = Call(service.inference, int(client), 0, ids, rows(timestep, ids))
        for client, call in calls.items():
            assert_close(call.result(), rows(expected, np.arange(2) + 2 * client), 0, 0)
    assert service.stats()["service/batches"] == 20


# When a batch goes.


def test_a_batch_goes_when_every_live_client_waits(serve):
    service = serve()
    ask(service, "a", [0])  # alone, it need not wait
    first = Call(ask, service, "b", [1])
    queued(service, 1)
    second = Call(ask, service, "a", [0])
    assert counts(first.result()) == [1] and counts(second.result()) == [2]
    assert service.stats()["service/batches"] == 2


def test_a_batch_goes_when_it_is_full(serve):
    service = serve(ServiceConfig(max_batch=4, max_wait_ms=20_000, live_s=1000))
    ask(service, "absent", [0])
    small = Call(ask, service, "a", [1, 2])
    queued(service, 1)
    large = Call(ask, service, "b", [3, 4])
    small.result(), large.result()
    assert service.stats()["service/batches"] == 2
    waiting = Call(ask, service, "a", [1, 2])
    queued(service, 1)
    # Together they are too many: the first goes alone, and the other waits for its own time.
    larger = Call(ask, service, "b", [3, 4, 5])
    waiting.result()
    queued(service, 1)
    ask(service, "absent", [0])
    larger.result()
    assert service.stats()["service/batches"] == 4


def test_a_batch_goes_when_its_first_request_has_waited_long_enough(serve):
    service = serve(ServiceConfig(max_wait_ms=80, live_s=1000))
    ask(service, "a", [0])
    ask(service, "b", [1])
    start = time.monotonic()
    ask(service, "a", [0])
    assert 0.07 < time.monotonic() - start < 5
    assert service.stats()["service/queue_ms_p99"] > 70


def test_a_client_that_is_gone_is_not_waited_for(serve):
    service = serve(ServiceConfig(max_wait_ms=20_000, live_s=0.05))
    ask(service, "gone", [0])
    start = time.monotonic()
    ask(service, "a", [1])  # waits until the other is gone
    time.sleep(0.1)
    ask(service, "a", [1])
    assert time.monotonic() - start < 5
    assert service.stats()["service/live_clients"] == 1


# Sizes and padding.


def test_padded_sizes_are_few_and_reaches_all():
    assert padded_sizes((), 64, 1000) == [8, 16, 32, 64, 128, 256, 512, 1000]
    assert padded_sizes((), 100, 100) == [8, 16, 32, 64, 100]
    assert padded_sizes((), 256, 5) == [5]
    assert padded_sizes((), 2, 4) == [2, 4]
    assert padded_sizes((3, 48), 48, 96) == [3, 48, 96]


def test_padding_changes_no_row_and_takes_none_for_another(serve):
    service = serve(ServiceConfig(batch_sizes=(3,)), num_envs=4)
    ask(service, "a", [0, 1, 2, 3], FIRST)
    assert counts(ask(service, "a", [1])) == [2]  # two rows of padding
    # Their ids grow by one and are as many as the environments, and yet they are not all in order.
    assert counts(ask(service, "a", [0, 1, 2])) == [2, 3, 2]
    assert service.sizes_seen == (3, 4)
    service = serve(ServiceConfig(batch_sizes=(4,)), num_envs=4)
    assert counts(ask(service, "a", [0, 1, 2])) == [1, 1, 1]
    assert service._inferencer.save()["table"]["count"].tolist() == [1, 1, 1, 0]
    assert counts(ask(service, "a", [3])) == [1]


def test_a_request_above_the_limit_is_served_whole(serve):
    service = serve(ServiceConfig(max_batch=2), num_envs=7)
    assert counts(ask(service, "a", [4, 0, 3])) == [1, 1, 1]
    assert counts(ask(service, "a", range(7))) == [2, 1, 1, 2, 2, 1, 1]
    assert service.sizes_seen == (4, 7) and service.stats()["service/batches"] == 2


def test_answers_are_not_written_to_later(serve):
    service = serve(num_envs=16)
    seen = [np.full((3, 3), i, np.int32) for i in range(5)]
    answers = [service.inference("a", 0, np.arange(3), steps([MID] * 3, x)) for x in seen]
    for i, answer in enumerate(answers):
        assert (answer.agent_output["seen"] == i).all() and counts(answer) == [i + 1] * 3


# Incarnations and ownership.


def test_an_actor_that_comes_back_starts_afresh_and_alone(serve):
    service = serve()
    for _ in range(3):
        ask(service, "a", [0, 2])
    assert counts(ask(service, "a", [2, 0], incarnation=1)) == [1, 1]
    with pytest.raises(StaleIncarnationError, match=r"must call as incarnation 1, .* got 0"):
        ask(service, "a", [0], incarnation=0)
    assert counts(ask(service, "a", [0], incarnation=1)) == [2]
    # Rows that it no longer asks for are free, and fresh.
    ask(service, "a", [5], incarnation=2)
    call = Call(ask, service, "c", [2])
    queued(service, 1)
    ask(service, "a", [5], incarnation=2)
    assert counts(call.result()) == [1]


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
    with pytest.raises(StaleIncarnationError, match="'a' has come back"):
        old.result()
    ask(service, "absent", [7])
    assert counts(new.result()) == [1, 1]
    # What was refused waits no longer: the client is waited for as before.
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
    while source.calls < 2:  # it is being acted on
        time.sleep(0.001)
    new = Call(ask, service, "a", [0], incarnation=1)
    queued(service, 1)
    source.gate.set()
    assert counts(old.result()) == [2] and counts(new.result()) == [1]


def test_an_environment_has_one_client_and_one_question_at_a_time(serve):
    service = serve()
    ask(service, "a", [0, 1])
    with pytest.raises(ValueError, match="got 1 from 'b', but it is of 'a'"):
        ask(service, "b", [2, 1])
    first = Call(ask, service, "c", [2, 3])
    queued(service, 1)
    with pytest.raises(ValueError, match=r"'c' must wait .* got \[3\] while \[2 3\] wait"):
        ask(service, "c", [3])
    other = Call(ask, service, "c", [4])  # another of its environments may ask
    queued(service, 2)
    ask(service, "a", [0])
    assert counts(first.result()) == [1, 1] and counts(other.result()) == [1]


# What goes wrong.


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
    # State and key are as before it.
    again = Call(ask, service, "b", [1])
    queued(service, 1)
    assert counts(ask(service, "a", [0])) == [2] and counts(again.result()) == [1]


def test_a_failure_seen_late_leaves_no_trace(serve, monkeypatch):
    service = serve()
    ask(service, "a", [0])

    def broken(tree):
        raise RuntimeError("the result never came")

    with monkeypatch.context() as patch:  # as where JAX computes asynchronously
        patch.setattr("rlstack.acting.inferencer._to_numpy", broken)
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
    acted_on = Call(ask, service, "a", [0])  # by the worker
    while source.calls < 2:
        time.sleep(0.001)
    waiting = Call(ask, service, "b", [1])
    with pytest.raises(TimeoutError, match=r"within 0.1 s; .* 'a' is being acted on"):
        acted_on.result()
    with pytest.raises(TimeoutError, match="'b' waits with 0 others for its turn"):
        waiting.result()
    source.gate.set()
    assert counts(ask(service, "b", [1])) == [1]  # withdrawn, it was not acted on


def test_close_wakes_all_callers_and_leaves_no_thread():
    source = Source()
    service = started(ServiceConfig(live_s=1000), source)
    ask(service, "absent", [7])
    source.gate.clear()
    calls = [Call(ask, service, 0, [0])]  # acted on by the worker
    while source.calls < 2:
        time.sleep(0.001)
    calls += [Call(ask, service, i, [i]) for i in (1, 2, 3)]
    queued(service, 3)
    with pytest.raises(TimeoutError, match=r"the present batch must end within 0.01 s"):
        service.close(timeout=0.01)
    for call in calls:  # though the batch has not ended
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
    with pytest.raises(ServiceClosedError):  # as all the others of its batch
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
        ({"batch_sizes": (4, 4)}, r"batch_sizes must be positive sizes that grow; got \(4, 4\)"),
        ({"batch_sizes": (0, 4)}, "batch_sizes must be positive sizes that grow"),
    ],
)
def test_configs_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ServiceConfig(**wrong)


# The rest.


def test_params_change_between_batches_and_come_from_the_background(serve):
    source = Source()
    params = ParamsPuller(source, interval=0.002)
    service = serve(ServiceConfig(sync_interval=2), source=params)
    seen = []
    for version in range(1, 6):
        answer = ask(service, "a", [0, 3], FIRST)
        assert counts(answer) == (100 * answer.params_version + 1).tolist()
        seen.append(answer.params_version.tolist())
        source.published = version, 100 * version
        while params.get_params(version - 1) is None:
            time.sleep(0.001)
    assert seen == [[0, 0], [0, 0], [2, 2], [2, 2], [4, 4]]
    params.close()


def test_statistics_tell_how_well_batches_fill(serve):
    service = serve(ServiceConfig(max_batch=16), num_envs=100)
    assert service.stats()["service/latency_ms_p99"] == 0
    for size in (4, 8, 16, 16):
        ask(service, "a", range(size))
    stats = service.stats()
    assert (stats["service/batches"], stats["service/requests"]) == (4, 4)
    assert stats["service/envs"] == 44 and stats["service/compiled_sizes"] == 2
    assert stats["service/fill_mean"] == pytest.approx((0.25 + 0.5 + 1 + 1) / 4)
    assert stats["service/fill_p50"] == pytest.approx(0.75)
    assert stats["service/padding_mean"] == pytest.approx(0.125)
    assert 0 < stats["service/latency_ms_p50"] <= stats["service/latency_ms_p99"]
    assert stats["service/queue_ms_p50"] < stats["service/latency_ms_p50"]


def test_many_random_clients_get_their_own_answers(serve):
    """Eight threads for two seconds, or longer until each was answered six times: each row's
    answer is of its own observation and history."""
    per_client, num_clients = 12, 8
    num_envs = per_client * num_clients
    service = serve(ServiceConfig(max_batch=40, max_wait_ms=0.5, timeout_s=20), num_envs=num_envs)
    end = time.monotonic() + 2

    def live(client):
        rng = np.random.default_rng(client)
        steps_done = np.zeros(num_envs, np.int64)
        calls = 0
        while calls < 6 or time.monotonic() < end:
            own = rng.choice(per_client, rng.integers(1, per_client + 1), replace=False)
            ids = own + client * per_client
            first = rng.random(len(ids)) < 0.2
            seen = rng.integers(0, 1_000_000, (len(ids), 3)).astype(np.int32)
            answer = service.inference(client, 0, ids, steps(np.where(first, FIRST, MID), seen))
            steps_done[ids] = np.where(first, 1, steps_done[ids] + 1)
            output = answer.agent_output
            np.testing.assert_array_equal(output["seen"], seen)
            np.testing.assert_array_equal(output["action"], steps_done[ids])
            np.testing.assert_array_equal(output["mixed"], seen[:, 0] * 1000 + steps_done[ids])
            np.testing.assert_array_equal(answer.agent_state["count"], steps_done[ids] - 1)
            calls += 1
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.004)
        return calls

    calls = [Call(live, client) for client in range(num_clients)]
    total = sum(call.result() for call in calls)
    stats = service.stats()
    assert stats["service/requests"] == total
    assert stats["service/batches"] < total / 1.5  # they did share batches
    assert set(service.sizes_seen) <= {8, 16, 32, 40}
