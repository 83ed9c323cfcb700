"""What ends training, and loggers of the user's own."""

import dataclasses
import io
import json
import time

import pytest

from rlstack.programs.build.hooks import check_hooks
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.run import train
from rlstack.programs.session.own_loggers import own_loggers
from rlstack.programs.session.stopping import RETURN, StopRules, spent_budget
from tests.programs.hooks import own
from tests.programs.running import metrics, nothing_left, ppo, run, series

OWN = "tests.programs.hooks.own"


def rules(**cfg):
    told = []
    return StopRules(StopConfig(**cfg), told.append), told


def test_the_first_budget_that_is_spent_is_named():
    experiment = dataclasses.replace(ppo("single_process", frames=100), updates=5, hours=1.0)
    assert spent_budget(experiment, 99, 4, 3599.0) == ""
    assert spent_budget(experiment, 100, 4, 0.0) == "frames"
    assert spent_budget(experiment, 99, 5, 0.0) == "updates"
    assert spent_budget(experiment, 99, 4, 3600.0) == "hours"
    unlimited = dataclasses.replace(experiment, updates=0, hours=0.0)
    assert spent_budget(unlimited, 99, 10**9, 1e9) == ""


def test_training_stops_when_a_return_is_reached():
    made, _ = rules(return_reached=10.0)
    made.see(1, {"learner/loss": 20.0})
    made.see(2, {RETURN: 9.9})
    assert made.reason == ""
    made.see(3, {RETURN: 10.0})
    assert made.reason == "stop.return_reached: 10 >= 10"


def test_training_stops_after_a_number_of_episodes():
    made, _ = rules(episodes=20)
    made.see(1, {"actor/episodes": 19, RETURN: 99.0})
    made.see(2, {"learner/loss": 20.0})
    assert made.reason == ""
    made.see(3, {"actor/episodes": 21})
    assert made.reason == "stop.episodes: 21 >= 20"


