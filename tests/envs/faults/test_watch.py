"""Environments that hang in the caller's own thread: they are named, and the call raises."""

import contextlib
import gc
import threading
import time

import numpy as np
import pytest

from rlstack.checks import EnvCrash
from rlstack.envs import SyncEnv
from rlstack.envs import watch as watching
from rlstack.envs.watch import Limit, Watch
from tests.envs.faulty import Faulty

pytestmark = pytest.mark.timeout(30)


class Hanging(Faulty):
    """Hangs in one of its methods, in one of several ways."""

    def __init__(self, where="step", way="sleep", seed=0):
        super().__init__(seed=seed)
        self._where, self._way = where, way
        self._hang("builder")

    def _hang(self, where):
        if where != self._where or self._seed != 1:  # the second environment
            return
        if self._way == "sleep":
            time.sleep(3600)
        elif self._way == "lock":
            threading.Semaphore(0).acquire()
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    def reset(self, **arguments):
        self._hang("reset")
        return super().reset(**arguments)

    def step(self, action):
        self._hang("step")
        return super().step(action)

    def close(self):
        self._hang("close")


LIMITS = {"step_timeout": 0.3, "start_timeout": 0.3}


@pytest.mark.parametrize("way", ["sleep", "lock", "loop"])
@pytest.mark.parametrize("where", ["builder", "reset", "step", "close"])
def test_a_call_that_hangs_raises_with_its_environment_and_line(where, way):
    began = time.monotonic()
    what = {"builder": "the builder", "close": "close"}.get(where, f"a {where}")
    option = "start_timeout" if where == "builder" else "step_timeout"
    rule = rf"Env 1 \(Hanging\): {what} must end within {option}=0.3 s; .* at \S+test_watch.py:\d+"
    with pytest.raises(EnvCrash, match=rule):
        env = SyncEnv(Hanging, 3, "for_loop", options={"where": where, "way": way}, **LIMITS)
        try:
            env.reset()
            env.step(np.zeros(3, np.int64))
        except BaseException:
            with contextlib.suppress(EnvCrash):
                env.close()
            raise
        env.close()
    assert 0.3 < time.monotonic() - began < 5


def test_a_thread_that_loops_in_python_is_ended_too():
    errors = []

    def run():
        try:
            with SyncEnv(Hanging, 2, "for_loop", options={"way": "loop"}, **LIMITS) as env:
                env.reset()
                env.step(np.zeros(2, np.int64))
        except EnvCrash as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert "Env 1 (Hanging): a step must end" in errors[0]


def test_slow_steps_within_the_limit_are_left_alone():
    options = {"fault": "sleep", "seconds": 0.15}
    with SyncEnv(Faulty, 4, "for_loop", options=options, step_timeout=0.4) as env:
        env.reset()
        env.step(np.zeros(4, np.int64))  # 0.6 s, but no environment takes more than 0.15


def test_a_call_within_its_limit_is_not_interrupted_and_can_be_asked_for(monkeypatch):
    watch = Watch("x")
    with watch.calls("a step", Limit(10.0, "step_timeout")):
        monkeypatch.setattr(watch, "_interrupt", lambda: pytest.fail("it was interrupted"))
        watch.look(2.0)
        for _ in range(4):
            watch.look(2.0)
        assert watch.in_progress(threading.get_ident()) == (
            "Env 0 (x): a step, which may take step_timeout=10 s"
        )
    assert watch.in_progress(threading.get_ident()) == ""


def test_what_cannot_be_interrupted_is_left_to_the_last_resort(monkeypatch):
    told = []
    monkeypatch.setattr(Watch, "_interrupt", lambda self: None)
    watch = Watch("x")
    with watching.at_last_resort(told.append), watch.calls("a step", Limit(1.0, "step_timeout")):
        for _ in range(12):
            watch.look(1.0)
    assert len(told) == 1 and told[0].startswith("Env 0 (x): a step must end within")


def test_the_watching_thread_ends_with_the_last_watch():
    with SyncEnv(Faulty, 2, "for_loop") as env:
        env.reset()
        assert any(t.name == "rlstack-watch" for t in threading.enumerate())
    del env
    gc.collect()  # what the tests before have left
    deadline = time.monotonic() + 5
    while any(t.name == "rlstack-watch" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
