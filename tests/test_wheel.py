"""A wheel works outside the checkout: commands, several nodes, and modules of the user's own.

It says from which commit it is, and its version is that of the tag.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def git(source, *words):
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    return call("git", *identity, *words, cwd=source).strip()


def sources(folder):
    """Returns a checkout with the sources alone, whose commit is tagged as version 0.7.3."""
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "setup.py", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, source / name)
    git(source, "init", "-q")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "all")
    git(source, "tag", "v0.7.3")
    return source


def build(source, folder, kind="wheel"):
    """Builds a distribution, as pip does but with this environment's setuptools."""
    code = f"import sys; from setuptools.build_meta import build_{kind} as b; print(b(sys.argv[1]))"
    printed = call(sys.executable, "-c", code, folder, cwd=source)
    return folder / printed.split()[-1]


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(file.read(name))


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
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("wheel"))


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
    } | {"rlstack/commit.txt"}


def test_a_release_has_the_version_of_its_tag_and_what_an_index_shows(wheel):
    found = metadata_of(wheel)
    assert (found["Name"], found["Version"]) == ("rlstack", "0.7.3")
    assert "reinforcement learning" in found["Keywords"]
    assert "Programming Language :: Python :: 3.13" in found.get_all("Classifier")
    urls = dict(line.split(", ") for line in found.get_all("Project-URL"))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert found["Description-Content-Type"] == "text/markdown"
    text = found.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert f"{urls['Repository']}/blob/v0.7.3/docs/install.md" in links
    assert [
        link for link in links if not link.startswith(f"{urls['Repository']}/blob/v0.7.3/")
    ] == []


def test_a_plain_installation_has_no_matplotlib(wheel):
    """None of the packages that it needs asks for it, but EnvPool, which runs without it.

    docs/install.md says how to leave it out; tests/envs/cpp/test_without.py trains without it.
    """

    def needed(lines):
        found = map(Requirement, lines or ())
        plain = {"extra": ""}
        return {r.name.lower() for r in found if r.marker is None or r.marker.evaluate(plain)}

    seen, rest = set(), needed(metadata_of(wheel).get_all("Requires-Dist"))
    assert {"jax", "dm-haiku", "envpool"} <= rest
    while rest:
        name = rest.pop()
        seen.add(name)
        if name != "envpool":
            rest |= needed(metadata.requires(name)) - seen
    assert len(seen) > 20
    assert "matplotlib" not in seen


def test_a_build_between_tags_names_its_commit_and_whether_files_differ_from_it(source, tmp_path):
    here = tmp_path / "source"
    shutil.copytree(source, here, symlinks=True)
    git(here, "commit", "-q", "--allow-empty", "-m", "more")
    commit = git(here, "rev-parse", "HEAD")
    (here / "rlstack" / "new.py").write_text("")
    changed = build(here, tmp_path)
    assert metadata_of(changed)["Version"] == f"0.7.4.dev1+g{commit[:8]}.dirty"
    assert zipfile.ZipFile(changed).read("rlstack/commit.txt").decode() == f"{commit}-dirty\n"
    git(here, "clean", "-fdq")
    git(here, "tag", "-d", "v0.7.3")
    untagged = metadata_of(build(here, tmp_path))
    assert untagged["Version"] == f"0.1.0.dev2+g{commit[:8]}"
    assert f"/blob/{commit}/docs/install.md" in untagged.get_payload()


def test_a_wheel_of_a_source_distribution_is_that_of_the_checkout(source, wheel, tmp_path):
    with tarfile.open(build(source, tmp_path, "sdist")) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    again = build(tmp_path / "unpacked" / "rlstack-0.7.3", tmp_path)
    assert metadata_of(again).as_string() == metadata_of(wheel).as_string()
    held = [zipfile.ZipFile(path) for path in (wheel, again)]
    assert sorted(held[0].namelist()) == sorted(held[1].namelist())
    assert held[0].read("rlstack/commit.txt") == held[1].read("rlstack/commit.txt")


def test_the_commands_find_the_installed_stack_and_no_checkout(python, rlstack, source, tmp_path):
    code = "from rlstack import agents, programs; print(agents.__file__, programs.__file__)"
    assert str(ROOT) not in call(python, "-c", code, cwd=tmp_path)
    commit = git(source, "rev-parse", "HEAD")
    assert rlstack("--version") == f"rlstack 0.7.3 (commit {commit})\n"
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
def test_modules_of_the_users_own_train_from_another_directory(rlstack, source, tmp_path, more):
    (tmp_path / "here" / "own_things.py").write_text(OWN)
    rlstack("train", "cartpole-own", "--module", "own_things", *SMALL, *more, "--run-dir", "run")
    run = tmp_path / "here" / "run"
    config = json.loads((run / "config.json").read_text())
    assert (config["agent"]["kind"], config["modules"]) == ("OwnConfig", ["own_things"])
    result = json.loads((run / "result.json").read_text())
    assert result["env_frames"] >= 600
    # Not that of a checkout around the environment.
    assert result["git_commit"] == git(source, "rev-parse", "HEAD")
    assert result["versions"]["rlstack"] == "0.7.3"


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