def test_training_stops_without_progress(tmp_path):
    made, _ = rules(patience=2)
    for value in (1.0, 0.5, 2.0, 2.0):
        made.see(0, {RETURN: value})
        made.see(0, {"learner/loss": 1.0})
        assert made.reason == ""
    made.see(0, {RETURN: 1.0})
    assert made.reason == "stop.patience: 2 evaluations without a better return than 2"
    # A resumed run counts the evaluations of the commands before it; they do not end it.
    lines = [{"env_frames": i, RETURN: value} for i, value in enumerate((3.0, 1.0, 1.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed, _ = rules(patience=2)
    resumed.replay(tmp_path / "metrics.jsonl")
    assert resumed.reason == ""
    resumed.see(4, {RETURN: 2.0})
    assert resumed.reason.startswith("stop.patience: 3 evaluations")


def test_a_rule_that_fails_is_told_once_and_ends_nothing():
    made, told = rules(factory=f"{OWN}:raising")
    made.see(1, {})
    made.see(2, {})
    assert made.reason == ""
    place = f'{own.__file__}:60: return logs["no such log"]'
    assert told == [f"the stop rule {OWN}:raising raised KeyError: 'no such log' (in {place})"]


def written(run_dir):
    return [json.loads(line) for line in (run_dir / "own.jsonl").open()]


@pytest.mark.slow
@pytest.mark.chosen
def test_updates_end_a_run_and_loggers_of_ones_own_see_every_line(tmp_path):
    told = io.StringIO()
    loggers = ("jsonl", own.Lines, f"{OWN}:Failing")
    experiment = ppo("single_process", frames=10**6, updates=4, loggers=loggers)
    result = train.run(experiment, tmp_path / "run", stream=told)
    assert (result.learner_steps, result.ended_by) == (4, "updates")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["ended_by"] == "updates"
    lines = written(tmp_path / "run")
    assert lines.pop() == {"closed": True}
    expected = [{**line, "step": line["env_frames"]} for line in metrics(tmp_path / "run")]
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    assert all(line.items() <= other.items() for line, other in zip(lines, expected, strict=True))
    # Neither TensorBoard nor the terminal was asked for; the failure is told once.
    assert not (tmp_path / "run" / "tensorboard").exists()
    name = f"{OWN}:Failing"
    assert told.getvalue().splitlines()[-1] == (
        f"the logger {name} raised ConnectionError: the tracking server is down "
        f"(in {own.__file__}:31: "
        'raise ConnectionError("the tracking server is down")); the run goes on.'
    )
    assert "frames/s" not in told.getvalue()
    # The class is recorded by its name.
    recorded = from_json((tmp_path / "run" / "config.json").read_text())
    assert recorded.loggers == ("jsonl", f"{OWN}:Lines", name)
    # A run that has spent a budget stays as it is; with another one it goes on.
    assert train.resume(tmp_path / "run") == result
    more = train.resume(tmp_path / "run", updates=6, stream=io.StringIO())
    assert (more.learner_steps, more.ended_by) == (6, "updates")


def test_hours_and_rules_end_a_run(tmp_path):
    hours = ppo("single_process", frames=10**7, hours=0.5 / 3600, loggers=("jsonl",))
    result = train.run(hours, tmp_path / "hours", stream=io.StringIO())
    assert result.ended_by == "hours"
    assert 0.5 <= result.wall_seconds < 20
    ruled = ppo("single_process", frames=10**6, stop=StopConfig(factory=own.After))
    result = train.run(ruled, tmp_path / "rule", stream=io.StringIO())
    assert result.ended_by == f"{OWN}:After: enough updates"
    assert series(tmp_path / "rule", "learner/steps")[-1] >= 3
    assert train.resume(tmp_path / "rule", stream=io.StringIO()) == result


@pytest.mark.timeout(30)
def test_a_logger_that_hangs_neither_delays_nor_outlives_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rlstack.programs.session.own_loggers._CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("rlstack.programs.session.own_loggers._MAX_WAITING", 3)
    told = []
    (logger,) = own_loggers([own.Hanging], tmp_path, told.append)
    started = time.monotonic()
    for step in range(100):
        logger.write(step, {"x": 1.0})
    logger.close()
    assert time.monotonic() - started < 5
    assert told == [
        f"the logger {OWN}:Hanging is 3 lines behind, and loses lines; the run goes on."
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loggers": ("jsnol",)}, "got 'jsnol'; did you mean 'jsonl'?"),
        ({"loggers": (f"{OWN}:takes_nothing",)}, "does not take these arguments"),
        ({"loggers": (f"{OWN}:Missing",)}, "has no 'Missing'"),
        ({"stop": StopConfig(factory=f"{OWN}:takes_nothing")}, "got NoneType None"),
        (
            {"stop": StopConfig(factory="no.such:rule")},
            "Experiment: stop.factory 'no.such:rule': there is no module 'no'; run where it can be "
            "imported",
        ),
    ],
)
def test_hooks_that_do_not_fit_are_refused_before_anything_starts(tmp_path, changes, message):
    experiment = ppo("single_process", **changes)
    with pytest.raises(ValueError) as caught:
        train.run(experiment, tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
    check_hooks(ppo("single_process"))
    assert from_json(to_json(experiment)) == experiment


def test_rules_on_evaluations_need_evaluations():
    with pytest.raises(ValueError, match=r"evaluator\.period must be positive"):
        ppo("single_process", stop=StopConfig(patience=3))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("pacing", ["asynchronous", "lock_step"])
def test_a_program_makes_exactly_its_updates(tmp_path, pacing):
    experiment = ppo("heavy_env", frames=10**6, updates=5, program={"pacing": pacing})
    with nothing_left():
        result = run(experiment, tmp_path / "run")
    assert (result.learner_steps, result.ended_by) == (5, "updates")
