"""The Actor: its calls, their arguments and order, and its counters."""

import functools
import threading
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np
import pytest

from rlstack.acting.actor import Actor, transition_spec
from rlstack.acting.inference import Inference
from rlstack.acting.inferencer import Inferencer
from rlstack.configs.acting import InferencerConfig
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.fused.acting import account, no_tally
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.storage.loggers import InMemoryLogger
from rlstack.types import EnvSpec, TimeStep
from tests.agent_cases import FIRST, LAST, MID, case, settings
from tests.envs.seats.echo import UnequalSeats


class Output(NamedTuple):
    action: Any


class Countdown(gymnasium.Env):
    """With seed s, episodes have s + 1 steps; step t gives reward t; the observation is [s, t]."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, seed):
        self.name, self.t = seed, 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.array([self.name, 0], np.float32), {}

    def step(self, action):
        assert action == 10 * self.name + self.t, "the answer to another environment or step"
        self.t += 1
        observation = np.array([self.name, self.t], np.float32)
        return observation, float(self.t), self.t == self.name + 1, False, {}


class Echo:
    """Outputs 10 times the environment's name plus its time, as `Countdown` expects."""

    def __init__(self, journal=None):
        self.journal = [] if journal is None else journal

    def inference(self, env_ids, timestep):
        self.journal.append(("inference", env_ids, timestep))
        rows = len(timestep.step_type)
        action = (timestep.observation @ np.array([10, 1])).astype(np.int32)
        version = np.full(rows, 3, np.int32)
        return Inference(Output(action), {"state": np.arange(rows)}, version)


class ActsZero:
    """Acts 0 in every row."""

    def inference(self, env_ids, timestep):
        zeros = np.zeros(len(timestep.step_type), np.int32)
        return Inference(Output(zeros), (), zeros)


class Memory:
    """A replay that records the steps that it receives."""

    def __init__(self, journal=None):
        self.journal = [] if journal is None else journal
        self.added = []

    def add(self, env_ids, transition, timeout=None):
        self.journal.append(("add", env_ids, transition))
        self.added.append((env_ids, transition))


class ScriptedEnv:
    """Returns the rows of a script and records its calls."""

    def __init__(self, script, journal, is_sync=True, ids=None):
        self.script, self.journal, self.is_sync = iter(script), journal, is_sync
        self.ids = ids and iter(ids)
        self.num_envs = 2
        self.env_ids = np.arange(2, dtype=np.int32)

    def reset(self):
        self.journal.append(("reset",))
        return next(self.script)

    def async_reset(self):
        self.journal.append(("async_reset",))

    def recv(self):
        self.journal.append(("recv",))
        if self.is_sync:
            return next(self.script)
        return np.array(next(self.ids), np.int32), next(self.script)

    def send(self, *ids_and_action):
        self.journal.append(("send", *ids_and_action))


def rows(step_type, reward):
    step_type = np.array(step_type, np.int32)
    observation = np.zeros((len(step_type), 2), np.float32)
    ones = np.ones(len(step_type), np.float32)
    return TimeStep(step_type, np.array(reward, np.float32), ones, observation)


def test_a_sync_step_remembers_while_the_environments_step():
    journal = []
    script = [rows([FIRST, FIRST], [0, 0]), rows([MID, LAST], [1, 2]), rows([MID, FIRST], [4, 0])]
    actor = Actor(ScriptedEnv(script, journal), Echo(journal), Memory(journal))
    assert actor.step() is None
    logs = actor.step()
    names = [entry[0] for entry in journal]
    assert names == ["reset", *["inference", "send", "add", "recv"] * 2]
    assert journal[1][1] is None and journal[3][1] is None  # all environments, in order
    seen, transition = journal[1][2], journal[3][2]
    assert transition.timestep is seen is script[0]
    assert transition.params_version.tolist() == [3, 3]
    assert transition.agent_state["state"].tolist() == [0, 1]
    assert transition.agent_output.action is journal[2][1]
    assert logs["actor/episode_return"].tolist() == [2]
    assert logs["actor/episode_length"].tolist() == [1]
    assert (actor.env_frames, actor.episodes) == (2, 1)  # no action leads to FIRST


