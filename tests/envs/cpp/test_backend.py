"""EnvPool behind the pools: its errors are corrected, and both ways to read its data agree."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("envpool")

from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.backend import PoolConfig
from rlstack.envs.cpp.backend import CppBackend
from rlstack.types import StepType

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
pytestmark = pytest.mark.timeout(60)


def episode_of(env, action, steps):
    env.reset()
    actions = np.full(env.num_envs, action)
    return [env.step(actions) for _ in range(steps)]


def test_time_limit_is_a_truncation():
    with SyncEnv("CartPole-v1", 2, options={"max_episode_steps": 5}) as env:
        rows = episode_of(env, 0, 7)
    assert [r.step_type[0] for r in rows] == [MID] * 4 + [LAST, FIRST, MID]
    assert [r.discount[0] for r in rows] == [1] * 7
    assert [r.reward[0] for r in rows] == [1, 1, 1, 1, 1, 0, 1]
    assert np.abs(rows[4].observation - rows[3].observation).max() > 0  # the true last observation


def test_fallen_pole_is_a_termination():
    with SyncEnv("CartPole-v1", 1) as env:
        rows = episode_of(env, 0, 15)
    end = [r.step_type[0] for r in rows].index(LAST)
    assert rows[end].discount[0] == 0
    assert rows[end + 1].step_type[0] == FIRST
    assert (rows[end + 1].reward[0], rows[end + 1].discount[0]) == (0, 1)


def test_continuous_time_limit_and_float32():
    with SyncEnv("HalfCheetah-v4", 2, options={"max_episode_steps": 3}) as env:
        first = env.reset()
        assert first.observation.dtype == np.float32 == env.spec.observation.dtype
        wild = [env.step(np.full((2, 6), 7.0)) for _ in range(4)]
        env.reset()
    with SyncEnv("HalfCheetah-v4", 2, options={"max_episode_steps": 3}) as env:
        env.reset()
        clipped = [env.step(np.ones((2, 6), np.float32)) for _ in range(4)]
        with pytest.raises(ValueError, match="NaN"):
            env.step(np.full((2, 6), np.nan))
        with pytest.raises(ValueError, match="shape"):
            env.step(np.ones((2, 5)))
    assert [r.discount[0] for r in wild] == [1] * 4
    assert [r.step_type[0] for r in wild] == [MID, MID, LAST, FIRST]
    for a, b in zip(wild, clipped, strict=True):
        np.testing.assert_array_equal(a.observation, b.observation)


def test_atari_life_loss_and_its_hidden_time_limit():
    """With episodic_life the limit may fall within a life, where EnvPool sets neither flag."""
    options = {"episodic_life": True, "max_episode_steps": 120, "repeat_action_probability": 0.0}
    with SyncEnv("Breakout-v5", 1, options=options, seed=1) as env:
        pool = env._backend._pool
        env.reset()
        ends, steps = [], 0
        for k in range(400):
            row = env.step(np.array([1 if k % 10 == 0 else 3]))
            steps = 0 if row.step_type[0] == FIRST else steps + 1
            if row.step_type[0] == LAST:
                ends.append((steps, float(row.discount[0])))
        assert pool.config["episodic_life"]
    lives = [n for n, discount in ends if discount == 0]
    limits = [n for n, discount in ends if discount == 1]
    assert lives
    assert limits
    assert all(n < 120 for n in lives + limits)  # below the limit, so EnvPool does not report it


def test_atari_limit_without_lives():
    with SyncEnv("Pong-v5", 2, options={"max_episode_steps": 4}) as env:
        rows = episode_of(env, 0, 5)
        assert rows[0].observation.dtype == np.uint8
        assert env.spec.observation.shape == (4, 84, 84)
    assert [r.step_type[1] for r in rows] == [MID, MID, MID, LAST, FIRST]
    assert [r.discount[1] for r in rows] == [1] * 5


class _Recorded:
    """A replacement for a pool that returns recorded fields."""

    def __init__(self, frames):
        self.frames = iter(frames)

    def _recv(self):
        return next(self.frames)


@pytest.mark.parametrize(
    ("episodic", "trunc", "over", "lives", "discount"),
    [
        (False, False, 1, 0, 0.0),  # game over
        (False, True, 0, 3, 1.0),  # time limit, flagged by EnvPool
        (False, True, 1, 0, 0.0),  # both at once: a termination
        (False, False, 0, 3, 1.0),  # an end that is neither
        (True, False, 0, 2, 0.0),  # a life lost
        (True, False, 0, 3, 1.0),  # neither game, life nor flag: the hidden limit
        (True, True, 0, 2, 1.0),  # limit, flagged by EnvPool
    ],
)
def test_atari_ends_by_table(episodic, trunc, over, lives, discount):
    backend = CppBackend("Breakout-v5", PoolConfig(1, 1, options={"episodic_life": episodic}))
    frames = []
    for done in (False, True):
        fields = {
            "info:env_id": np.zeros(1, np.int32),
            "done": np.array([done]),
            "reward": np.ones(1, np.float32),
            "discount": np.array([float(not done)], np.float32),
            "step_type": np.array([LAST if done else MID], np.int32),
            "trunc": np.array([done and trunc]),
            "obs": np.zeros((1, 4, 84, 84), np.uint8),
            "info:lives": np.array([lives if done else 3], np.int32),
            "info:reward": np.ones(1, np.float32),
            "info:terminated": np.array([over if done else 0], np.int32),
        }
        frames.append([fields.get(f) for f in backend._position])
    backend._pool = _Recorded(frames)
    backend.recv()
    timestep = backend.recv()[1]
    assert timestep.step_type[0] == LAST
    assert timestep.discount[0] == discount


@pytest.mark.parametrize(
    ("name", "wait"),
    [("CartPole-v1", 3), ("CartPole-v1", 2), ("FrozenLake-v1", 3), ("CartpoleSwingup-v1", 3)],
)
def test_direct_and_public_ways_agree(name, wait):
    def histories(direct):
        config = PoolConfig(3, wait, seed=5, options={"max_episode_steps": 12})
        backend = CppBackend(name, config, direct=direct)
        assert backend.direct is direct
        rng = [np.random.default_rng(i) for i in range(3)]
        seen = {i: [] for i in range(3)}
        backend.reset()
        while any(len(h) < 40 for h in seen.values()):
            ids, timestep = backend.recv()
            observation = timestep.observation
            leaves = list(observation.values()) if isinstance(observation, dict) else [observation]
            for row, i in enumerate(ids.tolist()):
                seen[i].append([np.array(x[row]) for x in (*timestep[:3], *leaves)])
            action = np.array([rng[i].integers(0, 2) for i in ids.tolist()])
            shape = np.shape(action) + tuple(backend.spec.action.shape)
            backend.send(ids, [action.reshape(shape).astype(backend.action_dtypes[0])])
        backend.close()
        return seen

    direct, public = histories(True), histories(False)
    for i in range(3):
        for a, b in zip(direct[i][:40], public[i][:40], strict=True):
            for x, y in zip(a, b, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


def test_a_reward_that_envpool_left_undefined_is_zero_at_first():
    backend = CppBackend("CartPole-v1", PoolConfig(2, 2), direct=True)

    class Undefined:
        def __init__(self, pool):
            self._pool = pool

        def __getattr__(self, name):
            return getattr(self._pool, name)

        def _recv(self):
            rows = self._pool._recv()
            rows[backend._reward_at] = np.full_like(rows[backend._reward_at], np.nan)
            return rows

    backend._pool = Undefined(backend._pool)
    backend.reset()
    _, timestep = backend.recv()
    backend.close()
    assert timestep.step_type.tolist() == [0, 0] and timestep.reward.tolist() == [0.0, 0.0]


def test_direct_way_is_guarded(monkeypatch):
    monkeypatch.setattr("rlstack.envs.cpp.backend._direct_works", lambda *args: False)
    with SyncEnv("CartPole-v1", 2) as env:
        assert not env._backend.direct
        env.reset()
        assert (env.step(np.array([0, 1])).reward == 1).all()


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "Catch-v0", "FrozenLake-v1", "Pendulum-v1", "CartpoleSwingup-v1"]
)
def test_every_family_keeps_the_meaning_of_time(name):
    rng = np.random.default_rng(0)
    options = {} if name == "Catch-v0" else {"max_episode_steps": 30}
    with SyncEnv(name, 4, options=options) as env:
        before = env.reset()
        assert (before.step_type == FIRST).all()
        ended = 0
        for _ in range(70):
            spec = env.spec.action
            action = (
                rng.integers(0, spec.num_values, 4)
                if hasattr(spec, "num_values")
                else rng.uniform(-1, 1, (4, *spec.shape))
            )
            now = env.step(action)
            np.testing.assert_array_equal(now.step_type == FIRST, before.step_type == LAST)
            first, last = now.step_type == FIRST, now.step_type == LAST
            assert (now.reward[first] == 0).all()
            assert (now.discount[~last] == 1).all()
            assert np.isin(now.discount[last], [0, 1]).all()
            ended += last.sum()
            before = now
        assert ended > 0


def test_trajectories_do_not_depend_on_threads_or_waiting():
    def run(wait, threads):
        seen = {i: [] for i in range(4)}
        with AsyncEnv("CartPole-v1", 4, wait, "cpp", seed=9, num_threads=threads) as env:
            env.async_reset()
            while any(len(h) < 30 for h in seen.values()):
                ids, timestep = env.recv()
                for row, i in enumerate(ids.tolist()):
                    seen[i].append((timestep.observation[row].tolist(), timestep.discount[row]))
                env.send(ids, np.array([len(seen[i]) % 2 for i in ids.tolist()]))
        return {i: h[:30] for i, h in seen.items()}

    reference = run(4, 1)
    assert reference == run(4, 2) == run(1, 2) == run(3, 1)


def test_sent_actions_and_returned_rows_are_not_shared():
    with AsyncEnv("CartPole-v1", 2, 1, "cpp") as env:
        env.async_reset()
        kept = []
        for _ in range(20):
            ids, timestep = env.recv()
            kept.append((timestep.observation, timestep.observation.copy()))
            action = np.zeros(1, np.int32)
            env.send(ids, action)
            action[:] = 77
            ids[:] = 99
        for a, b in kept:
            np.testing.assert_array_equal(a, b)


def test_options_are_checked():
    with pytest.raises(ValueError, match="must not contain"):
        SyncEnv("CartPole-v1", 2, options={"num_envs": 3})
    with pytest.raises(ValueError, match="no_such"):
        SyncEnv("CartPole-v1", 2, options={"no_such": 3})


def test_a_missing_library_of_the_system_is_named(tmp_path, monkeypatch):
    missing = "libEGL.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "envpool.py").write_text(f"raise ImportError({missing!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "envpool", raising=False)
    with pytest.raises(OSError, match=r"libEGL\.so\.1: .* apt install libegl1"):
        SyncEnv("CartPole-v1", 1)
    with SyncEnv("CartPole-v1", 1, "for_loop") as env:
        assert env.reset().first().all()


def test_import_prints_nothing():
    code = "import numpy as np; from rlstack.envs import SyncEnv; SyncEnv('CartPole-v1', 1).reset()"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == out.stderr == ""
