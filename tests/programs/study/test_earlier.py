"""Studies that version 0.1 wrote are read, resumed and reported.

`earlier.json` has the files of three studies as version 0.1 wrote them, at commit c075280: those of
a grid, of a search and of a population. They share one experiment.
"""

import io
import json
from pathlib import Path

import pytest

from rlstack.programs.cli.commands import main
from rlstack.programs.study import pbt, study, train
from rlstack.programs.study.optuna import Database
from rlstack.programs.study.space import Range
from rlstack.programs.study.study import PbtConfig, SearchConfig
from tests.programs.study.test_sets import fake_training

EARLIER = json.loads((Path(__file__).parent / "earlier.json").read_text())
RATE = "agent.optimizer.learning_rate"


def write(root, name):
    root.mkdir()
    content = {**EARLIER[name], "experiment": EARLIER["experiment"]}
    (root / name).write_text(json.dumps(content))
    return root


def test_the_three_files_are_studies(tmp_path):
    grid = study.read(write(tmp_path / "a", "set.json"))
    assert (grid.scheduler, grid.seeds, grid.values) == (None, (1, 2), {RATE: (0.001, 0.003)})
    assert (grid.base.preset, grid.base.frames) == ("cartpole-ppo", 600)
    search = study.read(write(tmp_path / "b", "sweep.json"))
    assert (search.scheduler, search.seeds) == (SearchConfig(trials=3), (1, 2))
    torso = {"network.torso": ("mlp", "nature")}
    assert search.values == {RATE: Range(1e-5, 1e-2, log=True), **torso}
    root = write(tmp_path / "c", "population.json")
    population = study.read(root)
    assert population.scheduler == PbtConfig(period=300, fraction=0.5)
    assert (population.seeds, population.values) == ((1, 2), {RATE: Range(1e-5, 1e-2, log=True)})
    (root / "lineage.json").write_text(json.dumps(EARLIER["lineage.json"]))
    lineage = pbt.read_lineage(root, population)
    assert (lineage.selections, [copy.source for copy in lineage.copies]) == (2, [0, 0])
    assert [member.name for member in lineage.members(population)] == ["member-0", "member-1"]
    assert lineage.members(population)[1].values == {RATE: 0.00041176186295629926}
    assert all(study.is_study(tmp_path / name) for name in "abc")


def finished_run(root, name, seed=1):
    """Writes what a finished run of version 0.1 leaves, without its checkpoints."""
    (root / name).mkdir()
    (root / name / "config.json").write_text(json.dumps(EARLIER["experiment"]))
    (root / name / "result.json").write_text(json.dumps({**EARLIER["result.json"], "seed": seed}))
    (root / name / "metrics.jsonl").touch()


def test_a_grid_is_resumed_and_reported(tmp_path, monkeypatch):
    seeds = fake_training(monkeypatch)
    root = write(tmp_path / "set", "set.json")
    finished_run(root, "learning_rate=0.001,seed=1")
    assert {k: len(v) for k, v in study.find(root).items()} == {
        "cartpole-ppo learning_rate=0.001": 1
    }
    trials = train.resume(root, stream=io.StringIO())
    assert seeds == [2, 1, 2] and [trial.state for trial in trials] == ["complete"] * 4
    assert trials[0].value == EARLIER["result.json"]["eval_return_mean"]
    assert "| cartpole-ppo learning_rate=0.003 |" in (root / "report.md").read_text()
    written = study.read(root)
    assert json.loads((root / "study.json").read_text())["scheduler"] == {"kind": "grid"}
    assert (written.seeds, written.values) == ((1, 2), {RATE: (0.001, 0.003)})
    assert main("report", [str(root), "--out", str(tmp_path / "r.md"), "--pictures", "none"]) == 0


def test_a_population_that_has_finished_stays_as_it_is(tmp_path):
    root = write(tmp_path / "population", "population.json")
    (root / "lineage.json").write_text(json.dumps(EARLIER["lineage.json"]))
    for i in range(2):
        finished_run(root, f"member-{i}", seed=i + 1)
    out = io.StringIO()
    trials = train.resume(root, stream=out)
    assert "has finished, and stays as it is" in out.getvalue()
    assert [trial.values[RATE] for trial in trials] == [
        values[RATE] for values in EARLIER["lineage.json"]["values"]
    ]
    assert "## Lineage" in (root / "report.md").read_text()


def test_the_database_of_a_search_is_that_of_the_same_values(tmp_path):
    pytest.importorskip("optuna")
    root = write(tmp_path / "sweep", "sweep.json")
    search = study.read(root)
    trial = (first := Database(search, root)).ask()
    described = ["cartpole-ppo", EARLIER["sweep.json"]["values"]]
    first._study.set_user_attr("searches", json.dumps(described, sort_keys=True))
    assert [found.values for found in Database(search, root).trials()] == [trial.values]
    described[1]["network.torso"]["values"].append("impala")
    first._study.set_user_attr("searches", json.dumps(described))
    with pytest.raises(ValueError, match="searches other"):
        Database(search, root)
