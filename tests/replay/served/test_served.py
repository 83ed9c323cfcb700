"""A replay service with its own writers and a reader that draws ahead, without a network."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rlstack.replay import InProcessReplay, ReplayClosedError, ReplayTimeoutError
from rlstack.replay.served import ReplayService, ServedReplayBuffer
from rlstack.replay.served.service import layout
from rlstack.rpc import UnavailableError
from tests.replay.replay_model import MID, SPEC, config, drawn, feed, make_transition
from tests.replay.served.backend import Caller

pytestmark = pytest.mark.timeout(60)


class Counting(Caller):
    """Records the names of the methods that are called."""

    def __init__(self, service):
        super().__init__(service)
        self.called = []

    def call(self, method, args=(), kwargs=None, timeout=None):
        self.called.append(method)
        return super().call(method, args, kwargs, timeout)


class Unreliable(Caller):
    """Loses every second answer, after the call has run."""

    def __init__(self, service):
        super().__init__(service)
        self.calls = 0

    def call(self, method, args=(), kwargs=None, timeout=None):
        answer = super().call(method, args, kwargs, timeout)
        self.calls += 1
        if self.calls % 2:
            raise UnavailableError("the answer was lost")
        return answer


@pytest.fixture
def served():
    """Makes services and buffers; closes them."""
    opened = []

    def make_service(cfg, num_envs, **options):
        opened.append(ReplayService(cfg, num_envs, seed=0, spec=SPEC, **options))
        return opened[-1]

    def make_buffer(cfg, num_envs, service, caller=Caller, **options):
        opened.append(ServedReplayBuffer(cfg, num_envs, caller(service), SPEC, **options))
        return opened[-1]

    yield make_service, make_buffer
    for one in reversed(opened):
        one.close()
    until = time.monotonic() + 5
    while (left := [t for t in threading.enumerate() if t.name.startswith("replay-")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.01)
    assert not left


def feed_some(buffer, envs, first, last):
    for t in range(first, last):
        count = len(envs)
        buffer.add(None, make_transition(envs, [t] * count, [MID] * count))


@pytest.mark.parametrize("on_request", [{"prefetch": 0, "max_pending": 0}, {}])
@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritized"])
def test_two_writers_and_a_reader_draw_what_one_process_draws(served, sampler, on_request):
    make_service, make_buffer = served
    cfg = config(sampler, max_size=64)
    service = make_service(cfg, 4)
    reader = make_buffer(cfg, 4, service, **on_request)
    writers = [make_buffer(cfg, 4, service, env_ids=range(i, i + 2), **on_request) for i in (0, 2)]
    one = InProcessReplay(cfg, 4, seed=0)
    feed(one, 4, 0, 13)
    for writer, envs in zip(writers, ([0, 1], [2, 3]), strict=True):
        feed_some(writer, envs, 0, 13)
        writer.flush()
    for _ in range(3):
        ours, theirs = reader.sample(), one.sample()
        np.testing.assert_array_equal(ours.keys, theirs.keys)
        np.testing.assert_array_equal(ours.batch.weights, theirs.batch.weights)
        assert drawn(ours) == drawn(theirs)
    stats = reader.stats()
    assert (stats["inserts"], stats["dropped"]) == (one.stats()["inserts"], 0)


def test_an_unroll_is_one_message_and_so_are_two_batches(served):
    make_service, make_buffer = served
    cfg = config("fifo", unroll_length=8, max_size=64)
    service = make_service(cfg, 2)
    writer = make_buffer(cfg, 2, service, Counting)
    calls = writer._calls._service.called
    feed(writer, 2, 0, 8)
    time.sleep(0.05)
    assert calls == []
    feed(writer, 2, 8, 9)
    writer.flush()
    feed(writer, 2, 9, 17)
    writer.flush()
    assert calls == ["open_writer", "put", "put"]
    cfg = config(max_size=64)
    service = make_service(cfg, 2)
    buffer = make_buffer(cfg, 2, service, Counting)
    feed(buffer, 2, 0, 9)
    buffer.flush()
    for _ in range(8):
        buffer.sample()
    assert buffer._calls._service.called.count("take") <= 5


def test_a_repeated_call_adds_nothing_again(served):
    make_service, make_buffer = served
    cfg = config("fifo", max_size=64)
    for pending in (0, None):
        service = make_service(cfg, 2)
        writer = make_buffer(cfg, 2, service, Unreliable, max_pending=pending)
        feed(writer, 2, 0, 7)
        writer.gap(None)
        feed(writer, 2, 7, 11)
        writer.flush()
        reader = make_buffer(cfg, 2, service, prefetch=0)
        assert reader.stats()["inserts"] == 6
        got = [item for _ in range(3) for item in drawn(reader.sample(2))]
        assert got == [(env, first) for first in (0, 3, 7) for env in (0, 1)]


def test_a_new_writer_replaces_the_old_one_whose_unroll_is_dropped(served):
    make_service, make_buffer = served
    cfg = config("fifo", max_size=64)
    service = make_service(cfg, 2)
    old = make_buffer(cfg, 2, service, max_pending=0)
    feed(old, 2, 0, 6)  # an item, and half of the next
    new = make_buffer(cfg, 2, service, max_pending=0)
    feed(new, 2, 100, 104)
    with pytest.raises(ReplayClosedError, match="another one has its environments"):
        feed(old, 2, 6, 7)
    reader = make_buffer(cfg, 2, service, prefetch=0)
    assert drawn(reader.sample(4)) == [(0, 0), (1, 0), (0, 100), (1, 100)]
    assert reader.stats()["size"] == 0


def test_writers_wait_while_a_fifo_is_full(served):
    make_service, make_buffer = served
    cfg = config("fifo", batch_size=2, max_size=8, max_size_per_env=1)
    service = make_service(cfg, 8)
    writers = [
        make_buffer(cfg, 8, service, env_ids=range(i, i + 1), max_pending=0) for i in range(8)
    ]
    for env, writer in enumerate(writers):
        feed_some(writer, [env], 0, 6)
        with pytest.raises(ReplayTimeoutError, match=r"\(8\)|max_size_per_env"):
            writer.add(None, make_transition([env], [6], [MID]), timeout=0)
    reader = make_buffer(cfg, 8, service, prefetch=0)
    threads = [
        threading.Thread(target=feed_some, args=(writer, [env], 6, 7))
        for env, writer in enumerate(writers)
    ]
    for thread in threads:  # more of them than may wait in the service
        thread.start()
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in threads)
    started = time.monotonic()
    got = [item for _ in range(4) for item in drawn(reader.sample())]
    assert sorted(got) == [(env, 0) for env in range(8)]
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert time.monotonic() - started < 5
    assert reader.stats()["dropped"] == 0 and reader.stats()["add_wait_seconds"] > 0.1


@pytest.mark.slow
@pytest.mark.chosen
def test_the_rate_limit_holds_for_writers_and_for_a_reader_that_draws_ahead(served):
    make_service, make_buffer = served
    cfg = config(max_size=64, min_size=4, samples_per_insert=1.0, samples_per_insert_tolerance=4)
    service = make_service(cfg, 1)
    buffer = make_buffer(cfg, 1, service, max_pending=4)
    with pytest.raises(ReplayTimeoutError, match="ahead of samples"):
        for t in range(60):
            buffer.add(None, make_transition([0], [t], [MID]), timeout=1.0)
    for _ in range(2):
        buffer.sample()
    buffer.add(None, make_transition([0], [t], [MID]), timeout=5)
    with pytest.raises(ReplayTimeoutError, match="samples_per_insert"):
        while True:
            buffer.sample(timeout=2.5)


def test_priorities_and_versions_are_there_before_the_next_draw(served):
    make_service, make_buffer = served
    cfg = config("prioritized", max_size=16, batch_size=8, priority_exponent=1.0)
    service = make_service(cfg, 1)
    buffer = make_buffer(cfg, 1, service, prefetch=0, max_pending=0)
    feed(buffer, 1, 0, 11)
    buffer.sample()
    keys = np.arange(8, dtype=np.uint64)
    buffer.update_priorities(keys, np.where(keys == 5, 1e9, 1.0))
    buffer.set_params_version(7)
    assert set(buffer.sample().keys.tolist()) == {5}
    assert buffer.stats()["lag_mean"] == 7
    assert make_buffer(cfg, 1, service).sample().keys.tolist() == [5] * 8


def test_a_service_that_does_not_answer_is_waited_for(served):
    make_service, make_buffer = served

    class Silent(Caller):
        silent = True

        def call(self, method, args=(), kwargs=None, timeout=None):
            if self.silent:
                raise UnavailableError("nobody is there")
            return super().call(method, args, kwargs, timeout)

    cfg = config(max_size=64)
    service = make_service(cfg, 1)
    for options in ({"prefetch": 0, "max_pending": 0}, {"max_pending": 1}):
        buffer = make_buffer(cfg, 1, service, Silent, **options)
        with pytest.raises(ReplayTimeoutError, match="nobody is there"):
            for t in range(10):
                buffer.add(None, make_transition([0], [t], [MID]), timeout=0.1)
        with pytest.raises(ReplayTimeoutError):
            buffer.sample(timeout=0.1)
        buffer._calls._service.silent = False
        feed(buffer, 1, t, 12)
        buffer.flush()
        assert len(drawn(buffer.sample(timeout=5))) == 4


def test_malformed_steps_are_refused(served):
    make_service, _ = served
    cfg = config()
    service = make_service(cfg, 4)
    service.open_writer(1, 1, 2, layout(cfg, 4, SPEC))
    import jax

    leaves = jax.tree_util.tree_leaves(make_transition([1, 2], [0, 0], [MID, MID]))
    two = np.array([2])
    wrong = [
        (two, None, [leaf[:1] for leaf in leaves]),
        (two, None, leaves[:-1]),
        (two, None, [leaf.astype(np.float64) for leaf in leaves]),
        (np.array([1, 1]), None, leaves),
        (two, np.array([0, 2]), leaves),
        (two, np.array([-1, 0]), leaves),
        (two, np.array([0, 0]), leaves),
        (two, np.array([0.0, 1.0]), leaves),
    ]
    for number, arguments in enumerate(wrong, 1):
        with pytest.raises(ValueError, match="must be"):
            service.put(1, number, *arguments, 0.0)
    with pytest.raises(ValueError, match="one by one"):
        service.put(1, 20, two, None, leaves, 0.0)
    assert service.put(1, len(wrong) + 1, two, None, leaves, 0.0) == (1, "")
    with pytest.raises(ReplayClosedError):
        service.put(2, 1, two, None, leaves, 0.0)
    with pytest.raises(ValueError, match="equal configs"):
        service.open_writer(3, 0, 1, layout(config(unroll_length=4), 4, SPEC))
    with pytest.raises(ValueError, match=r"within 0\.\.3"):
        service.open_writer(3, 3, 2, layout(cfg, 4, SPEC))


def test_closing_ends_waits_and_a_writer_that_waits_loses_nothing_else(served):
    make_service, make_buffer = served
    cfg = config("fifo", max_size=4)
    service = make_service(cfg, 4)
    full = make_buffer(cfg, 4, service, prefetch=0, max_pending=0)
    feed(full, 4, 0, 6)
    ended = []

    def add():
        try:
            full.add(None, make_transition(range(4), [6] * 4, [MID] * 4))
        except (ReplayClosedError, ReplayTimeoutError) as error:
            ended.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    time.sleep(0.1)
    full.close()
    thread.join(timeout=5)
    assert ended
    service.close()
    with pytest.raises(ReplayClosedError):
        make_buffer(cfg, 4, service, prefetch=0).sample()
