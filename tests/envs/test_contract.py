"""One contract for every kind of pool, sync and async, over gymnasium and dm_env environments."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.types import StepType
from tests.envs.env_cases import Nested, ScriptDm, ScriptGym, ScriptNumpyGym

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
SIZE = 4
SYNC = ("for_loop", "thread", "process")
ASYNC = ("thread", "process")
KINDS = [("sync", t) for t in SYNC] + [("async", t) for t in ASYNC]
pytestmark = pytest.mark.timeout(60)


class Driver:
    """Steps each environment of a pool ``n`` times, and keeps the history of each environment."""

    def __init__(self, env, actions):
        self.env, self.actions = env, actions
        self.history = {i: [] for i in range(env.num_envs)}

    def run(self, steps):
        env = self.env
        if env.is_sync:
            self._keep(env.env_ids, env.reset())
            for k in range(steps):
                self._keep(env.env_ids, env.step(self._act(env.env_ids, [k] * env.num_envs)))
            return self.history
        env.async_reset()
        while any(len(h) <= steps for h in self.history.values()):
            ids, timestep = env.recv()
            assert len(set(ids.tolist())) == env.wait_num == len(timestep.reward)
            self._keep(ids, timestep)
            env.send(ids, self._act(ids, [len(self.history[i]) - 1 for i in ids.tolist()]))
        return {i: h[: steps + 1] for i, h in self.history.items()}

    def _act(self, ids, times):
        return np.array(
            [self.actions[i, t % len(self.actions[i])] for i, t in zip(ids, times, strict=True)],
            np.int32,
        )

    def _keep(self, ids, timestep):
        assert timestep.step_type.dtype == np.int32
        assert timestep.reward.dtype == timestep.discount.dtype == np.float32
        for row, i in enumerate(ids.tolist()):
            self.history[i].append(
                (
                    int(timestep.step_type[row]),
                    float(timestep.reward[row]),
                    float(timestep.discount[row]),
                    timestep.observation[row],
                )
            )


ACTIONS = np.random.default_rng(0).integers(0, 3, (SIZE, 50))


def make(mode, kind, builder, wait=2, size=SIZE, **kwargs):
    if mode == "sync":
        return SyncEnv(builder, size, kind, **kwargs)
    return AsyncEnv(builder, size, wait, kind, **kwargs)


@pytest.mark.parametrize(
    ("mode", "kind", "builder"),
    [
        *((*pool, builder) for pool in KINDS for builder in (ScriptGym, ScriptDm)),
        ("sync", "for_loop", ScriptNumpyGym),
    ],
)
def test_boundaries(mode, kind, builder):
    with make(mode, kind, builder, seed=7) as env:
        assert env.spec.observation.dtype == np.float32
        assert env.spec.action.num_values == 3
        np.testing.assert_array_equal(env.env_ids, np.arange(SIZE))
        history = Driver(env, ACTIONS).run(13)
    for i in range(SIZE):
        rows = history[i]
        types = [r[0] for r in rows]
        episodes = [[FIRST, MID, MID, LAST], [FIRST, MID, LAST], [FIRST, MID, MID, MID, LAST]]
        assert types == [*(t for episode in episodes for t in episode), FIRST, MID]
        assert [r[2] for r in rows] == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1]
        for k, (type_, reward, _, observation) in enumerate(rows):
            assert observation.dtype == np.float32
            assert observation[0] == 7 + i
            time = observation[2]  # also in the true last observation
            assert reward == (0.0 if type_ == FIRST else 10 * time + ACTIONS[i, k - 1])
        assert [r[3][2] for r in rows] == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1]


def test_determinism_does_not_depend_on_how_it_runs():
    """An environment's history is the same with one worker or many, sync or async."""
    runs = {}
    for mode, kind in KINDS:
        for workers in (1, 3):
            with make(mode, kind, ScriptGym, seed=3, num_workers=workers) as env:
                runs[mode, kind, workers] = Driver(env, ACTIONS).run(20)
    reference = runs.pop(("sync", "for_loop", 1))
    assert not np.array_equal(reference[0][5][3], reference[1][5][3])
    for history in runs.values():
        for i in range(SIZE):
            for got, want in zip(history[i], reference[i], strict=True):
                assert got[:3] == want[:3]
                np.testing.assert_array_equal(got[3], want[3])


