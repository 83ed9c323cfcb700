"""Callbacks are told what happens, in the process of the caller, in every topology."""

import dataclasses
import io
import os

import numpy as np
import pytest

from rlstack.checks import WrongKindError
from rlstack.programs.run import train
from rlstack.programs.session.callbacks import Callback, Events
from rlstack.storage import checkpoint
from tests.programs import running

pytestmark = pytest.mark.timeout(120, method="thread")


class Recorder(Callback):
    """Keeps everything, with the process that called it."""

    def __init__(self):
        self.updates, self.episodes, self.evaluations, self.checkpoints = [], [], [], []
        self.processes = set()
        self.unpicklable = lambda: None

    def on_update(self, update, logs):
        self.processes.add(os.getpid())
        self.updates.append((update, logs))

    def on_episode(self, frames, episode_return, length):
        self.episodes.append((frames, episode_return, length))

    def on_evaluation(self, frames, evaluation):
        self.evaluations.append((frames, evaluation))

    def on_checkpoint(self, frames, path):
        self.checkpoints.append((frames, path))


def experiment(topology, frames=3000, **changes):
    made = running.ppo(topology, frames=frames, **changes)
    evaluator = dataclasses.replace(made.evaluator, period=1000)
    return dataclasses.replace(made, evaluator=evaluator, checkpoint_period=1000)


def check(seen, result, directory):
    assert seen.processes == {os.getpid()}
    assert [update for update, _ in seen.updates] == list(range(1, result.learner_steps + 1))
    assert all(np.isfinite(logs["loss"]) for _, logs in seen.updates)
    assert len(seen.episodes) > 10
    assert all(total == length > 0 for _, total, length in seen.episodes)  # CartPole
    assert seen.evaluations[-1][1].returns.mean() == result.eval_return_mean
    assert len(seen.evaluations) >= 2
    assert [f for f, _ in seen.evaluations] == sorted(f for f, _ in seen.evaluations)
    frames, path = seen.checkpoints[-1]
    assert path == checkpoint.latest(directory / "checkpoints")
    assert frames == checkpoint.step_of(path) == result.env_frames
    assert len(seen.checkpoints) >= 2


# Nodes find out what is due a few times in a second, in which they may make thousands of frames.
@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("topology", "frames"), [("single_process", 3000), ("heavy_env", 15_000)])
def test_callbacks_see_updates_episodes_evaluations_and_checkpoints(topology, frames, tmp_path):
    seen = Recorder()
    made = experiment(topology, frames)
    result = train.run(made, tmp_path / "run", callbacks=[seen], stream=io.StringIO())
    check(seen, result, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["light_env", "distributed"])
def test_nodes_in_processes_call_the_same_object(topology, tmp_path):
    seen = Recorder()
    launched = {"program": {"launch": "processes"}, "replay": {"service": "table"}}
    made = experiment(topology, 15_000, **launched)
    with running.nothing_left():
        result = train.run(made, tmp_path / "run", callbacks=[seen], stream=io.StringIO())
    check(seen, result, tmp_path / "run")


class Stopper:
    """Ends training at the third update, without a base class."""

    def on_update(self, update, logs):
        return f"update {update} of three" if update >= 3 else None


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["single_process", "heavy_env"])
def test_a_callback_ends_training(topology, tmp_path):
    made = running.ppo(topology, frames=200_000)
    result = train.run(made, tmp_path, callbacks=[Stopper()], stream=io.StringIO())
    assert result.ended_by == "Stopper.on_update: update 3 of three"
    assert result.env_frames < 100_000 and result.eval_episodes == 2
    if topology == "single_process":
        assert result.learner_steps == 3


class Failing(Callback):
    """Raises an exception at every episode."""

    def on_episode(self, frames, episode_return, length):
        raise KeyError("nothing")


def test_a_failing_callback_is_told_once_and_ends_nothing(tmp_path):
    with open(tmp_path / "shown", "w") as stream:
        made = running.ppo("single_process", frames=1500)
        result = train.run(made, tmp_path / "run", callbacks=[Failing()], stream=stream)
    assert result.env_frames >= 1500
    shown = (tmp_path / "shown").read_text()
    assert shown.count("Failing.on_episode raised KeyError: 'nothing' (in ") == 1


class Misspelt:
    def on_evaluatoin(self, frames, evaluation):
        pass


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (Misspelt(), "Did you mean on_evaluation"),
        (object(), "some of the methods"),
        (Recorder, "got <class"),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_starts(callback, text, tmp_path):
    made = running.ppo("single_process", frames=300)
    with pytest.raises(WrongKindError, match=text):
        train.run(made, tmp_path / "run", callbacks=[callback])
    assert not (tmp_path / "run").exists()


def test_each_update_and_episode_in_a_report_is_an_event():
    sent = []
    events = Events(lambda *event: sent.append(event), lambda: (900, 12))
    events.log({"learner/loss": [1.0, 2.0], "actor/episode_return": [5], "env/restarts": 0})
    events.log({"actor/episode_return": [7.5], "actor/episode_length": np.array([3])})
    assert sent == [
        ("update", 11, {"loss": 1.0}),
        ("update", 12, {"loss": 2.0}),
        ("episode", 900, (7.5, 3)),
    ]
