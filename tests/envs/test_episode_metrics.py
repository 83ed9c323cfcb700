"""The numbers that environments give with the end of an episode, in every kind of pool."""

from __future__ import annotations

import numpy as np
import pytest

from rlstack.acting.actor import Actor
from rlstack.acting.inference import Inference
from rlstack.entity import as_dm_env
from rlstack.entity.games.multi_snake import MultiSnake
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.backend import PoolConfig
from rlstack.envs.cpp.backend import CppBackend
from rlstack.storage.loggers import InMemoryLogger
from rlstack.types import StepType
from tests.acting.test_actor import Output
from tests.envs.informing import Informing, Strange

SIZE = 4
KINDS = [(None, "for_loop"), (None, "thread"), (None, "process"), (2, "thread"), (2, "process")]
pytestmark = pytest.mark.timeout(60)


def make(wait_num, kind, builder=Informing, size=SIZE, **arguments):
    arguments = {"num_workers": 2, **arguments}
    if wait_num is None:
        return SyncEnv(builder, size, kind, **arguments)
    return AsyncEnv(builder, size, wait_num, kind, **arguments)


class Constant:
    """An inferencer that always chooses action 0."""

    def inference(self, env_ids, timestep):
        rows = len(timestep.step_type)
        return Inference(Output(np.zeros(rows, np.int32)), (), np.zeros(rows, np.int32))


def expected(seed, episode):
    """The numbers of one episode, as `Informing` documents them."""
    length = 3 + seed % 2 if episode % 2 else 2
    numbers = {"won": episode % 2, "steps/made": length, "score": 100 * seed + episode}
    return numbers | ({"bonus": 7} if episode % 2 else {})


@pytest.mark.parametrize(("wait_num", "kind"), KINDS)
def test_the_numbers_of_an_episode_come_with_its_end(wait_num, kind):
    ended = dict.fromkeys(range(SIZE), 0)
    with make(wait_num, kind) as env:
        if wait_num is None:
            ids, timestep = env.env_ids, env.reset()
        else:
            env.async_reset()
            ids, timestep = env.recv()
        assert env.episode_metrics(ids) == {}  # no episode has ended
        while min(ended.values()) < 4:
            action = np.zeros(len(ids), np.int32)
            over = ids[timestep.step_type == StepType.LAST]
            env.send(*([action] if wait_num is None else [ids, action]))
            for i in over.tolist():  # asked while the environments reset, as the Actor does
                found = env.episode_metrics(np.array([i]))
                want = expected(i, ended[i])
                assert {name: value.tolist() for name, value in found.items()} == {
                    name: [value] for name, value in want.items()
                }
                ended[i] += 1
            ids, timestep = (env.env_ids, env.recv()) if wait_num is None else env.recv()


@pytest.mark.parametrize(("wait_num", "kind"), KINDS)
def test_an_actor_logs_them_with_their_names(wait_num, kind):
    with make(wait_num, kind) as env:
        actor = Actor(env, Constant(), None)
        logs = [found for found in (actor.step() for _ in range(40)) if found is not None]
    episodes = sum(len(found["actor/episode_return"]) for found in logs)
    assert episodes == sum(len(found["episode/score"]) for found in logs) >= 8
    assert 0 < sum(len(found.get("episode/bonus", ())) for found in logs) < episodes
    scores = np.concatenate([found["episode/score"] for found in logs])
    for env in np.unique(scores // 100):  # each has logged its episodes one after the other
        own = scores[scores // 100 == env] % 100
        assert own.tolist() == list(range(len(own)))
    assert "episode/text" not in logs[0] and "episode/nan" not in logs[0]


def test_run_writes_one_line_for_each_episode():
    logger = InMemoryLogger()
    with make(None, "for_loop") as env:
        Actor(env, Constant(), None).run(lambda: len(logger.records) >= 12, logger)
    returns = [value for _, value in logger.series("actor/episode_return")]
    assert len(returns) == len(logger.records) == len(logger.series("episode/score"))
    assert len(logger.series("episode/bonus")) < len(returns)


def test_a_crashed_episode_has_no_numbers(caplog):
    with make(None, "process", options={"crash": True}) as env:
        env.reset()
        seen = []
        for _ in range(8):
            last = env.step(np.zeros(SIZE, np.int32)).last()
            seen.append(env.episode_metrics(env.env_ids[last]).get("score", np.zeros(0)).tolist())
        restarts = env.stats()["restarts"]
    assert [score for found in seen for score in found][:SIZE] == [0, 100, 200, 300]
    assert restarts >= 2 and seen[3] == []  # truncated in the second episode's first step


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
def test_an_info_that_is_no_dict_is_ignored(kind):
    with make(None, kind, Strange) as env:
        env.reset()
        for _ in range(3):
            env.step(np.zeros(SIZE, np.int32))
        assert env.episode_metrics(env.env_ids) == {}


def test_many_numbers_arrive_whole():
    """A message of many numbers comes through a worker's socket in several pieces."""
    with make(None, "process", "tests.envs.informing:Verbose", 2, num_workers=1) as env:
        env.reset()
        env.step(np.zeros(2, np.int32))
        env.step(np.zeros(2, np.int32))
        found = env.episode_metrics(env.env_ids)
    assert len(found) > 20_000
    assert all(values.tolist() == [i, i] for i, values in enumerate(found.values()))


@pytest.mark.parametrize("kind", ["for_loop", "process"])
def test_the_metrics_of_entities(kind):
    def build(seed):
        return as_dm_env(MultiSnake(num_snakes=2, num_players=2, num_steps=5, seed=seed))

    with make(None, kind, build, 2) as env:
        timestep = env.reset()
        while not timestep.last().all():
            action = {"move": np.zeros((2, 2), np.int32)}
            timestep = env.step(action)
        found = env.episode_metrics(env.env_ids)
    assert set(found) == {"reward_0", "reward_1"}
    assert [len(values) for values in found.values()] == [2, 2]


@pytest.mark.parametrize("direct", [True, False])
def test_numbers_of_envpool(direct):
    pytest.importorskip("envpool")
    options = {"max_episode_steps": 4}
    backend = CppBackend("HalfCheetah-v4", PoolConfig(3, 3, options=options), direct=direct)
    assert backend.direct is direct
    ids = np.arange(3, dtype=np.int32)
    before = None
    backend.reset()
    backend.recv()
    for _ in range(4):
        backend.send(None, [np.ones((3, 6))])
        before = backend.recv()[1]
    assert (before.step_type == StepType.LAST).all()
    found = backend.episode_metrics(ids)
    backend.close()
    assert {"reward_run", "reward_ctrl", "x_position", "x_velocity"} <= set(found)
    # HalfCheetah's reward is the sum of its two parts.
    np.testing.assert_allclose(found["reward_run"] + found["reward_ctrl"], before.reward, rtol=1e-5)
