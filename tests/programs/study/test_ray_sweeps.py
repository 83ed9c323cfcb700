"""Trials of a sweep on the hosts of a Ray cluster; the trainer is a fake."""

import io
import json

import pytest

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.study import hosts as ray_hosts
from rlstack.programs.study import processes, train
from rlstack.programs.study.optuna import Database
from rlstack.programs.study.space import Range
from rlstack.programs.study.study import SearchConfig, Study
from tests.programs.clusters import wait_until_empty
from tests.programs.study import fake_trainer

pytest.importorskip("ray")
pytest.importorskip("optuna")
pytestmark = pytest.mark.timeout(180, method="thread")

RATE = "agent.optimizer.learning_rate"


@pytest.mark.slow
@pytest.mark.chosen
def test_trials_train_on_the_hosts_of_a_cluster(tmp_path, monkeypatch, hosts):
    recorded = Database.report

    def deciding(self, number, evaluation, mean):
        recorded(self, number, evaluation, mean)
        return number == 1

    monkeypatch.setattr(Database, "report", deciding)
    monkeypatch.setattr(processes, "_MAIN", fake_trainer.MAIN)
    values = {RATE: Range(1e-5, 1e-1, log=True)}
    made = Study(preset("cartpole-ppo"), (1,), values, SearchConfig(trials=4))
    root = train.create(made, tmp_path / "sweep")
    (root / "behaviour.json").write_text(json.dumps({"1": "wait", "2": "fail"}))
    out = io.StringIO()
    with ray_hosts.launching(ProgramConfig(ray=RayConfig(address=hosts.address))) as launch:
        rows = train.resume(root, jobs=2, launch=launch, stream=out)
    assert [row.state for row in rows] == ["complete", "pruned", "failed", "complete"]
    assert "trial 2: failed: exit code 1: ValueError: this trial | fails" in out.getvalue()
    assert wait_until_empty() == []
