"""A report shows what its numbers leave out: missing runs, unequal budgets, few runs."""

import csv
import json
import re

import pytest

from rlstack.programs.cli.commands import main
from rlstack.programs.config.presets import preset
from rlstack.programs.study.study import Study
from rlstack.programs.tools import charts
from rlstack.programs.tools.report import plots, statistics
from rlstack.programs.tools.report.runs import Method, read, read_groups
from tests.programs.tools.report.made_runs import make_run, make_runs


def report(tmp_path, *words):
    """Writes all files; returns their texts."""
    files = {name: tmp_path / f"out.{name}" for name in ("md", "html", "csv", "tex")}
    flags = zip(("--out", "--html", "--csv", "--latex"), map(str, files.values()), strict=True)
    options = [word for pair in flags for word in pair]
    assert main("report", [*map(str, words), *options, "--pictures", "none"]) == 0
    return {name: path.read_text() for name, path in files.items()}


def test_runs_without_a_result_are_shown_and_counted(tmp_path, capsys):
    base = preset("cartpole-ppo")
    for folder, scores in (("a", [10.0, 20.0]), ("b", [1.0, 2.0])):
        make_runs(tmp_path / folder, scores)
        seeds = (1, 2, 3, 4) if folder == "a" else (1, 2)
        Study(base, seeds).write(tmp_path / folder)
    stopped = make_run(tmp_path / "a" / "seed=3", 5.0, seed=3)
    (stopped / "result.json").unlink()
    (stopped / "metrics.jsonl").write_text('{"env_frames": 400, "wall_time": 1.0}\n')
    text = report(tmp_path, tmp_path / "a", tmp_path / "b", "--compare")
    warning = (
        "2 runs have no result and count in no number: cartpole-ppo on CartPole-v1, seed 3, 4."
    )
    assert f"Warning: {warning}" in capsys.readouterr().out
    for name in ("md", "html", "tex"):
        assert f"Warning: {warning}" in text[name]
    assert (
        "| cartpole-ppo | CartPole-v1 | 3 | seed=3 | stopped at 400 of 150,000 frames |"
        in text["md"]
    )
    assert "| cartpole-ppo | CartPole-v1 | 4 | seed=4 | has not begun |" in text["md"]
    assert "| a | CartPole-v1 | 2 of 4 |" in text["md"]
    assert "2 and 0 more have no result" in text["md"]
    found = {(x["method"], x["statistic"]): x for x in csv.DictReader(text["csv"].splitlines())}
    assert found["a", "mean"]["unfinished"] == "2" and found["b", "mean"]["unfinished"] == "0"
    assert found["a", "improvement"]["unfinished"] == "2 and 0"
    assert float(found["a", "mean"]["estimate"]) == 15.0


def test_a_warning_names_some_groups_and_the_table_all(tmp_path):
    make_runs(tmp_path / "runs", [1.0, 2.0])
    for number in range(11):
        path = make_run(tmp_path / "runs" / f"other-{number:02}", 5.0, env=f"Task{number:02}")
        (path / "result.json").unlink()
    text = report(tmp_path, tmp_path / "runs")["md"]
    warning = next(line for line in text.splitlines() if line.startswith("> Warning: 11 runs"))
    assert warning.endswith("on Task07, seed 1; and 3 more groups of runs.")
    assert len(re.findall(r"^\| cartpole-ppo \| Task\d\d \| 1 \| other-", text, re.M)) == 11


def test_a_failed_run_says_so(tmp_path):
    make_runs(tmp_path / "runs", [1.0, 2.0])
    failed = make_run(tmp_path / "runs" / "third", 5.0, seed=3)
    (failed / "result.json").unlink()
    line = {"node": "learner", "restarts": False, "reason": "ValueError: too\nlong"}
    (failed / "failures.jsonl").write_text(json.dumps(line) + "\n")
    text = report(tmp_path, tmp_path / "runs")
    state = "failed at 0 of 150,000 frames: ValueError: too long"
    assert f"| 3 | third | {state} |" in text["md"]


def test_unequal_budgets_are_named(tmp_path, capsys):
    make_runs(tmp_path / "a", [10.0, 20.0], frames=2000)
    make_runs(tmp_path / "b", [1.0, 20.0], frames=2060)
    text = report(tmp_path, tmp_path / "a", tmp_path / "b", "--compare")
    assert "budgets" not in text["md"]  # a batch more is no other budget
    make_run(tmp_path / "b" / "seed=3", 3.0, seed=3, frames=20_000)
    text = report(tmp_path, tmp_path / "a", tmp_path / "b", "--compare")
    warning = "Frames: a 2,000; b 2,060 to 20,000."
    assert warning in text["html"] and warning in capsys.readouterr().out
    assert "; the budgets differ: 2,000 and 2,060 to 20,000 frames)." in text["md"]
    assert "| 2,060 to 20,000 |" in report(tmp_path, tmp_path / "b")["md"]


