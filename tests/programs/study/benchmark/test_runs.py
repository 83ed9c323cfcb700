"""Runs of benchmarks: what is trained, what is not trained again, and what it costs."""

import dataclasses
import io
import json
from pathlib import Path

import pytest

from rlstack.programs.cli import benchmark as command
from rlstack.programs.cli import commands
from rlstack.programs.cli.options import UsageError
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study import study
from rlstack.programs.study.benchmark import records, runs, suites
from rlstack.programs.study.benchmark.suites import AgentRow, Protocol, Recording, Suite, Task
from tests.programs.tools.report.made_runs import make_run

SUITE = Suite(
    "small",
    "Small",
    "One task.",
    "nobody",
    600,
    Protocol("Few frames", episodes=2, num_envs=2),
    (Task("Pole", "CartPole-v1", range=(0.0, 500.0)), Task("Car", "MountainCar-v0")),
    {"random": AgentRow("cartpole-random")},
    seeds=2,
)


@pytest.mark.timeout(120)
def test_what_has_finished_is_not_trained_again(tmp_path):
    told = io.StringIO()

    def jobs(seeds):
        return runs.jobs_of(SUITE, "random", tmp_path, seeds=seeds, tasks=["Pole"])

    assert runs.cost(jobs((1,))).frames == 600
    runs.train(jobs((1,)), stream=told)
    first = tmp_path / "Pole" / "seed=1" / "result.json"
    before = first.stat().st_mtime_ns
    again = jobs((1, 2))
    assert again[0].left == 1
    cost = runs.cost(again)
    assert (cost.frames, cost.replay > 0) == (600, True)
    assert "as fast as the finished runs here" in str(cost)
    runs.train(again, stream=told)
    assert first.stat().st_mtime_ns == before
    assert jobs((2,))[0].left == 0  # the study keeps its seeds
    runs.train(jobs((2,)), stream=told)
    assert "Pole: all runs have finished" in told.getvalue()
    assert str(runs.cost(jobs((2,)))) == "nothing is left to train"
    record = records.collect(SUITE, "random", jobs((1, 2)))
    assert [run.result.seed for run in record.tasks["Pole"].runs] == [1, 2]
    assert all(run.result.eval_episodes == 2 for run in record.tasks["Pole"].runs)
    assert all(9 < run.last_100 < 60 for run in record.tasks["Pole"].runs)


def test_a_study_of_other_options_is_not_mixed_with(tmp_path):
    (job,) = runs.jobs_of(SUITE, "random", tmp_path, tasks=["Pole"])
    job.path.mkdir()
    job.study.write(job.path)
    assert runs.jobs_of(SUITE, "random", tmp_path, tasks=["Pole"])[0].left == 2
    with pytest.raises(ValueError, match="Name another --run-dir"):
        runs.jobs_of(SUITE, "random", tmp_path, tasks=["Pole"], frames=700)
    with pytest.raises(ValueError, match="--tasks must be among Pole, Car; got Cart"):
        runs.jobs_of(SUITE, "random", tmp_path, tasks=["Cart"])


def test_the_cost_says_where_its_rate_is_from(tmp_path):
    jobs = runs.jobs_of(SUITE, "random", tmp_path, seeds=(1, 2, 3))
    cost = runs.cost(jobs)
    assert (cost.frames, cost.seconds) == (3 * 2 * 600, 0.0)
    assert "an unknown time (no rate is stored" in str(cost)
    stored = runs.cost(jobs, stored=100.0, machine_of="a machine")
    assert stored.seconds == pytest.approx(36.0)
    assert "a stored rate of 100 frames/s, measured on a machine" in str(stored)
    assert "about 0.6 minutes" in str(stored)
    assert "about 2.5 hours" in str(stored._replace(seconds=9_000.0))
    job = jobs[0]
    job.path.mkdir()
    job.study.write(job.path)
    for seed, seconds in ((1, 2.0), (2, 4.0)):  # one after the other: 1,200 frames in 6 s
        path = make_run(job.path / f"seed={seed}", 1.0, seed=seed, frames=600)
        result = study.read_result(RunDir(path))._replace(wall_seconds=seconds)
        RunDir(path).write_result(result._asdict())
    left = runs.cost(runs.jobs_of(SUITE, "random", tmp_path, seeds=(1, 2, 3)), stored=1e6)
    assert left.frames == 600 + 3 * 600
    assert left.seconds == pytest.approx(2_400 / 200)
    assert runs.cost(jobs, at_once=2).seconds == pytest.approx(2_400 / 400)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("values", [{}, {"env.num_envs": (4, 8)}])
def test_a_short_training_measures_the_speed(tmp_path, values):
    task = dataclasses.replace(SUITE.tasks[0], values=values)
    suite = dataclasses.replace(SUITE, frames=4_000, tasks=(task,))
    job = runs.jobs_of(suite, "random", tmp_path, seeds=(1,), tasks=["Pole"])[0]
    rate = runs.measure(job, 30.0, io.StringIO())
    assert 100 < rate < 10_000_000
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="too short for Pole"):
        runs.measure(job, 1e-9, io.StringIO())


