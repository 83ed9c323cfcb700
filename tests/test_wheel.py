"""A wheel works outside the checkout: commands, several nodes, and modules of the user's own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlstack", "agents", "programs")
pytestmark = [pytest.mark.slow, pytest.mark.chosen, pytest.mark.timeout(240)]

OWN = """
import dataclasses
import gymnasium
from rlstack.agents import register
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets.registry import like, preset
from rlstack.networks import actor_critic

def make_env(**options):
    return gymnasium.make("CartPole-v1")

@dataclasses.dataclass(frozen=True)
class OwnConfig(PPOConfig):
    factor: float = 0.5

@register(OwnConfig, network=actor_critic)
class Own(PPO):
    pass

@preset
def cartpole_own(name):
    '''My own experiment.'''
    return like("cartpole-ppo", name, agent=OwnConfig(), env=EnvConfig("own_things:make_env"))
"""
SMALL = (
    "--frames", "600", "--evaluator.episodes", "2", "--evaluator.num-envs", "2",
    "--env.type", "for_loop",
)  # fmt: skip


def call(*command, cwd, **variables):
    """Runs a command that sees neither the checkout nor its PYTHONPATH; returns its output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder):
    """Builds the wheel from a copy of the sources, since a build writes beside them."""
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    code = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"
    printed = call(sys.executable, "-c", code, folder, cwd=source)
    return folder / printed.split()[-1]


def install(wheel, folder):
    """Installs the wheel where the packages of this environment are visible; returns `bin`."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix) / "bin" / version
    call(base, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    # Such a file only adds a directory: the checkout, which is installed there, stays invisible.
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    site = folder / "lib" / version / "site-packages"
    (site / "environment.pth").write_text("\n".join(packages))
    python = folder / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-index", wheel)
    return folder / "bin"


def pip(python, command, *arguments):
    """Runs ``pip COMMAND`` for the environment of a Python."""
    found = Path(sys.prefix).resolve().parent / ".tools" / "bin"
    uv = shutil.which("uv", path=f"{os.environ['PATH']}{os.pathsep}{found}")
    words = (uv, "pip", command, "--python", python) if uv else ()
    if not uv:  # as of the interpreter that made the environment
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        words = (Path(sys.base_prefix) / "bin" / version, "-m", "pip", "--python", python, command)
        arguments = ("--yes", *arguments) if command == "uninstall" else arguments
    call(*words, "--quiet", *arguments, cwd=python.parent)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(tmp_path_factory, wheel):
    return install(wheel, tmp_path_factory.mktemp("installed") / "venv") / "python"


@pytest.fixture
def rlstack(python, tmp_path):
    """Runs the command in an empty directory."""
    (tmp_path / "here").mkdir()
    return lambda *args: call(python, python.parent / "rlstack", *args, cwd=tmp_path / "here")


def test_it_holds_one_package_with_all_files(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {
        str(Path("" if name == "rlstack" else "rlstack") / path.relative_to(ROOT))
        for name in FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_commands_find_the_installed_stack_and_no_checkout(python, rlstack, tmp_path):
    code = "from rlstack import agents, programs; print(agents.__file__, programs.__file__)"
    assert str(ROOT) not in call(python, "-c", code, cwd=tmp_path)
    assert rlstack("--version").split()[0] == "rlstack"
    assert "cartpole-ppo" in rlstack("list")
    code = "from rlstack.programs.cli import features as f"
    code = f"{code}; print(f.install(['cluster']), f.reinstall())"
    said = call(python, "-c", code, cwd=tmp_path)
    assert said.strip() == "pip install 'rlstack[cluster]' pip install rlstack"


@pytest.mark.parametrize(
    "more",
    [(), ("--topology", "heavy_env", "--launch", "processes", "--program.num-actors", "1")],
    ids=["single_process", "heavy_env"],
)
def test_modules_of_the_users_own_train_from_another_directory(rlstack, tmp_path, more):
    (tmp_path / "here" / "own_things.py").write_text(OWN)
    rlstack("train", "cartpole-own", "--module", "own_things", *SMALL, *more, "--run-dir", "run")
    run = tmp_path / "here" / "run"
    config = json.loads((run / "config.json").read_text())
    assert (config["agent"]["kind"], config["modules"]) == ("OwnConfig", ["own_things"])
    result = json.loads((run / "result.json").read_text())
    assert result["env_frames"] >= 600
    assert result["git_commit"] == "unknown"  # not that of a checkout around the environment


@pytest.mark.parametrize("first", ["ours", "others"])
def test_a_package_called_agents_is_installed_beside_it(tmp_path, wheel, first):
    """In both orders; each works after the other is removed. openai-agents has such a package."""
    others = tmp_path / "agents_of_others-1.0-py3-none-any.whl"
    info = "agents_of_others-1.0.dist-info"
    with zipfile.ZipFile(others, "w") as file:
        file.writestr("agents/__init__.py", "whose = 'the agents of others'")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: agents-of-others\nVersion: 1.0"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        file.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in file.namelist()))
    python = install(wheel if first == "ours" else others, tmp_path / "venv") / "python"
    site = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    pip(python, "install", "--no-deps", "--no-index", others if first == "ours" else wheel)
    assert {path.name for path in site.iterdir()} >= {"agents", "rlstack"}
    assert not (site / "programs").exists()
    both = {
        "agents-of-others": "import agents; print(agents.whose)",
        "rlstack": "import rlstack.agents",
    }
    for code in both.values():
        call(python, "-c", code, cwd=tmp_path)
    removed = "agents-of-others" if first == "ours" else "rlstack"
    pip(python, "uninstall", removed)
    (left,) = both.keys() - {removed}
    call(python, "-c", both[left], cwd=tmp_path)
    assert not (site / {"rlstack": "rlstack", "agents-of-others": "agents"}[removed]).exists()
