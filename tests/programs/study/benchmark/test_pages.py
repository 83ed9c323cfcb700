"""Pages of benchmarks: their numbers, and that committed ones are made of committed scores."""

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from rlstack.programs.config.presets import preset
from rlstack.programs.session.result import Result
from rlstack.programs.study.benchmark import page, records, suites, watch
from rlstack.programs.study.benchmark.records import Record, Scored, TaskRecord
from rlstack.programs.study.benchmark.suites import (
    AgentRow,
    Band,
    Protocol,
    Reference,
    Suite,
    Task,
)

FOLDER = Path(__file__).resolve().parents[4] / "docs" / "benchmarks"
PAGES = sorted(path.name for path in (FOLDER / "data").glob("*/"))
SUITE = Suite(
    "small",
    "Small",
    "Two tasks.",
    "nobody, https://example.org/x",
    1_000,
    Protocol("A thousand frames"),
    (Task("A", "A-v1", range=(0.0, 10.0)), Task("B", "B-v1", range=(10.0, 30.0))),
    {"one": AgentRow("cartpole-ppo"), "two": AgentRow("cartpole-a2c")},
    ranges="0 and 1 are made up",
    references=(
        Reference("paper", "https://example.org/paper", "as here", {"A": 7.0}),
        Reference("other", "https://example.org/other", "scores", {"B": 0.25}, "score"),
    ),
)


def scored(value, seed, *, frames=1_000, last=None, curve=None):
    result = Result(
        value, 0.0, 20, frames, 10, 2.0, 500.0, seed, "single_process", "cartpole-ppo", "abcdef0",
        machine="Linux, a machine",
    )  # fmt: skip
    x, y = curve or (tuple(np.linspace(100, frames, 10)), tuple(np.linspace(0, value, 10)))
    return Scored(result, last, tuple(map(float, x)), tuple(map(float, y)))


def record(agent, scores, frames=1_000):
    tasks = {}
    for name, values in scores.items():
        base = preset("cartpole-ppo")
        env = dataclasses.replace(base.env, name=f"{name}-v1")
        experiment = dataclasses.replace(base, env=env, frames=frames)
        runs = [scored(value, seed, frames=frames) for seed, value in enumerate(values, 1)]
        tasks[name] = TaskRecord(experiment, runs)
    return Record("small", agent, tasks)


ONE = record("one", {"A": [2.0, 4.0, 6.0, 8.0, 10.0], "B": [12.0, 14.0, 16.0, 18.0, 40.0]})


def cells(text, first):
    row = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_page_has_the_statistics_of_the_scores():
    text = page.pages(SUITE, [ONE])["small.md"]
    # Scores: A 0.2 to 1 with mean 0.6; B 0.1, 0.2, 0.3, 0.4, 1.5 with mean 0.5.
    row = cells(text, "one | 2 | 10")
    found = [float(cell.split(" [")[0]) for cell in row[3:]]
    # The IQM leaves out 2 of 10 scores at each end: 0.2, 0.3, 0.4, 0.4, 0.6, 0.8.
    # The gap: A misses 1 by 0.4, B with its best score cut to 1 by 0.6.
    assert found == pytest.approx([0.55, 0.55, 0.45, 0.5])
    assert all(re.search(r"\[\d\.\d+, \d\.\d+\]", cell) for cell in row[3:])
    assert cells(text, "A")[1].startswith("6.0 [") or cells(text, "A")[1].startswith("6.000 [")
    assert cells(text, "A")[2:] == ["7", ""]
    assert cells(text, "B")[2:] == ["", "15.0"]  # 10 + 0.25 * 20
    assert "<https://example.org/paper>; as here." in text
    assert "Linux, a machine" in text and "abcdef0" in text


def test_a_task_without_a_range_has_no_normalised_score():
    tasks = (*SUITE.tasks, Task("C", "C-v1"))
    suite = dataclasses.replace(SUITE, tasks=tasks, references=())
    scores = {name: [run.result.eval_return_mean for run in ONE.tasks[name].runs] for name in "AB"}
    made = page.pages(suite, [record("one", {**scores, "C": [1.0, 2.0, 3.0, 4.0, 5.0]})])
    text = made["small.md"]
    # As on the page of two tasks, without C.
    assert cells(text, "one | 2 | 10")[3:] == cells(page.pages(SUITE, [ONE])["small.md"], "one")[3:]
    assert cells(text, "C")[1].startswith("3.000 [")
    assert "small/profile.svg" in made and "(small/task-C.svg)" in text
    only = page.pages(suite, [record("one", {"C": [1.0, 2.0, 3.0, 4.0, 5.0]})])["small.md"]
    assert "## Scores over tasks" not in only and "Brackets are 95 %" in only


