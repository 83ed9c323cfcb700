"""Step processors: what they see on every pool, what is stored, and what is refused."""

import gymnasium
import numpy as np
import pytest

from rlstack.acting.actor import Actor
from rlstack.acting.inference import Inference
from rlstack.acting.step_processor import Step, WholeEpisodes, make_processor
from rlstack.checks import WrongKindError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.types import StepType

pytestmark = pytest.mark.timeout(60)
FIRST, MID, LAST = StepType


class Counting(gymnasium.Env):
    """An episode of `length` steps; info has the time, and every third episode is truncated."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=4):
        self._length, self._episode = length, 0

    def reset(self, *, seed=None, options=None):
        self._time = 0
        self._episode += 1
        return np.zeros(1, np.float32), {"ignored": 1.0}

    def step(self, action):
        self._time += 1
        over, cut = self._time == self._length, self._episode % 3 == 0
        info = {"time": self._time, "at": {"even": self._time % 2 == 0}, "text": "no number"}
        observation = np.array([self._time], np.float32)
        return observation, float(self._time), over and not cut, over and cut, info


class Zeros:
    """Always takes action 0."""

    def inference(self, env_ids, timestep):
        from tests.replay.replay_model import Output

        count = len(timestep.reward)
        zeros = np.zeros(count, np.float32)
        output = Output(np.zeros(count, np.int32), zeros)
        return Inference(output, (), np.zeros(count, np.int32))


class Stored:
    """A replay writer that keeps every step, by environment."""

    def __init__(self):
        self.steps = {}

    def add(self, env_ids, transition):
        timestep = transition.timestep
        for row, env in enumerate(env_ids.tolist()):
            self.steps.setdefault(env, []).append(
                (int(timestep.step_type[row]), float(timestep.reward[row]),
                 float(timestep.discount[row]), float(timestep.observation[row, 0]))
            )  # fmt: skip


POOLS = {
    "for_loop": lambda **more: SyncEnv(Counting, 3, "for_loop", step_info=True, **more),
    "thread": lambda **more: AsyncEnv(Counting, 3, 2, "thread", step_info=True, **more),
    "process": lambda **more: SyncEnv(
        "tests.acting.test_step_processor:Counting", 3, "process", num_workers=2, step_info=True
    ),
}


def run(pool, processor, steps=26, envs=0):
    """Returns the stored steps by environment, and the logs.

    It takes at least `steps` steps, and goes on until `envs` environments have stored some: on a
    busy machine an asynchronous pool may return one of them late.
    """
    stored, logs = Stored(), []
    actor = Actor(pool, Zeros(), stored, step_processor=processor)
    while steps > 0 or len(stored.steps) < envs:
        steps -= 1
        found = actor.step()
        if found is not None:
            logs.append(found)
    return stored.steps, logs


@pytest.mark.parametrize("kind", POOLS)
def test_infos_reach_the_processor_and_the_logs(kind):
    seen = []

    def processor(step):
        seen.extend(zip(step.timestep.observation[:, 0].tolist(), step.infos, strict=True))
        return step.replace(reward=step.info("time", default=0.0) * 2)

    with POOLS[kind]() as pool:
        stored, logs = run(pool, processor, envs=3)
    assert {time for time, _ in seen} == {0.0, 1.0, 2.0, 3.0, 4.0}
    for time, info in seen:
        assert info == ({"time": time, "at/even": time % 2 == 0} if time else {})
    assert set(stored) == {0, 1, 2}
    episodes = [(FIRST, 0, 1, 0), (MID, 2, 1, 1), (MID, 4, 1, 2), (MID, 6, 1, 3)]
    for steps in stored.values():
        for at, step in enumerate(steps):
            truncated = at // 5 % 3 == 2
            expected = [*episodes, (LAST, 8, float(truncated), 4)][at % 5]
            assert step == expected, at
    for line in logs:
        assert line["actor/episode_return"].tolist() == [10.0] * len(line["info/time"])
        assert set(line["info/time"]) == {2.5} and set(line["info/at/even"]) == {0.5}


def test_whole_episodes_are_stored_when_they_have_ended():
    received = []

    def to_go(episode, infos):
        received.append((len(infos), infos[0], infos[-1]["time"]))
        reward = episode.timestep.reward[::-1].cumsum()[::-1]
        reward = np.where(episode.timestep.step_type == FIRST, 0, reward)
        return episode._replace(timestep=episode.timestep._replace(reward=reward))

    with SyncEnv(Counting, 2, "for_loop", step_info=True) as pool:
        stored, _ = run(pool, WholeEpisodes(to_go), steps=18)
    assert received == [(5, {}, 4.0)] * 6
    for steps in stored.values():
        assert [kind for kind, *_ in steps] == [FIRST, MID, MID, MID, LAST] * 3
        assert [reward for _, reward, *_ in steps] == [0, 10, 9, 7, 4] * 3
        assert [discount for *_, discount, _ in steps[4::5]] == [0, 0, 1]


def test_steps_that_are_dropped_are_not_stored():
    def odd(step):
        keep = step.env_ids % 2 == 1
        rows = np.flatnonzero(keep)
        import jax

        return Step(
            step.env_ids[rows], jax.tree.map(lambda x: x[rows], step.transition),
            [step.infos[row] for row in rows],
        )  # fmt: skip

    with SyncEnv(Counting, 4, "for_loop", step_info=True) as pool:
        assert set(run(pool, odd, steps=6)[0]) == {1, 3}
        assert run(pool, lambda step: None, steps=6)[0] == {}


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda step: step.replace(step_type=np.ones(2, int)), "FIRST must follow LAST"),
        (lambda step: step.replace(reward=np.ones(2)), "0 at FIRST"),
        (lambda step: step.replace(reward=np.full(2, np.nan)), "must be finite"),
        (lambda step: step.replace(discount=np.full(2, 0.5)), "be 1 at FIRST"),
        (lambda step: step.replace(reward=np.zeros(3)), "one row for each"),
        (lambda step: step._replace(env_ids=np.array([0, 7])), r"ids in 0\.\.1"),
        (lambda step: step._replace(env_ids=np.array([1, 1])), "distinct"),
        (lambda step: [step, step], "FIRST must follow LAST"),
        (lambda step: 3, "return steps or None; got int 3"),
        (lambda step: [step.transition], "got Transition"),
        *(
            (change, "arrays of the shapes that they had.* only observation_processor may leave")
            for change in (
                lambda step: step.replace(observation=step.timestep.observation[:, :0]),
                lambda step: step.replace(observation=step.timestep.observation[:, None]),
                lambda step: step.replace(observation=np.zeros((3, 1), np.float32)),
                lambda step: step.replace(observation={"a": np.zeros((2, 1)), "b": np.zeros(2)}),
                lambda step: step._replace(
                    transition=step.transition._replace(agent_output=np.zeros((2, 5)))
                ),
            )
        ),
    ],
)
def test_steps_that_break_the_rules_are_refused(change, text):
    with (
        SyncEnv(Counting, 2, "for_loop", step_info=True) as pool,
        pytest.raises(TypeError, match=text),
    ):
        run(pool, change, steps=1)


@pytest.mark.parametrize(
    "hook, text",
    [
        ("no_module_of_this_name:f", "no module"),
        (lambda: None, "does not take these arguments"),
        (lambda num_envs: num_envs, "got int 4"),
        (lambda num_envs: lambda: None, "too many positional"),
    ],
)
def test_what_is_no_processor_is_refused_at_once(hook, text):
    with pytest.raises(ValueError, match=text):
        make_processor(hook, 4)
    assert issubclass(WrongKindError, ValueError)
