"""Everything but pools of EnvPool works where neither EnvPool nor Matplotlib is installed."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.cli import doctor
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train


@pytest.fixture
def without(monkeypatch):
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("envpool", "matplotlib")
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("envpool", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # its import raises ModuleNotFoundError


def small(type):
    return dataclasses.replace(
        preset("cartpole-ppo"),
        env=EnvConfig("CartPole-v1", type=type, num_envs=4),
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        frames=600,
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("type", ["for_loop", "auto"])
def test_a_run_trains_with_gymnasiums_environment(without, tmp_path, type):
    result = train.run(small(type), tmp_path / "run")
    assert result.env_frames >= 600
    assert result.eval_episodes == 2
    assert 8 <= result.eval_return_mean <= 500  # CartPole's shortest and longest episode


def test_a_pool_of_envpool_says_what_to_do(without, tmp_path):
    with pytest.raises(ValueError, match="needs EnvPool, which is not installed"):
        train.run(small("cpp"), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(150)
def test_several_processes_train_too(tmp_path):
    for name in ("envpool", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('none', name={name!r})")
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "rlstack", "train", "cartpole-ppo", "--topology", "heavy_env"),
        *("--program.num-actors", "1", "--env.type", "process", "--frames", "600"),
        *("--evaluator.episodes", "2", "--evaluator.num-envs", "2", "--run-dir", str(run)),
    ]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "result.json").read_text())["env_frames"] >= 600


def test_the_doctor_calls_topologies_usable_and_names_what_is_missing():
    checks = [doctor.Check(name, "1", True) for name in ("Python", *doctor.CORE, *doctor.SERVICES)]
    checks.append(doctor.Check("envpool", "", False))
    assert {check.usable for check in doctor._topologies(checks)} == {True}
    (pools,) = (check for check in doctor._choices(checks) if check.name == "--env.type")
    assert "for_loop" in pools.found and "cpp" not in pools.found
    assert "cpp: needs envpool" in pools.detail