def test_environments_are_made_before_training(tmp_path):
    none = dataclasses.replace(SUITE, tasks=(Task("No", "CartPol-v1"),))
    with pytest.raises(ValueError, match="CartPole-v1"):
        runs.check(runs.jobs_of(none, "random", tmp_path))


@pytest.mark.timeout(120)
def test_the_command_trains_writes_a_page_and_writes_it_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suites, "read", lambda name: SUITE)
    out = ["--out", str(tmp_path / "pages")]
    where = ["--run-dir", str(tmp_path / "runs"), *out]
    words = ["small", "--tasks", "Pole", "--seeds", "3", "4", *where]
    assert commands.main("benchmark", words) == 0
    page = tmp_path / "pages" / "small.md"
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [str(page)]
    assert "small, random: 1,200 frames, an unknown time" in shown.err
    made = page.read_bytes()
    assert b"random lacks Car." in made and b"(2 runs)" in made
    page.unlink()
    assert commands.main("benchmark", ["small", "--page", *out]) == 0
    assert page.read_bytes() == made
    assert commands.main("benchmark", [*words, "--dry-run"]) == 0
    assert "small, random: nothing is left to train" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(240)
def test_a_suite_records_its_own_data_once(tmp_path, monkeypatch, capsys):
    few = {"frames": 2_560}
    kept = {"frames": 6_000, "checkpoint_period": 500, "checkpoints_kept": 20}
    suite = Suite(
        "own",
        "Own",
        "One task.",
        "nobody",
        0,
        Protocol("Few updates", episodes=2, num_envs=2),
        (Task("replay", "CartPole-v1", recorded="pole/medium-replay"),),
        {name: AgentRow(preset, few) for name, preset in (("bc", "bc"), ("cql", "cartpole-cql"))},
        seeds=1,
        ranges="0 and 1 are the random and the expert set",
        recordings={"pole": Recording("cartpole-ppo", 1_000, kept)},
    )  # fmt: skip
    monkeypatch.setattr(suites, "read", lambda name: suite)
    monkeypatch.chdir(tmp_path)
    words = ["own", "--out", "pages", "--agent"]
    assert commands.main("benchmark", [*words, "bc", "--dry-run"]) == 0
    assert "first data are recorded of pole" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert commands.main("benchmark", [*words, "bc"]) == 0
    folder = tmp_path / "runs" / "benchmarks" / "own"
    sets = folder / "recordings" / "pole" / "sets"
    made = {path.name: path.stat().st_mtime_ns for path in sets.iterdir()}
    assert set(made) == {"random", "medium", "medium-replay", "expert"}
    trained = read_config(RunDir(folder / "bc" / "replay" / "seed=1"))
    assert Path(trained.data) == sets / "medium-replay"
    assert commands.main("benchmark", [*words, "cql"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in sets.iterdir()} == made
    text = (tmp_path / "pages" / "own.md").read_text()
    assert "## Scores over tasks" in text and "| bc | 1 | 1 |" in text and "| cql | 1 | 1 |" in text
    tree = json.loads((tmp_path / "pages" / "data" / "own" / "bc.json").read_text())
    assert str(tmp_path) not in json.dumps(tree["tasks"]["replay"]["experiment"])
    worst, best = tree["tasks"]["replay"]["range"]
    for kind, mean in (("random", worst), ("expert", best)):
        assert json.loads((sets / kind / "dataset.json").read_text())["return_mean"] == mean
    assert worst < best


def test_the_list_has_each_benchmark(capsys, monkeypatch):
    monkeypatch.setattr(suites, "missing", lambda suite: ["brax"] * (suite.name == "brax4"))
    assert commands.main("benchmark", ["--list"]) == 0
    shown = capsys.readouterr().out
    for name in suites.names():
        assert f"\n{name}: " in f"\n{shown}"
    assert "missing here: brax." in shown and "brax]" in shown
    assert "agents: ppo, pqn, dqn" in shown


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ([], "the name of a benchmark must come first"),
        (["minatar"], "did you mean 'minatar5'"),
        (["minatar5"], "--agent must be one of ppo, pqn, dqn"),
        (["minatar5", "--agents", "ppo"], "did you mean --agent"),
        (["minatar5", "--agent", "ppo", "--seeds", "0"], "1 to 1000; got 0"),
        (["minatar5", "--page", "--out", "no/such"], "must have scores in data/minatar5"),
    ],
)
def test_a_mistake_is_one_line(args, hint, capsys, monkeypatch):
    monkeypatch.setattr(suites, "missing", lambda suite: [])
    assert commands.main("benchmark", args) != 0
    shown = capsys.readouterr().err
    assert hint in shown and "Traceback" not in shown


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(suites, "missing", lambda suite: ["brax"])
    with pytest.raises(UsageError, match=r"brax4 needs brax: pip install .*\[brax\]"):
        command.main(["brax4", "--agent", "ppo"])
    assert command.features.how_to_get(["jaxmarl"], (3, 10)).endswith("CPython 3.11 or newer.")
