"""Restarts of worker processes: their limit is a rate, they are logged, and hangs are errors."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from rlstack.checks import EnvCrash
from rlstack.entity.inverted.shared_game import Limits
from rlstack.envs import SyncEnv
from rlstack.envs.backend import PoolConfig
from rlstack.envs.process.restarts import RestartLimit
from tests.envs.faulty import Faulty

pytestmark = pytest.mark.timeout(60)


def zeros(n):
    return np.zeros(n, np.int32)


def test_a_limit_forgets_restarts_after_its_window_of_work():
    limit = RestartLimit(2, window=10.0)
    assert [limit.count(worked) for worked in (0, 4, 7, 4, 7)] == [True] * 5
    assert not limit.count(0.0)
    assert limit.total == 5
    assert not RestartLimit(0, 10.0).count(100.0)


def test_time_without_work_does_not_bring_new_restarts():
    limit = RestartLimit(1, window=10.0)
    assert limit.count(-60.0)  # a hang was measured a little longer than the time since the start
    assert not limit.count(0.0)


def test_a_pool_restarts_workers_without_end_if_they_fail_rarely():
    options = {"fault": "raise", "at": 2}
    with SyncEnv(Faulty, 1, "process", options=options, max_restarts=1, restart_window=1e-6) as env:
        env.reset()
        for _ in range(9):
            env.step(zeros(1))
        assert env.stats() == {"restarts": 3}


@pytest.mark.slow
@pytest.mark.chosen
def test_a_pool_whose_worker_hangs_again_and_again_fails():
    """The time of the hangs is longer than the window, and does not count."""
    with SyncEnv(
        Faulty, 1, "process", options={"fault": "hang", "at": 1}, max_restarts=1,
        restart_window=2.0, step_timeout=1.2,
    ) as env:  # fmt: skip
        env.reset()
        with pytest.raises(EnvCrash, match=r"at most 1 restarts within 2 s.*step_timeout=1\.2 s"):
            for _ in range(3):
                env.step(zeros(1))


def test_each_restart_logs_one_line_with_its_reason(caplog, tmp_path):
    options = {"fault": "raise", "at": 1, "env": 1, "flag": str(tmp_path / "once")}
    with (
        caplog.at_level(logging.WARNING),
        SyncEnv(Faulty, 2, "process", options=options, num_workers=2) as env,
    ):
        env.reset()
        env.step(zeros(2))
    (record,) = [r for r in caplog.records if "restarted" in r.getMessage()]
    assert "\n" not in record.getMessage()
    for part in ("1 so far", "Env 1 (Faulty): step raised ArithmeticError: told to fail", ".py:"):
        assert part in record.getMessage()


@pytest.mark.slow
@pytest.mark.chosen
def test_an_environment_that_hangs_in_a_thread_ends_the_pool():
    options = {"fault": "sleep", "env": 1, "seconds": 5.0}
    with SyncEnv(Faulty, 2, "thread", options=options, step_timeout=0.3) as env:
        env.reset()
        with pytest.raises(EnvCrash, match=r"Env 1 \(Faulty\).*step_timeout=0\.3 s"):
            env.step(zeros(2))


@pytest.mark.parametrize("name", ["step_timeout", "start_timeout", "restart_window"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_limits_must_be_positive_seconds(name, value):
    with pytest.raises(ValueError, match=name):
        PoolConfig(1, 1, **{name: value})
    if name != "start_timeout":
        with pytest.raises(ValueError, match=name):
            Limits(**{name: value})