@pytest.mark.parametrize("kind", SYNC)
def test_reset_in_the_middle(kind):
    with make("sync", kind, ScriptGym) as env:
        env.reset()
        env.step(np.zeros(SIZE, int))
        timestep = env.reset()
        assert (timestep.step_type == FIRST).all()
        assert (timestep.observation[:, 1] == 1).all()


@pytest.mark.parametrize("kind", SYNC)
def test_returned_arrays_stay(kind):
    with make("sync", kind, ScriptGym) as env:
        kept = [env.reset()] + [env.step(np.zeros(SIZE, int)) for _ in range(6)]
        copies = [[np.copy(x) for x in t] for t in kept]
        for _ in range(5):
            env.step(np.ones(SIZE, int))
    for timestep, copy in zip(kept, copies, strict=True):
        for a, b in zip(timestep, copy, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_nested_spaces_reach_the_environment(mode, kind):
    with make(mode, kind, Nested) as env:
        many = env.spec.action["many"]
        assert (many.minimum == 0).all()
        assert many.maximum.tolist() == [1, 2]
        assert env.spec.action["move"].dtype == np.float32
        action = {
            "pick": np.arange(SIZE) % 3,
            "move": np.full((SIZE, 2), [9.0, 1.5], np.float32),  # 9 is clipped to 1
            "many": np.tile([1, 2], (SIZE, 1)),
        }
        ids = env.env_ids
        if mode == "sync":
            env.reset()
            observation = env.step(action).observation
        else:
            env.async_reset()
            ids, _ = env.recv()
            while True:
                env.send(ids, {k: v[ids] for k, v in action.items()})
                ids, timestep = env.recv()
                if (timestep.step_type == MID).all():
                    break
            observation = timestep.observation
        pick, rest, binary = observation
        np.testing.assert_array_equal(pick, ids % 3)
        np.testing.assert_allclose(rest["move"], [[1.0, 1.5]] * len(ids))
        np.testing.assert_array_equal(rest["many"], [[1, 2]] * len(ids))
        np.testing.assert_array_equal(binary, [[1, 0]] * len(ids))
        with pytest.raises(TypeError, match="keys"):
            env._checked({"pick": action["pick"]}, SIZE)


@pytest.mark.parametrize("kind", ("cpp", *SYNC))
def test_sync_misuse(kind):
    builder = "Catch-v0" if kind == "cpp" else ScriptGym
    env = SyncEnv(builder, SIZE, kind)
    good = np.zeros(SIZE, np.int32)
    with pytest.raises(RuntimeError, match="reset must come first"):
        env.step(good)
    env.reset()
    for bad, error in [
        (good[:3], ValueError),
        (np.zeros((SIZE, 1), int), ValueError),
        (np.zeros(SIZE), TypeError),
        (good + 3, ValueError),
        (good - 1, ValueError),
        ("left", ValueError),
        (None, ValueError),
    ]:
        with pytest.raises(error, match="Env pool: action"):
            env.step(bad)
    assert (env.step(good).step_type == MID).all()  # the errors neither stepped nor broke the pool
    env.step(good.tolist())
    env.close()
    env.close()
    for call in (env.reset, lambda: env.step(good), env.stats):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("kind", ("cpp", *ASYNC))
def test_async_misuse(kind):
    builder = "Catch-v0" if kind == "cpp" else ScriptGym
    env = AsyncEnv(builder, SIZE, 2, kind)
    with pytest.raises(RuntimeError, match="async_reset first"):
        env.recv()
    with pytest.raises(RuntimeError, match="must come first"):
        env.send([0], [0])
    env.async_reset()
    with pytest.raises(RuntimeError, match="in flight"):
        env.async_reset()
    ids, _ = env.recv()
    flying = [i for i in range(SIZE) if i not in ids]
    for bad_ids, bad_actions, error in [
        (flying, [0, 0], ValueError),
        ([ids[0], ids[0]], [0, 0], ValueError),
        ([ids[0], SIZE], [0, 0], ValueError),
        ([-1], [0], ValueError),
        ([0.0], [0], TypeError),
        (ids, [0], ValueError),
        (ids, [0, 9], ValueError),
        ([], [], ValueError),
    ]:
        with pytest.raises(error):
            env.send(np.asarray(bad_ids), np.asarray(bad_actions))
    env.recv()
    with pytest.raises(RuntimeError, match="Send more"):
        env.recv()
    env.send(ids, np.zeros(2, int))
    assert sorted(env.recv()[0]) == sorted(ids)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.recv()


@pytest.mark.parametrize("kind", ("cpp", *ASYNC))
@pytest.mark.parametrize(("size", "wait"), [(1, 1), (3, 3), (5, 1), (5, 3)])
def test_async_sizes(kind, size, wait):
    """Includes sends that split and shuffle a batch, where recv waits for all environments."""
    builder = "CartPole-v1" if kind == "cpp" else ScriptGym
    with AsyncEnv(builder, size, wait, kind) as env:
        env.async_reset()
        seen = np.zeros(size, int)
        until = time.monotonic() + 30.0  # a busy machine may run some of the workers late
        while seen.sum() < 12 * size * wait or (seen.min() == 0 and time.monotonic() < until):
            ids, timestep = env.recv()
            assert len(ids) == wait == len(timestep.observation)
            if kind != "cpp":
                np.testing.assert_array_equal(timestep.observation[:, 0], ids)
            seen[ids] += 1
            for i in reversed(ids.tolist()):
                env.send([i], [i % 2])
        assert (seen > 0).all()


def test_sync_and_async_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="for_loop"):
        AsyncEnv(ScriptGym, 2, 1, "for_loop")
    with pytest.raises(ValueError, match="wait_num"):
        AsyncEnv(ScriptGym, 2, 3, "thread")
    with pytest.raises(ValueError, match="size"):
        SyncEnv(ScriptGym, 0)
    with pytest.raises(ValueError, match="type must be"):
        SyncEnv(ScriptGym, 2, "gpu")
    with pytest.raises(TypeError, match="needs the name of an EnvPool"):
        SyncEnv(ScriptGym, 2, "cpp")
    with pytest.raises(TypeError, match="name or a callable"):
        SyncEnv(7, 2)
    with pytest.raises(ValueError, match="did you mean 'CartPole-v1'"):
        SyncEnv("CartPol-v1", 2)
    with pytest.raises(ValueError, match="did you mean"):
        SyncEnv("Pongg-v5", 2, "cpp")
    with pytest.raises(ValueError, match=r"'Catch-v0' must run with type='cpp'"):
        SyncEnv("Catch-v0", 2, "for_loop")  # of EnvPool, not of Gymnasium
    with pytest.raises(ValueError, match="must name an importable module"):
        SyncEnv("no_such_module:thing", 2)


@pytest.mark.parametrize("kind", SYNC)
def test_names(kind):
    with SyncEnv("CartPole-v1", 2, kind) as env:
        assert env.reset().observation.shape == (2, 4)
        assert (env.step(np.array([0, 1])).reward == 1).all()
    with SyncEnv("tests.envs.env_cases:ScriptDm", 2, kind) as env:
        assert env.reset().observation.shape == (2, 4)


@pytest.mark.parametrize("kind", SYNC)
def test_sync_send_and_recv_are_step_in_two(kind):
    with SyncEnv(ScriptGym, 3, kind) as one, SyncEnv(ScriptGym, 3, kind) as two:
        np.testing.assert_array_equal(one.reset().observation, two.reset().observation)
        with pytest.raises(RuntimeError, match="send must come first"):
            two.recv()
        for _ in range(12):
            actions = np.zeros(3, np.int32)
            expected = one.step(actions)
            two.send(actions)
            with pytest.raises(RuntimeError, match="recv must come before the next send"):
                two.send(actions)
            for a, b in zip(expected, two.recv(), strict=True):
                np.testing.assert_array_equal(a, b)
        two.send(actions)
        assert two.reset().first().all()