def test_an_async_step_sends_to_whom_it_received_from():
    journal = []
    script = [rows([FIRST], [0]), rows([FIRST], [0]), rows([LAST], [5]), rows([FIRST], [0])]
    env = ScriptedEnv(script, journal, is_sync=False, ids=[[1], [0], [1], [1]])
    actor = Actor(env, Echo(journal), Memory(journal), rank=3)
    logs = [actor.step() for _ in range(3)]
    names = [entry[0] for entry in journal]
    assert names == ["async_reset", "recv", *["inference", "send", "add", "recv"] * 3]
    assert [entry[1].tolist() for entry in journal if entry[0] == "send"] == [[1], [0], [1]]
    # Global ids are rank * num_envs + id.
    assert [entry[1].tolist() for entry in journal if entry[0] == "add"] == [[7], [6], [7]]
    assert logs[:2] == [None, None]
    assert logs[2]["actor/episode_return"].tolist() == [5]


def test_a_sync_actor_of_higher_rank_names_its_environments():
    journal = []
    script = [rows([FIRST, FIRST], [0, 0])] * 2
    Actor(ScriptedEnv(script, journal), Echo(journal), None, rank=2).step()
    assert journal[1][1].tolist() == [4, 5]


def by_hand(num_envs, num_steps):
    """The frames and episodes of environment i after it has returned `num_steps` steps."""
    frames = episodes = 0
    for length in range(1, num_envs + 1):
        whole, rest = divmod(num_steps, length + 1)  # an episode of n actions has n + 1 steps
        frames += whole * length + max(rest - 1, 0)
        episodes += whole
    return frames, episodes


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_real_environments_in_step(rank):
    with SyncEnv(Countdown, 3, "for_loop") as env:
        actor, returns = Actor(env, Echo(), Memory(), rank), []
        for _ in range(24):
            logs = actor.step()
            if logs:
                length = logs["actor/episode_length"]
                np.testing.assert_array_equal(
                    logs["actor/episode_return"], length * (length + 1) / 2
                )
                returns += logs["actor/episode_return"].tolist()
    assert (actor.env_frames, actor.episodes) == by_hand(3, 24)
    assert sorted(returns) == [1] * 12 + [3] * 8 + [6] * 6


@pytest.mark.timeout(60)
def test_real_environments_in_threads():
    memory = Memory()
    with AsyncEnv(Countdown, 3, 2, "thread") as env:
        actor, episodes = Actor(env, Echo(), memory), []
        for _ in range(60):
            logs = actor.step()
            if logs:
                episodes += zip(
                    logs["actor/episode_length"], logs["actor/episode_return"], strict=True
                )
    assert all(total == length * (length + 1) / 2 for length, total in episodes)
    assert len(episodes) == actor.episodes
    # Per environment, the steps in replay order are complete and come from that environment.
    streams = {0: [], 1: [], 2: []}
    for env_ids, transition in memory.added:
        for row, env_id in enumerate(env_ids):
            streams[int(env_id)].append(jax.tree.map(lambda x, i=row: x[i], transition))
    frames = 0
    for env_id, stream in streams.items():
        for t, transition in enumerate(stream):
            at = t % (env_id + 2)
            assert transition.timestep.observation.tolist() == [env_id, at]
            assert transition.timestep.first() == (at == 0)
            assert transition.timestep.last() == (at == env_id + 1)
            frames += at > 0
    assert frames == actor.env_frames


def test_run_goes_on_until_told_to_stop():
    answers = iter([False] * 5 + [True])
    memory = Memory()
    with SyncEnv(Countdown, 2, "for_loop") as env:
        Actor(env, Echo(), memory).run(stop=functools.partial(next, answers))
    assert len(memory.added) == 5


