"""A budget of updates is kept where a replay gives several batches at once."""

import contextlib
from types import SimpleNamespace

import pytest

from rlstack.programs.program.learner import LearnerNode
from rlstack.programs.run.multi_policy import SeveralPolicies
from rlstack.programs.run.single_process import SingleProcess


class _Learner:
    version = 0

    def step(self, sample):
        del sample
        self.version += 1
        return {}


class _Replay:
    """Gives four batches for each unroll of three steps."""

    steps = 0
    drawn = 0

    def step(self):
        self.steps += 1
        return {}

    def can_sample(self):
        return self.drawn < self.steps // 3 * 4

    def sample(self):
        self.drawn += 1


@pytest.mark.parametrize(("budget", "steps"), [(1, 3), (4, 3), (6, 6), (8, 6)])
def test_a_single_process_makes_as_many_updates_as_asked(budget, steps):
    replay, learner, logged = _Replay(), _Learner(), []
    loop = SingleProcess.__new__(SingleProcess)
    loop.experiment = SimpleNamespace(updates=budget, steps_per_update=3)
    loop.actor = SimpleNamespace(step=replay.step, env_frames=0)
    loop.replay, loop.learner, loop._base_frames = replay, learner, 0
    loop._phase = lambda _: contextlib.nullcontext()
    periodic = SimpleNamespace(
        ended_by=lambda frames, updates: "updates" if updates >= budget else "",
        log=lambda *_: logged.append(learner.version),
        tick=lambda *_: None,
    )
    loop.train(periodic, lambda: replay.steps > 100)
    assert (learner.version, replay.drawn, replay.steps) == (budget, budget, steps)


@pytest.mark.parametrize(("budget", "updates"), [(0, 8), (1, 1), (6, 6), (8, 8), (9, 8)])
def test_each_policy_of_a_set_makes_as_many_updates_as_asked(budget, updates):
    replay, learner = _Replay(), _Learner()
    replay.steps = 6
    loop = SeveralPolicies.__new__(SeveralPolicies)
    loop.experiment = SimpleNamespace(updates=budget)
    loop._phase = lambda _: contextlib.nullcontext()
    parts = SimpleNamespace(replay=replay, learner=learner)
    loop._learn("left", parts, SimpleNamespace(log=lambda *_: None))
    assert learner.version == updates


@pytest.mark.parametrize(
    ("budget", "made", "enough"), [(0, 99, 0), (6, 5, 0), (6, 6, 1), (6, 7, 1)]
)
def test_a_learner_node_has_learned_enough_at_its_budget(budget, made, enough):
    node = LearnerNode.__new__(LearnerNode)
    node._setup = SimpleNamespace(experiment=SimpleNamespace(updates=budget))
    node._learner = SimpleNamespace(version=made)
    assert node._has_learned_enough() == bool(enough)
