"""The inference service: many callers, one batch, the same answers as from one Inferencer."""

import threading
import time

import numpy as np
import pytest

from rlstack.acting.batches import padded_sizes
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import ParamsPuller
from rlstack.configs.acting import InferencerConfig, ServiceConfig
from tests.acting.services import (
    KEY,
    PATIENT,
    Call,
    Echo,
    Source,
    ask,
    counts,
    queued,
    rows,
    started,
    steps,
)
from tests.agent_cases import FIRST, LAST, MID, assert_close, case, random_timesteps

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_thread_left")]


# The same answers as from one Inferencer.


@pytest.mark.slow
@pytest.mark.chosen
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


def test_with_one_thread_no_caller_computes_a_batch(serve):
    computed = set()

    class Traced(Echo):
        def lay_out(self, timestep):
            computed.add(threading.current_thread().name)
            return timestep

    service = started(PATIENT, Source(), Traced(), one_thread=True)
    try:
        answers = [counts(Call(ask, service, "a", [0]).result()) for _ in range(3)]
        assert answers == [[1], [2], [3]]
    finally:
        service.close()
    assert computed == {"inference"}


# When a batch starts.


def test_a_batch_goes_when_every_live_client_waits(serve):
    service = serve()
    ask(service, "a", [0])  # the only client need not wait
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
    # Together they exceed the limit: the first is a batch alone, the other waits its own time.
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
    ask(service, "a", [1])  # waits until the other client is no longer live
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
    # The padded ids grow by one and fill num_envs rows, but are not all environments in order.
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


# Other behaviour.


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
    """Eight threads run for two seconds, or longer until each has six answers: each row's
    answer belongs to its own observation and history."""
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
    assert stats["service/batches"] < total / 1.5  # the clients shared batches
    assert set(service.sizes_seen) <= {8, 16, 32, 40}