def test_run_logs_each_episode_and_closes_the_environments_it_made():
    logger, stop, made = InMemoryLogger(), threading.Event(), []

    def build():
        made.append(SyncEnv(Countdown, 2, "for_loop"))
        return made[0]

    class Last(Memory):
        def add(self, env_ids, transition, timeout=None):
            super().add(env_ids, transition)
            if len(self.added) == 6:
                stop.set()

    actor = Actor(build, Echo(), Last())
    actor.run(stop, logger)
    # Episodes of the first environment have one step, of the second two, then one to reset.
    returns = logger.series("actor/episode_return")
    assert returns == [(2, 1), (3, 3), (4, 1), (7, 1), (7, 3)]
    with pytest.raises(RuntimeError, match="closed"):
        made[0].reset()


def test_run_waits_for_room_until_told_to_stop_or_the_replay_is_closed():
    class Full(Memory):
        def add(self, env_ids, transition, timeout=None):
            self.added.append(timeout)
            raise ReplayTimeoutError

    class Closed(Memory):
        def add(self, env_ids, transition, timeout=None):
            raise ReplayClosedError

    full, answers = Full(), iter([False, False, True])
    with SyncEnv(Countdown, 2, "for_loop") as env:
        Actor(env, Echo(), full).run(stop=functools.partial(next, answers))
        assert full.added == [1.0, 1.0]
        Actor(env, Echo(), Closed()).run()
        with pytest.raises(ReplayClosedError):
            Actor(env, Echo(), Closed()).step()


@pytest.mark.parametrize("name", ["ppo-lstm", "ppo-structured", "dqn"])
def test_the_transition_spec_is_what_an_actor_writes(name):
    c = case(name)
    spec = EnvSpec(settings()[name].obs_spec, settings()[name].action_spec)

    class Source:
        def get_params(self, newer_than=-1):
            return 0, c.params

    class Env:
        num_envs, is_sync = 2, True

        def reset(self):
            return jax.tree.map(lambda x: x[0, :2], c.batch.trajectory.timestep)

        def send(self, action):
            pass

        def recv(self):
            return self.reset()

    memory = Memory()
    inferencer = Inferencer(InferencerConfig(), c.agent, Source(), 2, c.key)
    Actor(Env(), inferencer, memory).step()
    expected = transition_spec(c.agent, spec)
    (_, written), *_ = memory.added
    assert jax.tree.structure(written) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        assert (x.shape[1:], x.dtype) == (y.shape, y.dtype)


def test_steps_of_a_seat_that_has_left_are_no_frames():
    """Games of 3 steps; the right seat leaves in the first: 3 + 1 frames in each game."""
    with SyncEnv(UnequalSeats, 2, "for_loop", options={"length": 3}) as pool:
        actor = Actor(pool, ActsZero(), None)
        logs = [actor.step() for _ in range(4 * 2)]
    assert actor.env_frames == 2 * (3 + 1) and actor.episodes == 2 * 2
    found = [one and one["actor/episode_length"].tolist() for one in logs]
    assert found == [None, [1], None, [3]] * 2
    returns = [one["actor/episode_return"].tolist() for one in logs if one]
    assert returns == [[10], [0]] * 2


def test_a_compiled_loop_counts_neither():
    kinds = np.array([[0, 0], [1, 2], [1, 0], [2, 0]])  # of two seats, by step
    rewards = np.array([[0, 0], [1, 12], [1, 0], [1, 0]], np.float32)
    returns, lengths, tally = np.zeros(2), np.zeros(2, np.int32), no_tally(2)
    for kind, reward in zip(kinds, rewards, strict=True):
        timestep = TimeStep(kind, reward, np.ones(2), ())
        nothing = np.zeros(2, np.uint8), np.zeros(2, np.int32)
        returns, lengths, stepped = account(timestep, returns, lengths, *nothing)
        tally = stepped.after(tally)
    assert tally.frames.tolist() == [3, 1] and tally.episodes.tolist() == [1, 1]
    assert tally.returns.tolist() == [3, 12] and tally.lengths.tolist() == [3, 1]
