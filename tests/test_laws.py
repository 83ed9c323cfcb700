"""Laws of the house: who may import whom, sizes, configs that are read, and start-up."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path for folder in ("rlstack", "agents", "programs") for path in (ROOT / folder).rglob("*.py")
)
MAX_FILE, MAX_FUNCTION = 300, 60

# The pure half: functions over arrays, without I/O, threads, processes or a clock.
PURE = (
    "types",
    "agent",
    "checks",
    "deterministic",
    "returns",
    "distributions",
    "exploration",
    "n_step",
    "networks",
    "normalise",
    "off_policy",
    "optimizers",
    "policy_gradient",
    "references",
    "shuffle",
    "q_learning",
    "target_network",
    "value_distributions",
)
# What the pure half and the agents may import from outside, beside the standard library.
PURE_PACKAGES = {"jax", "numpy", "haiku", "optax", "dm_env"}
IMPURE_STANDARD = {"os", "threading", "multiprocessing", "socket", "subprocess", "time", "queue"}
# Heavy packages, and the only files that may import them.
HEAVY = {
    "envpool": r"rlstack/envs/cpp\.py",
    "reverb": r"rlstack/replay/reverb/binding\.py",
    "launchpad": r"programs/(?!single_process)(launchers/)?\w+\.py",
    "courier": r"rlstack/rpc/courier\.py",
    "ray": r"programs/launchers/ray_\w+\.py",
    "tyro": r"programs/cli\.py",
    "tensorflow": r"(?!)",
    "tensorflow_probability": r"(?!)",
    "distrax": r"(?!)",
    "rlax": r"(?!)",
    "chex": r"(?!)",
}


def _name(path):
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _tree(path):
    return ast.parse(path.read_text(), str(path))


def _imports(path):
    """Every imported module of a file as a dotted name, with the names taken from it."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno}: imports are absolute"
            names = tuple(alias.name for alias in node.names)
            yield node.module, names
            if node.module in ("rlstack", "agents", "programs"):
                yield from ((f"{node.module}.{name}", ()) for name in names)


def _is_pure(path):
    relative = path.relative_to(ROOT / "rlstack")
    return relative.parts[0].removesuffix(".py") in PURE


def _breaches():
    for path in SOURCES:
        house = path.relative_to(ROOT).parts[0]
        pure = house == "agents" or (house == "rlstack" and _is_pure(path))
        for module, names in _imports(path):
            top, *rest = module.split(".")
            if house == "rlstack" and top in ("agents", "programs"):
                yield f"{_name(path)} imports {module}: rlstack knows neither"
            if house == "agents" and top == "programs":
                yield f"{_name(path)} imports {module}: agents know no program"
            if top == "agents" and any(n.startswith("_") for n in (*rest, *names)):
                yield f"{_name(path)} imports a private part of {module}"
            if pure and top == "rlstack" and rest and rest[0] not in PURE:
                yield f"{_name(path)} imports {module}: the pure half knows no driver"
            if pure and top in IMPURE_STANDARD:
                yield f"{_name(path)} imports {module}: the pure half does no such thing"
            known = sys.stdlib_module_names | PURE_PACKAGES | {"rlstack", "agents"}
            if pure and top not in known:
                yield f"{_name(path)} imports {module}: the pure half needs only {PURE_PACKAGES}"
            if top in HEAVY and not re.fullmatch(HEAVY[top], _name(path)):
                yield f"{_name(path)} imports {module}: only {HEAVY[top]} may"


def test_imports_point_down_and_heavy_packages_stay_in_their_files():
    assert len(SOURCES) > 20
    assert sum(1 for path in SOURCES for _ in _imports(path)) > 100
    assert list(_breaches()) == []


def test_the_law_sees_each_kind_of_breach(tmp_path, monkeypatch):
    planted = {
        "rlstack/actor.py": "from agents import ppo",
        "rlstack/returns.py": "import rlstack.replay\nfrom rlstack import learner",
        "rlstack/agent.py": "def f():\n    import time",
        "rlstack/envs/pool.py": "import envpool",
        "rlstack/rpc/calls.py": "def f():\n    from courier.python import py_client",
        "rlstack/networks/deep.py": "import torch",
        "agents/ppo.py": "from agents.dqn import _targets\nimport programs.cli",
        "programs/single_process.py": "import launchpad",
        "programs/train.py": "import tyro\nimport tensorflow as tf",
    }
    for name, text in planted.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "SOURCES", sorted(tmp_path.rglob("*.py")))
    found = [breach.split(" imports ")[0] for breach in _breaches()]
    assert sorted(set(found)) == sorted(planted)
    for name in ("rlstack/returns.py", "agents/ppo.py", "programs/train.py"):
        assert found.count(name) >= 2