def test_a_page_has_pictures_that_stand_alone():
    made = page.pages(SUITE, [ONE])
    names = {"small/profile.svg", "small/all-tasks.svg", "small/task-A.svg", "small/task-B.svg"}
    assert set(made) == {"small.md", *names}
    for name in names:
        assert f"({name})" in made["small.md"]
        root = ElementTree.fromstring(made[name])
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "href" not in made[name]
    assert "<polyline" in made["small/task-A.svg"]


def test_two_agents_are_compared_and_named_in_pictures():
    two = record("two", {"A": [1.0, 2.0, 3.0, 4.0, 5.0], "B": [11.0, 12.0, 13.0, 14.0, 15.0]})
    made = page.pages(SUITE, [ONE, two])
    assert "## Comparison" in made["small.md"]
    assert "one is better than two on 2 tasks with probability" in made["small.md"]
    assert ">● one<" in made["small/profile.svg"] and ">■ two<" in made["small/profile.svg"]


def test_rows_that_are_equal_say_which_runs_they_have():
    tasks_of = {
        "one": {"one, A": "A", "one, B": "B", "one, C": "C"},
        "two": {"two, A": "A", "two, B": "B"},
    }
    rows = [
        *([name, "shared"] for tasks in tasks_of.values() for name in tasks),
        *([name, "most"] for name in ("one, A", "one, C", "two, A")),
        *([name, "first"] for name in ("one, A", "two, A")),
        ["one, B", "single"],
    ]
    columns, merged = page._merged((("runs", "value"), rows), tasks_of)
    assert columns == ("runs", "value")
    assert merged == [
        ["all", "shared"],
        ["one: all but B; two: A", "most"],
        ["A", "first"],
        ["one: B", "single"],
    ]


def test_a_page_says_what_makes_its_numbers_less_than_they_seem():
    short = record("one", {"A": [2.0, 4.0]}, frames=100)
    short.tasks["A"] = short.tasks["A"]._replace(unfinished=3)
    text = page.pages(SUITE, [short])["small.md"]
    assert "one has 100 frames a run instead of the 1,000 of the benchmark" in text
    assert "one lacks B." in text
    assert "3 runs of one have not finished" in text
    assert "--budget 100" in text
    with pytest.raises(ValueError, match="one run or more must have finished"):
        page.pages(SUITE, [Record("small", "one", {})])


def test_a_warning_names_all_its_tasks():
    short = record("two", {"A": [1.0, 2.0], "B": [11.0, 12.0]}, frames=500)
    text = page.pages(SUITE, [ONE, short])["small.md"]
    assert text.count("The budgets on") == 1
    assert "The budgets on A, B differ" in text
    assert "Frames: one 1,000; two (500 frames) 500." in text
    assert "Runs: two (500 frames) on all tasks: 2." in text
    short.tasks["B"] = ONE.tasks["B"]._replace(experiment=short.tasks["B"].experiment)
    assert "Runs: two (500 frames) on A: 2." in page.pages(SUITE, [short])["small.md"]


def test_records_are_read_as_they_were_written(tmp_path):
    path = records.write(SUITE, ONE, tmp_path)
    assert path == tmp_path / "data" / "small" / "one.json"
    (found,) = records.read_all(SUITE, tmp_path)
    assert found == ONE
    assert len(path.read_text().splitlines()) < 30  # a line for each run
    path.write_text("{}")
    with pytest.raises(ValueError, match="must have the scores of a suite"):
        records.read_all(SUITE, tmp_path)
    with pytest.raises(ValueError, match="rlstack benchmark small --out"):
        records.read_all(SUITE, tmp_path / "nowhere")


def test_scores_of_tasks_that_were_not_trained_again_stay(tmp_path):
    records.write(SUITE, ONE, tmp_path)
    again = record("one", {"B": [20.0, 22.0]})
    records.write(SUITE, again, tmp_path)
    (found,) = records.read_all(SUITE, tmp_path)
    assert list(found.tasks) == ["A", "B"]
    assert found.tasks == {"A": ONE.tasks["A"], "B": again.tasks["B"]}
    shorter = record("one", {"A": [1.0]}, frames=500)  # other budgets are not mixed
    records.write(SUITE, shorter, tmp_path, budget=500)
    assert records.read_all(SUITE, tmp_path) == [shorter]


