"""The user's modules: they hide nothing of the stack, and their agents and presets are found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlstack.programs.session import module_path

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(120)

OWN = """
import dataclasses
from rlstack.agents import register
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.programs.config.presets.registry import like, preset
from rlstack.networks import actor_critic

@dataclasses.dataclass(frozen=True)
class OwnConfig(PPOConfig):
    factor: float = 0.5

@register(OwnConfig, network=actor_critic)
class Own(PPO):
    pass

@preset
def cartpole_own(name):
    '''My own experiment.'''
    return like("cartpole-ppo", name, agent=OwnConfig())
"""
SMALL = ("--evaluator.episodes", "2", "--evaluator.num-envs", "2", "--env.num-workers", "1")


def command(*args, cwd, path=(), code=None):
    start = ["-m", "rlstack"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *args], cwd=cwd, capture_output=True, text=True, timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path)])},
    )  # fmt: skip


def own_packages(folder):
    """Adds modules of the user's own with the names of two of the stack's folders."""
    folder.mkdir(exist_ok=True)
    (folder / "agents.py").write_text("raise RuntimeError('the agents of the user')")
    (folder / "programs.py").write_text("raise RuntimeError('the programs of the user')")


def hide_everything(folder):
    """Adds a package of the user's own with the name of the stack's, too."""
    own_packages(folder)
    (folder / "rlstack").mkdir()
    (folder / "rlstack" / "__init__.py").write_text("raise RuntimeError('not the stack')")


def test_directories_that_hide_the_stack_come_last(tmp_path, monkeypatch):
    hide_everything(tmp_path / "mine")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    mine, here, root, other = str(tmp_path / "mine"), os.getcwd(), str(ROOT), str(tmp_path)
    assert module_path.arranged(["", mine, other, root]) == [other, root, mine, here]
    assert module_path.arranged([mine, other]) == [other, root, mine, here]
    assert module_path.arranged([here, root, mine]) == [root, mine, here]
    monkeypatch.chdir(ROOT)
    assert module_path.arranged(["", mine, other]) == [root, other, mine]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("installed", [False, True])
def test_a_module_named_as_the_stacks_does_not_end_a_command(tmp_path, installed):
    """Neither for `python -m rlstack` nor for the installed script, which starts elsewhere.

    With ``-m`` Python itself looks for a folder `rlstack` in the current directory first.
    """
    (hide_everything if installed else own_packages)(tmp_path / "here")
    start = "import sys; del sys.path[0]; "
    script = f"{start}from rlstack.programs.__main__ import main; sys.exit(main())"
    done = command("list", cwd=tmp_path / "here", code=script if installed else None)
    assert done.returncode == 0, done.stderr
    assert "cartpole-ppo" in done.stdout


@pytest.mark.slow
@pytest.mark.chosen
def test_entry_points_add_agents_and_presets(tmp_path):
    own_packages(tmp_path / "here")
    site = tmp_path / "site"
    (site / "own-1.0.dist-info").mkdir(parents=True)
    (site / "own-1.0.dist-info" / "METADATA").write_text("Name: own\nVersion: 1.0\n")
    points = site / "own-1.0.dist-info" / "entry_points.txt"
    points.write_text("[rlstack.presets]\nmine = own_things\n")
    (site / "own_things.py").write_text(OWN)
    done = command("train", "cartpole-own", "--help-all", cwd=tmp_path / "here", path=[site])
    assert done.returncode == 0, done.stderr
    assert "--agent.factor" in done.stdout and "My own experiment." in done.stdout
    points.write_text("[rlstack.presets]\nmine = no_such_module\n")
    done = command("list", cwd=tmp_path / "here", path=[site])
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "entry point mine = no_such_module of own" in done.stderr


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "topology",
    ["single_process", "heavy_env"],
)
def test_an_agent_of_the_users_own_trains_resumes_and_is_evaluated(tmp_path, topology):
    """In all processes; the run remembers the module."""
    own_packages(tmp_path)
    (tmp_path / "own_things.py").write_text(OWN)
    started = command(
        "train", "cartpole-own", "--module", "own_things", "--agent.factor", "0.25", *SMALL,
        "--frames", "1e3", "--topology", topology, "--program.num-actors", "1",
        "--run-dir", "run", cwd=tmp_path,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["modules"] == ["own_things"]
    assert (config["agent"]["kind"], config["agent"]["factor"]) == ("OwnConfig", 0.25)
    assert config["frames"] == 1000
    for args in (("train", "--resume", "run", "--frames", "2_000"), ("eval", "run")):
        done = command(*args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (tmp_path / "own_things.py").unlink()
    done = command("eval", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no such module" in done.stderr and "Traceback" not in done.stderr