def test_envpool_and_the_services_are_imported_lazily():
    """At the top of a file they would be paid for, or missed, by whoever imports that file."""
    early = [
        f"{_name(path)}:{node.lineno}"
        for path in SOURCES
        for node in _tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else _aliases(node))
        if module.split(".")[0]
        in ("envpool", "reverb", "courier", "tensorflow", "orbax", "tensorboardX", "ray")
    ]
    assert early == []


def _aliases(node):
    return [alias.name for alias in node.names]


def test_files_are_short():
    sizes = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE} == {}


def test_functions_are_short():
    sizes = {
        f"{_name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(sizes) > 100
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION} == {}


def _configs():
    """(file, class, its fields) of every dataclass that configures something."""
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.ClassDef) or not re.search(
                "Config$|^Experiment$", node.name
            ):
                continue
            if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                fields = [
                    entry.target.id
                    for entry in node.body
                    if isinstance(entry, ast.AnnAssign) and "ClassVar" not in ast.unparse(entry)
                ]
                yield path, node, fields


def _reads():
    """(attribute name, the class whose __post_init__ reads it, else None) all over the source."""
    found = set()

    def visit(node, owner, checking):
        if isinstance(node, ast.ClassDef):
            owner = node.name
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            checking = owner
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add((node.attr, checking))
        for child in ast.iter_child_nodes(node):
            visit(child, owner, checking)

    for path in SOURCES:
        visit(_tree(path), None, None)
    return found


def test_every_config_field_is_read_and_has_a_help_string():
    reads, unread, silent = _reads(), [], []
    configs = list(_configs())
    assert len(configs) >= 3
    for path, node, fields in configs:
        for field in fields:
            if not any(attr == field and owner != node.name for attr, owner in reads):
                unread.append(f"{_name(path)}:{node.name}.{field}")
        for entry, following in zip(node.body, [*node.body[1:], None], strict=True):
            is_help = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(entry, ast.AnnAssign) and not is_help:
                silent.append(f"{_name(path)}:{node.name}.{ast.unparse(entry.target)}")
    assert unread == []
    assert silent == []


def test_no_file_names_a_package_registry():
    """Whoever installs decides where from: a host in a file would override mirrors."""
    words = ["pypi\x2eorg", "pythonhosted\x2e", "npmjs\x2e", "index-url\x20http", "index-url=http"]
    words += ["--extra-index-url", "--find-links"]
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=20, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    assert "requirements.lock" in names
    found = []
    for name in names:
        path = ROOT / name
        if path.is_file() and path != Path(__file__).resolve():
            text = path.read_text(errors="replace")
            found += [(name, word) for word in words if word in text]
    assert found == []


def _python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.timeout(100)
@pytest.mark.skipif(
    importlib.util.find_spec("programs.single_process") is None, reason="not written yet"
)
def test_a_single_process_loads_none_of_the_services():
    done = _python(
        "import sys, programs.single_process, programs.cli, envpool\n"
        "heavy = {'tensorflow', 'reverb', 'launchpad', 'courier', 'tensorflow_probability', 'ray', "
        "'rlax', 'distrax', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.timeout(60)
@pytest.mark.skipif(importlib.util.find_spec("programs.cli") is None, reason="not written yet")
def test_help_answers_at_once():
    def seconds(*arguments):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, timeout=30, check=True
        )
        return time.perf_counter() - start, done.stdout

    # The smallest of several: what others do on the machine only ever adds.
    pairs = [(seconds("-c", "pass"), seconds("-m", "programs", "--help")) for _ in range(5)]
    bare, helping = (min(times) for times in zip(*((b[0], h[0]) for b, h in pairs), strict=True))
    assert b"usage: rlstack" in pairs[0][1][1]
    assert helping - bare < 0.3