@pytest.mark.parametrize(
    ("numbers", "low"), [((3, 3), 0.29), ((5, 5), 0.48), ((3, 10), 0.29), ((10, 10), 0.69)]
)
def test_runs_that_do_not_overlap_show_a_bound_only(numbers, low, tmp_path):
    """By hand: the K-th root of 0.025 is 0.292 for 3, 0.478 for 5 and 0.692 for 10."""
    first, second = numbers
    make_runs(tmp_path / "a", [float(i) for i in range(first)])
    make_runs(tmp_path / "b", [100.0 + i for i in range(second)])
    text = report(tmp_path, tmp_path / "a", tmp_path / "b", "--compare")
    assert "0.00 [0.00, 0.00]" not in text["md"] + text["html"] + text["tex"]
    assert (
        f"Each of the {second} runs of b is better than each of the {first} runs of a on "
        f"CartPole-v1; {'so few' if first < 5 else 'these'} runs show only that the probability "
        "of a better run is between "
        f"{low:.2f} and 1.00."
    ) in text["md"]
    (line,) = [x for x in csv.DictReader(text["csv"].splitlines()) if x["other"]]
    assert float(line["estimate"]) == float(line["low"]) == 0
    assert float(line["high"]) == pytest.approx(1 - low, abs=0.005)


def test_equal_runs_of_both_methods_show_little(tmp_path):
    """By hand: a draw has at least the probability 0.292, so the mean is in [0.146, 0.854]."""
    for name in ("a", "b"):
        make_runs(tmp_path / name, [500.0] * 3)
    text = report(tmp_path, tmp_path / "a", tmp_path / "b", "--compare")
    assert "with probability 0.50 [0.15, 0.85] (3 and 3 runs)" in text["md"]


def test_averages_over_different_tasks_are_named(tmp_path):
    for task in ("CartPole-v1", "Catch"):
        make_runs(tmp_path / "a" / task, [1.0, 2.0], env=task)
    make_runs(tmp_path / "b", [1.0, 2.0])
    both = (tmp_path / "a", tmp_path / "b", "--compare")
    warning = "with different tasks are not comparable: b lacks Catch."
    assert warning in report(tmp_path, *both, "--normalise", "0", "500")["md"]
    assert warning not in report(tmp_path, *both)["md"]  # nothing is averaged over tasks


def test_few_runs_are_drawn_one_by_one(tmp_path):
    make_runs(tmp_path / "a", [1.0, 2.0, 3.0])
    make_runs(tmp_path / "b", [1.0, 2.0, 3.0, 4.0, 5.0])
    text = report(tmp_path, tmp_path / "a", tmp_path / "b", "--compare")
    assert "Runs: a on CartPole-v1: 3." in text["html"]
    groups = re.findall(r'<g data-curve="(\w)".*?</g>', text["html"], re.DOTALL)
    assert groups == ["a", "b"]
    single = [
        group.count('stroke-opacity="0.45"')
        for group in re.findall(r"<g data-curve=.*?</g>", text["html"], re.DOTALL)
    ]
    assert single == [3, 0]


def test_a_method_has_one_colour_and_mark_in_all_plots(tmp_path):
    def runs(name, task):
        (group,) = read_groups(name, make_runs(tmp_path / name / task, [1.0, 2.0], env=task))
        return group.runs

    methods = [
        Method("a", {"Pong": runs("a", "Pong")}),
        Method("b", {"Pong": runs("b", "Pong"), "Tennis": runs("b", "Tennis")}),
        Method("c", {"Tennis": runs("c", "Tennis")}),
    ]
    found = statistics.compute(methods, compare=True)
    made = plots.of_statistics(found)
    assert list(made["task Pong"].numbers) == [0, 1]
    assert list(made["task Tennis"].numbers) == [1, 2]
    assert plots.of_group("b", methods[1].tasks["Tennis"], found).numbers == [1]
    looks = {
        name: {
            re.search(r'data-curve="(\w)" style="color:(#\w+)"', group).groups()
            for group in re.findall(r"<g data-curve.*?</g>", charts.figure(made[name]), re.DOTALL)
        }
        for name in ("task Pong", "task Tennis")
    }
    assert dict(looks["task Pong"])["b"] == dict(looks["task Tennis"])["b"]
    assert len({colour for _, colour in looks["task Pong"] | looks["task Tennis"]}) == 3
    legends = [charts.figure(made[name]).split('class="legend"')[1] for name in looks]
    assert ["■" in legend and "●" in legend for legend in legends] == [True, False]
    assert all(number < 0 for number in charts.numbers_of(made["improvement"]))


def test_presets_of_a_users_own_are_listed_with_all_options(tmp_path):
    (path,) = make_runs(tmp_path / "runs", [3.0])
    config = json.loads((path / "config.json").read_text())
    result = json.loads((path / "result.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "preset": "my-cartpole"}))
    (path / "result.json").write_text(json.dumps({**result, "preset": "my-cartpole"}))
    section = report(tmp_path, path)["md"].split("## All options of presets of your own")[1]
    rows = re.findall(r"^\| my-cartpole \| ([\w.]+) \| (.*) \|$", section, re.M)
    assert len(rows) > 100
    usual = preset("cartpole-ppo")
    assert ("frames", str(usual.frames)) in rows
    assert ("agent.discount", str(usual.agent.discount)) in rows
    assert not [name for name, _ in rows if name == "seed"]
    assert read(path).is_known is False
    assert "Options that differ from the preset" not in section


def test_all_runs_without_a_result_are_refused(tmp_path, capsys):
    path = make_run(tmp_path / "runs" / "one", 3.0)
    (path / "result.json").unlink()
    assert main("report", [str(tmp_path / "runs"), "--out", str(tmp_path / "r.md")]) == 1
    assert "must hold a finished run" in capsys.readouterr().err