def test_returns_of_training_are_the_score_where_the_protocol_says_so():
    training = dataclasses.replace(SUITE, protocol=Protocol("p", score="last_100"))
    runs = [scored(9.0, 1, last=3.0)]
    made = Record("small", "one", {"A": TaskRecord(preset("cartpole-ppo"), runs)})
    (run,) = made.runs(training)["A"]
    assert run.result.eval_return_mean == 3.0
    assert made.runs(SUITE)["A"][0].result.eval_return_mean == 9.0
    none = Record("small", "one", {"A": TaskRecord(preset("cartpole-ppo"), [scored(9.0, 1)])})
    with pytest.raises(ValueError, match="no returns of training"):
        none.runs(training)


def test_the_last_100_episodes_are_those_of_the_last_lines():
    def line(frames, value, length):
        name = "actor/episode_return"
        return {"env_frames": frames, name: value, "actor/episode_length": length}

    # 40 episodes of 25 steps, 60 of 50 and 20 of 100: the last 20, the 60 before, and 20 of 40.
    lines = [line(1_000, 1.0, 25.0), {"env_frames": 1_500}, line(4_000, 2.0, 50.0)]
    lines += [line(6_000, 5.0, 100.0)]
    assert records._last(lines) == pytest.approx((20 * 5.0 + 60 * 2.0 + 20 * 1.0) / 100)
    assert records._last(lines[-1:]) == 5.0  # as many as there are
    assert records._last([{"env_frames": 5}]) is None


def test_a_curve_of_few_points_has_means():
    frames, returns = np.arange(1.0, 201.0), np.arange(200.0)
    x, y = records._thinned(frames, returns)
    assert len(x) == len(y) == 50
    assert (x[0], y[0], x[-1], y[-1]) == (4.0, 1.5, 200.0, 197.5)
    frames[3] = 6.0  # this point stands for three frames, the others for one
    frames[4:] += 2.0
    assert records._thinned(frames, returns)[1][0] == (0 + 1 + 2 + 3 * 3) / 6
    assert records._thinned(np.array([1.0, 2.0]), np.array([np.nan, 4.0])) == ((2.0,), (4.0,))


def watched(curve, final=100.0, band=(40.0, 60.0)):
    """A record of a run with this curve, and its suite with a band."""
    task = Task("A", "A-v1", band=Band(band, 90.0))
    made = record("one", {"A": [final]})
    runs = [scored(final, 1, curve=curve)]
    made.tasks["A"] = made.tasks["A"]._replace(runs=runs)
    return dataclasses.replace(SUITE, tasks=(task,), references=(), ranges=""), made


def test_slower_learning_is_outside_of_its_band():
    learns = (np.linspace(0, 1_000, 1001), np.minimum(100, np.linspace(0, 200, 1001)))
    suite, made = watched(learns)
    (found,) = watch.compare(suite, [made])
    assert found.area == pytest.approx(75.0, abs=0.1)  # the triangle, 25, and the rest, 50
    few = (np.array([500.0, 1_000.0]), np.array([50.0, 100.0]))  # the means of both halves
    suite, made = watched(few)
    assert watch.compare(suite, [made])[0].area == 75.0
    suite, made = watched(learns)
    assert not found.is_within
    suite, made = watched(learns, band=(70.0, 80.0))
    watch.check(suite, made)
    assert "| within |" in page.pages(suite, [made])["small.md"]
    # The same curve, slower by a third, reaches 100 after 750 frames.
    slower = (learns[0], np.minimum(100, np.linspace(0, 200 * 2 / 3, 1001)))
    suite, made = watched(slower, band=(70.0, 80.0))
    with pytest.raises(watch.OutsideError, match=r"A: area 62\.\d* \(band 70 to 80\)"):
        watch.check(suite, made)
    suite, made = watched(learns, final=80.0, band=(70.0, 80.0))
    with pytest.raises(watch.OutsideError, match=r"greedy return 80 \(at least 90\)"):
        watch.check(suite, made)


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_made_of_the_committed_scores(name):
    suite = suites.read(name)
    made = page.pages(suite, records.read_all(suite, FOLDER))
    assert len(made) > 1
    for file, text in made.items():
        assert (FOLDER / file).read_text() == text, (
            f"rlstack benchmark {name} --page --out {FOLDER}"
        )
    pictures = {f"{name}/{path.name}" for path in (FOLDER / name).iterdir()}
    assert pictures == set(made) - {f"{name}.md"}
