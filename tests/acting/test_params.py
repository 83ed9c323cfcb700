"""Params by version: published, encoded once, and pulled in the background."""

import pickle
import threading
import time

import numpy as np
import pytest

from rlstack.acting.params import (
    ParamsClosedError,
    ParamsError,
    ParamsPublisher,
    ParamsPuller,
    RemoteParams,
)

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("no_thread_left")]


class Source:
    """Returns the params set by the test, or fails; counts its calls."""

    def __init__(self, version=0, params="p0"):
        self.published = version, params
        self.error = None
        self.asked = []

    def get_params(self, newer_than=-1):
        self.asked.append(newer_than)
        if self.error is not None:
            raise self.error
        version = self.published[0]
        return self.published if version > newer_than else None


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def in_threads(*functions):
    """Runs functions at once; returns what each returned or raised."""
    answers = [None] * len(functions)

    def run(i, function):
        try:
            answers[i] = function()
        except Exception as error:
            answers[i] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    return threads, answers


def join(threads):
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


# The publisher.


def test_readers_get_what_is_newer_and_nothing_else():
    learner = Source(version=-1)
    publisher = ParamsPublisher(learner, pickle.dumps)
    assert publisher.get() is None
    learner.published = 3, {"w": np.arange(2)}
    version, data = publisher.get(newer_than=2)
    assert version == 3 and pickle.loads(data)["w"].tolist() == [0, 1]
    assert publisher.get(newer_than=3) is None


def test_a_version_is_encoded_once_for_many_readers_and_never_for_none():
    encoded = []

    def encode(params):
        encoded.append(params)
        time.sleep(0.05)  # long enough for all readers to overlap
        return params.encode()

    learner = Source(1, "unread")
    publisher = ParamsPublisher(learner, encode)
    learner.published = 2, "read"
    threads, answers = in_threads(*[publisher.get] * 6)
    join(threads)
    assert answers == [(2, b"read")] * 6 and encoded == ["read"]
    stats = publisher.stats()
    assert stats["publisher/reads"] == 6 and stats["publisher/encodes"] == 1
    assert stats["publisher/bytes"] == 4 and stats["publisher/version"] == 2


def test_the_lag_of_readers_is_counted_in_versions():
    learner = Source(0, "a")
    publisher = ParamsPublisher(learner, pickle.dumps)
    publisher.get()
    learner.published = 1, "b"
    publisher.get(newer_than=0)
    learner.published = 6, "c"
    publisher.get(newer_than=1)
    stats = publisher.stats()
    assert stats["publisher/lag_mean"] == 3 and stats["publisher/lag_max"] == 5


def test_a_failed_encoding_is_told_and_tried_again():
    failures = [ValueError("no space")]

    def encode(params):
        if failures:
            raise failures.pop()
        return params

    publisher = ParamsPublisher(Source(0, b"x"), encode)
    with pytest.raises(ValueError, match="no space"):
        publisher.get()
    assert publisher.get() == (0, b"x")


def test_a_closed_publisher_refuses_reads():
    publisher = ParamsPublisher(Source(), pickle.dumps)
    publisher.close()
    with pytest.raises(ParamsClosedError):
        publisher.get()


# The puller.


def test_it_answers_from_memory_and_asks_for_news_only():
    source = Source()
    params = ParamsPuller(source, interval=0.002)
    assert params.get_params() == (0, "p0")
    assert params.get_params(newer_than=0) is None
    source.published = 5, "p5"
    until(lambda: params.get_params(newer_than=0) == (5, "p5"))
    until(lambda: source.asked[-1] == 5)
    stats = params.stats()
    assert stats["params/version"] == 5 and stats["params/updates"] == 2
    assert stats["params/skipped"] == 4 and stats["params/pulls"] >= 3
    params.close()
    assert source.asked[0] == -1 and set(source.asked) == {-1, 0, 5}
    with pytest.raises(ParamsClosedError):
        params.get_params()


def test_a_slow_source_never_holds_up_a_reader():
    source = Source()
    params = ParamsPuller(source, interval=0)
    gate = threading.Event()
    original = source.get_params
    source.get_params = lambda newer_than: (gate.wait(10), original(newer_than))[1]
    start = time.monotonic()
    for _ in range(100):
        assert params.get_params() == (0, "p0")
    assert time.monotonic() - start < 0.5
    gate.set()
    params.close()


def test_without_first_params_it_does_not_start():
    with pytest.raises(TimeoutError, match=r"the first params must come within 0.05 s; got none"):
        ParamsPuller(Source(version=-1), interval=0.01, first_timeout=0.05)
    source = Source()
    source.error = OSError("no route to learner")
    with pytest.raises(ParamsError, match="no route to learner") as caught:
        ParamsPuller(source)
    assert "in get_params" in str(caught.value)  # the traceback, as text


def test_first_params_may_come_late():
    source = Source(version=-1)
    timer = threading.Timer(0.05, lambda: setattr(source, "published", (0, "late")))
    timer.start()
    params = ParamsPuller(source, interval=60, first_timeout=10)
    assert params.get_params() == (0, "late")
    params.close()
    timer.join()


def test_errors_are_told_after_patience_and_forgotten_when_it_works_again():
    source = Source()
    params = ParamsPuller(source, interval=0.002, patience=0.3)
    source.error = OSError("gone")
    until(lambda: params.stats()["params/errors"] > 0)
    assert params.get_params() == (0, "p0")  # not yet

    def told():
        try:
            params.get_params()
        except ParamsError as error:
            return "gone" in str(error) and isinstance(error.__cause__, OSError)
        return False

    until(told)
    source.error, source.published = None, (1, "p1")
    until(lambda: not told())
    until(lambda: params.get_params(newer_than=0) == (1, "p1"))
    params.close()


def test_one_pull_that_fails_late_does_not_use_up_the_patience():
    """As when all processes were stopped for a while: the pull fails, and the next ones work."""
    source = Source()
    params = ParamsPuller(source, interval=0.002, patience=0.3)
    answer = source.get_params

    def late(newer_than):
        source.get_params = answer
        time.sleep(0.6)
        raise TimeoutError("late")

    source.get_params = late
    while not params.stats()["params/errors"]:
        params.get_params()
    assert params.get_params() == (0, "p0")
    source.published = (1, "p1")
    until(lambda: params.get_params(newer_than=0) == (1, "p1"))
    params.close()


def test_a_pull_that_does_not_end_is_named_at_close():
    gate = threading.Event()
    source = Source()
    params = ParamsPuller(source, interval=0)
    source.get_params = lambda newer_than: gate.wait(10) and None
    time.sleep(0.02)
    with pytest.raises(TimeoutError, match=r"a pull must end within 0.05 s"):
        params.close(timeout=0.05)
    gate.set()
    params.close()


def test_from_learner_to_actor():
    learner = Source(0, {"w": np.zeros(3)})
    publisher = ParamsPublisher(learner, pickle.dumps)
    source = RemoteParams(publisher.get, pickle.loads)
    readers = [ParamsPuller(source, interval=0) for _ in range(3)]
    for version in range(1, 20):
        learner.published = version, {"w": np.full(3, version)}
        for reader in readers:
            until(lambda reader=reader, old=version - 1: reader.get_params(old) is not None)
            held, params = reader.get_params()
            assert held == version and params["w"].tolist() == [version] * 3
    assert publisher.stats()["publisher/encodes"] == 20
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("wrong", [{"interval": -1.0}, {"patience": -1.0}])
def test_negative_times_are_refused(wrong):
    with pytest.raises(ValueError, match="times must be at least 0; got"):
        ParamsPuller(Source(), **wrong)
