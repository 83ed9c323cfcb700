"""Modules by the names that older files have, what hides them, and names like a misspelt one."""

import pickle
import sys
from pathlib import Path

import pytest

from rlstack.agents.ppo import PPO
from rlstack.agents.sac import SACParams
from rlstack.envs.factory import resolve
from rlstack.programs.config import own_modules
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session import failed_update
from rlstack.references import import_named, load_object, nearest, renamed

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("agents.ppo", "rlstack.agents.ppo"),
        ("programs.run.train", "rlstack.programs.run.train"),
        ("programs.experiment", "rlstack.programs.config.experiment"),
        ("programs.policies.policy", "rlstack.programs.build.policies.policy"),
        ("programs.policies.export", "rlstack.programs.tools.export"),
        ("programs.presets.ppo", "rlstack.programs.config.presets.ppo"),
        ("agents.my_own", "agents.my_own"),
        ("programs.no.such", "programs.no.such"),
        ("agents", "agents"),
        ("programs_of_mine.train", "programs_of_mine.train"),
        ("numpy.linalg", "numpy.linalg"),
    ],
)
def test_names_of_the_stacks_modules_before_they_were_in_one_package(name, wanted):
    assert renamed(name) == wanted


def test_configs_of_older_versions_find_their_objects():
    assert load_object("programs.experiment:Experiment") is Experiment
    assert resolve("agents.ppo:PPO") is PPO
    own_modules.load("agents.ppo")
    with pytest.raises(ValueError, match=r"module agents\.ppo has no 'PPOO'; did you mean 'PPO'"):
        load_object("agents.ppo:PPOO")


def test_failed_updates_of_older_versions_are_read(tmp_path):
    saved = {"params": SACParams(1, 2, 3)}
    text = pickle.dumps(saved, protocol=2)  # with names as lines
    assert text.count(b"crlstack.agents.sac\n") == 1
    file = tmp_path / "update.pkl"
    for written in (text, text.replace(b"crlstack.agents.sac\n", b"cagents.sac\n")):
        file.write_bytes(written)
        assert failed_update.load(tmp_path) == saved


def test_a_package_of_the_users_own_may_have_the_old_name(tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "agents"]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").touch()
    (tmp_path / "agents" / "mine.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_object("agents.mine:answer") == 42
    del sys.modules["agents.mine"], sys.modules["agents"]


@pytest.mark.parametrize("name", ["agents", "programs"])
def test_the_folders_of_a_checkout_are_no_packages_of_their_own(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"This package is rlstack.{name}: import it by that"):
        import_named(name)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("HalfCheeta-v4", "; did you mean 'gym/HalfCheetah-v5'?"),
        ("halfcheetah-v9", "; did you mean 'gym/HalfCheetah-v5'?"),
        # As much like Knapsack-v1 as the version makes it.
        ("NoSuch-v1", "; there are gym/HalfCheetah-v4, gym/HalfCheetah-v5, gym/Knapsack-v1."),
    ],
)
def test_similar_names_are_similar_without_their_versions(name, wanted):
    known = ["HalfCheetah-v4", "Knapsack-v1", "HalfCheetah-v5"]
    assert nearest(name, known, "gym/") == wanted


def test_a_message_ends_with_a_full_stop_if_there_are_none_or_too_many_names():
    assert nearest("x", []) == "."
    assert nearest("x", [f"name{i}" for i in range(51)]) == "."
