"""A budget of updates is kept where a replay gives several batches at once."""

import contextlib
from types import SimpleNamespace

import pytest

from rlstack.programs.build.player import Player
from rlstack.programs.program.learner import LearnerNode
from rlstack.programs.run.run_session import drive
from rlstack.programs.run.single_process import SingleProcessRun


class _Learner:
    version = 0

    def update_from(self, replay, most):
        assert self.version < most
        replay.sample()
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


def _player(replay, learner):
    player = Player.__new__(Player)
    player.replay, player.learner = replay, learner
    player._base_frames = 0
    player.actor = SimpleNamespace(act=replay.step, receive=lambda: None, env_frames=0)
    return player


@pytest.mark.parametrize(("budget", "steps"), [(1, 3), (4, 3), (6, 6), (8, 6)])
def test_a_single_process_makes_as_many_updates_as_asked(budget, steps):
    replay, learner, logged = _Replay(), _Learner(), []
    loop = SingleProcessRun.__new__(SingleProcessRun)
    loop.experiment = SimpleNamespace(updates=budget, steps_per_update=3)
    loop.players = {"": _player(replay, learner)}
    loop.learners, loop._learning = {"": learner}, loop.players
    loop._shared, loop._started, loop._phase = None, set(), lambda _: contextlib.nullcontext()
    loop.stats = dict
    periodic = SimpleNamespace(
        ended_by=lambda frames, updates: "updates" if updates >= budget else "",
        log=lambda *_: logged.append(learner.version),
        tick=lambda *_: None,
    )
    drive(loop, periodic, lambda: replay.steps > 100)
    assert (learner.version, replay.drawn, replay.steps) == (budget, budget, steps)


@pytest.mark.parametrize(("budget", "updates"), [(0, 8), (1, 1), (6, 6), (8, 8), (9, 8)])
def test_each_policy_of_a_set_makes_as_many_updates_as_asked(budget, updates):
    replay, learner = _Replay(), _Learner()
    replay.steps = 6
    loop = SingleProcessRun.__new__(SingleProcessRun)
    loop.experiment = SimpleNamespace(updates=budget)
    loop._started, loop._phase = set(), lambda _: contextlib.nullcontext()
    loop._learn("left", _player(replay, learner), SimpleNamespace(log=lambda *_: None))
    assert learner.version == updates


@pytest.mark.parametrize(
    ("budget", "made", "enough"), [(0, 99, 0), (6, 5, 0), (6, 6, 1), (6, 7, 1)]
)
def test_a_learner_node_has_learned_enough_at_its_budget(budget, made, enough):
    node = LearnerNode.__new__(LearnerNode)
    node._setup = SimpleNamespace(experiment=SimpleNamespace(updates=budget))
    node._learner = SimpleNamespace(version=made)
    assert node._has_learned_enough() == bool(enough)
