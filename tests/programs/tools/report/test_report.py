"""`rlstack report`: tables and pictures from run directories, and refused directories."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest

from rlstack.programs.cli.commands import main
from rlstack.programs.run import train
from rlstack.programs.tools.report.runs import read
from tests.programs.run.test_train import small
from tests.programs.tools.report.made_runs import make_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made = []
    for seed in (1, 2):
        path = root / f"s{seed}"
        train.run(dataclasses.replace(small(), seed=seed), path, stream=io.StringIO())
        made.append(path)
    return made


def test_a_preset_is_one_row_and_one_picture(runs, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "results.md"
    assert main("report", [*map(str, runs), "--out", str(out)]) == 0
    text = out.read_text()
    found = [read(path) for path in runs]
    table = text.split("\n## ")[0].splitlines()
    (row,) = [line for line in table if line.startswith(f"| {small().preset} |")]
    returns = [run.result.eval_return_mean for run in found]
    assert f"{sum(returns) / 2:,.1f} ± {abs(returns[0] - returns[1]) / 2**0.5:,.1f}" in row
    assert f"1: {returns[0]:,.1f}, 2: {returns[1]:,.1f}" in row
    assert f"{found[0].result.env_frames:,}" in row
    assert found[0].result.git_commit[:7] in row
    versions, machine = found[0].result.versions, found[0].result.machine
    assert {"python", "jax", "numpy"} <= versions.keys() and " core" in machine
    made_with = text.split("\n## Versions\n")[1].split("\n## ")[0]
    assert f"| {small().preset} | 1, 2 | {versions['rlstack']} | " in made_with
    assert f"jax {versions['jax']}, " in made_with and f"| {machine} |" in made_with
    picture = tmp_path / "results" / f"{small().preset}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"(results/{small().preset}.png)" in text


def test_lost_nodes_are_counted(runs, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "results.md"
    assert main("report", [*map(str, runs), "--out", str(out)]) == 0
    assert "Nodes that were lost" not in out.read_text()
    faulty = shutil.copytree(runs[0], tmp_path / "faulty")
    with (faulty / "metrics.jsonl").open("a") as file:
        for restarts, lost in ((1, 40), (3, 1066)):
            logs = {"program/restarts": restarts, "program/lost_frames": lost}
            file.write(json.dumps({"env_frames": 9, **logs}) + "\n")
        file.write(json.dumps({"env_frames": 10, "learner/loss": 0.5}) + "\n")
    assert main("report", [str(faulty), str(runs[1]), "--out", str(out)]) == 0
    assert f"| {small().preset} | 1 | single_process | processes | 3 | 1,066 |" in out.read_text()


def test_options_that_differ_from_the_preset_are_listed(tmp_path):
    paths = [str(path) for path in make_runs(tmp_path / "runs", [500.0, 400.0])]
    out = tmp_path / "results.md"
    command = ["--out", str(out), "--pictures", "none"]
    assert main("report", [*paths, *command]) == 0
    assert "Options that differ" not in out.read_text()
    for path, frames in zip(paths, (2_000, 3_000), strict=True):
        config = json.loads((Path(path) / "config.json").read_text())
        config["topology"], config["frames"] = "heavy_env", frames
        config["agent"]["discount"] = 0.9
        (Path(path) / "config.json").write_text(json.dumps(config))
    assert main("report", [*paths, *command]) == 0
    section = out.read_text().split("## Options that differ from the preset")[1].split("##")[0]
    rows = [line for line in section.splitlines() if line.startswith("| cartpole-ppo")]
    assert sorted(rows) == [
        "| cartpole-ppo | agent.discount | 0.9 |",
        "| cartpole-ppo | frames | 2000, 3000 |",
        "| cartpole-ppo | topology | heavy_env |",
    ]


def test_runs_without_metrics_have_no_curve(tmp_path):
    paths = make_runs(tmp_path / "runs", [20.0, 30.0])
    for path in paths:
        (path / "metrics.jsonl").unlink()
    assert len(read(paths[0]).returns) == 0
    out = tmp_path / "results.md"
    assert main("report", [*map(str, paths), "--out", str(out), "--html", str(out) + ".html"]) == 0
    assert "1: 20.0, 2: 30.0" in out.read_text()


def test_a_text_where_a_number_belongs_is_named_and_left_out(tmp_path, caplog):
    (path,) = make_runs(tmp_path / "runs", [20.0])
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"env_frames": 1100, "evaluator/episode_return": "many"}\n')
        file.write('{"env_frames": "none", "evaluator/episode_return": 5}\n')
        file.write('{"env_frames": 1200, "evaluator/episode_return": "nan"}\n')
        file.write('{"env_frames": 1200, "program/restarts": "nan"}\n')
    run = read(path)
    assert run.frames.tolist() == [*range(100, 1100, 100), 1200]
    assert run.returns[:10].tolist() == [2.0 * i for i in range(1, 11)]
    assert run.returns[10] != run.returns[10] and run.restarts == 0
    assert "metrics.jsonl: 'evaluator/episode_return' must be a number" in caplog.text
    assert "'many'" in caplog.text and "'none'" in caplog.text


def test_unfinished_runs_and_repeated_seeds_are_refused(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = ["--out", str(tmp_path / "r.md")]
    assert main("report", [str(runs[0]), str(runs[0]), *out]) == 1
    assert "seeds 1, 1" in capsys.readouterr().err
    assert main("report", [str(tmp_path), *out]) == 1
    assert "no config.json" in capsys.readouterr().err
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.json").write_text((runs[0] / "config.json").read_text())
    assert main("report", [str(unfinished), *out]) == 1
    assert "--resume" in capsys.readouterr().err
