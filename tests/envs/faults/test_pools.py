"""Environments and workers that fail: the caller's view, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest

from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.types import StepType
from tests.envs.faulty import Faulty

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
SYNC = ("for_loop", "thread", "process")
pytestmark = pytest.mark.timeout(90)


def zeros(n):
    return np.zeros(n, np.int32)


RULES = {
    "shape": r"observation must be what its space declares.*got float32 of shape \(1,\)",
    "dtype": "got complex",
    "nan": "reward must be finite",
    "reward": "reward must be a scalar",
    "four": "5 values",
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *[("for_loop", fault) for fault in RULES],
        *[(kind, fault) for kind in ("thread", "process") for fault in ("nan", "four")],
    ],
)
def test_rule_breakers_are_named_at_once(kind, fault):
    with SyncEnv(Faulty, 2, kind, options={"fault": fault, "at": 2, "env": 1}) as env:
        env.reset()
        env.step(zeros(2))
        with pytest.raises(ValueError, match=rf"Env 1 \(Faulty\)(.|\n)*{RULES[fault]}"):
            env.step(zeros(2))
        with pytest.raises(RuntimeError, match="failed earlier"):
            env.step(zeros(2))


@pytest.mark.parametrize("kind", SYNC)
def test_bad_builders(kind):
    with pytest.raises(ValueError, match=r"must return a gymnasium\.Env or a dm_env"):
        SyncEnv(dict, 2, kind)
    with pytest.raises(RuntimeError, match="builder raised TypeError"):
        SyncEnv(Faulty, 2, kind, options={"no_such": 1})


@pytest.mark.parametrize("kind", ["for_loop", "thread"])
def test_exception_is_raised_here_with_its_cause(kind):
    with SyncEnv(Faulty, 3, kind, options={"fault": "raise", "at": 1, "env": 2}) as env:
        env.reset()
        with pytest.raises(RuntimeError, match=r"Env 2 .*told to fail") as caught:
            env.step(zeros(3))
        assert isinstance(caught.value.__cause__, ArithmeticError)


def test_exception_in_an_async_thread_pool():
    options = {"fault": "raise", "at": 1, "env": 2}
    with AsyncEnv(Faulty, 3, 1, "thread", options=options) as env, pytest.raises(RuntimeError):
        env.async_reset()
        while True:  # on a busy machine the other two may make many steps first
            ids, _ = env.recv()
            env.send(ids, zeros(1))


@pytest.mark.parametrize("fault", ["raise", "kill", "hang"])
def test_worker_is_replaced_and_its_episode_truncated(fault, tmp_path):
    options = {"fault": fault, "at": 3, "env": 1, "flag": str(tmp_path / "once")}
    with SyncEnv(Faulty, 3, "process", options=options, num_workers=3, step_timeout=1.0) as env:
        env.reset()
        rows = [env.step(zeros(3)) for _ in range(6)]
        assert [r.step_type[1] for r in rows] == [MID, MID, LAST, FIRST, MID, MID]
        assert [r.discount[1] for r in rows] == [1] * 6
        assert [r.reward[1] for r in rows] == [1, 1, 0, 0, 1, 1]
        assert rows[2].observation[1].tolist() == rows[1].observation[1].tolist() == [1, 2]
        assert rows[3].observation[1][0] not in (0, 1, 2)  # a new seed
        for other in (0, 2):
            assert [r.observation[other][1] for r in rows] == [1, 2, 3, 4, 5, 6]
        assert env.stats() == {"restarts": 1}


def test_async_worker_death_hits_held_and_flying_environments():
    """One worker runs both environments; it is killed while the caller holds one of them."""
    with AsyncEnv(Faulty, 2, 1, "process", num_workers=1) as env:
        env.async_reset()
        for _ in range(4):
            ids, _ = env.recv()
            env.send(ids, zeros(1))
        held, before = env.recv()
        (worker,) = psutil.Process().children()
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(0.2)
        seen = {0: [], 1: []}
        seen[int(held[0])].append(int(before.step_type[0]))
        env.send(held, zeros(1))
        for _ in range(8):
            ids, timestep = env.recv()
            seen[int(ids[0])].append(int(timestep.step_type[0]))
            assert timestep.discount[0] == 1
            env.send(ids, zeros(1))
        for types in seen.values():
            at = types.index(LAST)
            assert types[at + 1 : at + 2] in ([FIRST], [])
        assert seen[int(held[0])][1] == LAST
        assert env.stats() == {"restarts": 1}


def test_restarts_have_a_limit():
    options = {"fault": "raise", "at": 1}
    with SyncEnv(Faulty, 1, "process", options=options, max_restarts=1) as env:
        env.reset()
        assert env.step(zeros(1)).step_type.tolist() == [LAST]
        assert env.step(zeros(1)).step_type.tolist() == [FIRST]
        with pytest.raises(RuntimeError, match=r"max_restarts=1(.|\n)*told to fail"):
            env.step(zeros(1))


def test_worker_imports_neither_jax_nor_envpool():
    code = "import sys, rlstack.envs.toy, rlstack.envs.adapters, rlstack.envs.auto_reset; "
    code += "import rlstack.envs.process.worker, rlstack.envs.process.protocol; "
    code += "print([m for m in ('jax', 'haiku', 'envpool', 'tensorflow') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


SCRIPT = textwrap.dedent(
    """
    import sys, time, numpy as np, psutil
    from rlstack.envs import SyncEnv
    from tests.envs.faulty import Faulty
    env = SyncEnv(Faulty, 2, "process", options={"fault": sys.argv[1], "at": 2}, num_workers=2)
    print(*[p.pid for p in psutil.Process().children()], flush=True)
    env.reset()
    while True:
        env.step(np.zeros(2, int))
    """
)


@pytest.mark.parametrize(
    ("fault", "sig"),
    [
        ("sleep", signal.SIGKILL),
        pytest.param("hang", signal.SIGKILL, marks=[pytest.mark.slow, pytest.mark.chosen]),
        ("sleep", signal.SIGINT),
    ],
)
def test_workers_end_with_their_parent(fault, sig, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, str(script), fault],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        pids = [int(p) for p in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)
        parent.send_signal(sig)
        parent.wait(15)
        deadline = time.monotonic() + 10
        while any(_alive(p) for p in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(_alive(p) for p in pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_forgotten_pool_ends_its_workers():
    env = SyncEnv(Faulty, 2, "process", num_workers=1)
    env.reset()
    del env  # this folder's fixture detects leftovers


def test_sleeping_environments_overlap():
    options = {"fault": "sleep", "seconds": 0.05, "length": 1000}
    for kind in ("thread", "process"):
        with SyncEnv(Faulty, 4, kind, options=options, num_workers=4) as env:
            env.reset()
            start = time.monotonic()
            for _ in range(5):
                env.step(zeros(4))
            assert time.monotonic() - start < 0.6  # sequential steps would take 1 s


def test_builders_may_be_local_to_a_process_pool():
    length = 2
    with SyncEnv(lambda seed: Faulty(seed=seed, length=length), 2, "process") as env:
        env.reset()
        assert env.step(zeros(2)).observation.tolist() == [[0, 1], [1, 1]]
        assert (env.step(zeros(2)).step_type == LAST).all()
    with pytest.raises(TypeError, match="must be picklable"):
        SyncEnv(Faulty, 2, "process", options={"flag": threading.Lock()})
