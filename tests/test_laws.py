"""Laws of the source: allowed imports, sizes, configs that are read, and start-up."""

import ast
import functools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The folders of the one package. The last two are linked into the first: see `_module`.
FOLDERS = ("rlstack", "agents", "programs")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# Budgets. One that is passed fails its test; lower it when the code gets below it.
MAX_FILE, MAX_FUNCTION, MAX_MODULES = 700, 60, 20
MAX_ROOMS, MAX_FLOORS, MAX_ARROWS = 9, 8, 34  # of `programs`
# That importing the config of an experiment reads. Options of networks of values, of blocks,
# norms and cores, of recorded steps, processed items, levels and hosts are fields with a sentence
# each.
CONFIG_FILES, CONFIG_LINES = 24, 2765
TRAIN_FILES = 180  # that `rlstack train cartpole-ppo` imports
# These folders have one file per algorithm, family of presets, or game, so they may grow.
ONE_FILE_EACH = {"agents", "programs/config/presets", "rlstack/entity/games", "tests/agents"}

# A room is a package whose docstring ends with what it may import; a package without that line
# belongs to the room around it. A room that says "Pure." holds functions over arrays, without
# I/O, threads, processes or a clock.
MAY_IMPORT = re.compile(r"May import: ([\w., \n]+)\.\s*$")
# The packages that the pure half and the agents may import, besides the standard library.
PURE_PACKAGES = {"jax", "numpy", "haiku", "jmp", "optax", "dm_env", "equinox", "mctx"}
IMPURE_STANDARD = {"os", "threading", "multiprocessing", "socket", "subprocess", "time", "queue"}
# Heavy packages, and the only files that may import them.
HEAVY = {
    "brax": r"rlstack/jax_envs/libraries/from_brax\.py",
    "craftax": r"rlstack/jax_envs/libraries/from_craftax\.py",
    "envpool": r"rlstack/envs/cpp/library\.py",
    "reverb": r"rlstack/replay/reverb/binding\.py",
    "launchpad": r"(programs/program/launch/launchpad/\w+|rlstack/rpc/courier)\.py",
    "courier": r"rlstack/rpc/courier\.py",
    "zmq": r"rlstack/rpc/zmq/\w+\.py",
    "equinox": r"rlstack/networks/adapters\.py",
    "flax": r"(?!)",
    "gymnax": r"rlstack/jax_envs/libraries/from_gymnax\.py",
    "jaxmarl": r"rlstack/jax_envs/libraries/from_jaxmarl\.py",
    "mctx": r"rlstack/families/planning\.py",
    "obstore": r"rlstack/storage/objects\.py",
    "optuna": r"programs/study/optuna\.py",
    "ray": r"programs/program/launch/ray/\w+\.py",
    "tyro": r"programs/cli/\w+\.py",
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


def _module(path, root=None):
    """The parts of the name of a module or package, as it is imported."""
    parts = path.relative_to(root or ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return parts if parts[0] == "rlstack" else ("rlstack", *parts)


def _imports(path):
    """Every imported module of a file as a dotted name, with the names imported from it."""
    if _name(path) == "rlstack/__init__.py":
        return  # the public API imports its names on first use
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno}: imports are absolute"
            names = tuple(alias.name for alias in node.names)
            yield node.module, names


@functools.cache
def _rooms(root):
    """The rooms below a checkout: name -> (whether it is pure, the rooms that it may import)."""
    rooms = {}
    for path in root.glob("*/**/__init__.py"):
        if path.relative_to(root).parts[0] not in FOLDERS:
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        if found := MAY_IMPORT.search(docstring):
            names = set(re.split(r"[,\s]+", found[1])) - {"nothing"}
            rooms[".".join(_module(path, root))] = ("Pure." in docstring, names)
    return rooms


def _room(module):
    """The room of a module: the nearest package around it that is one."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in _rooms(ROOT)), None)


def _room_of(path):
    """The room of a file; modules run by `python -m` are above all rooms, with the command line."""
    parts = _module(path)
    return _room("rlstack.programs.cli" if parts[-1] == "__main__" else ".".join(parts))


def _breaches():
    for path in SOURCES:
        room = _room_of(path)
        if room is None:
            yield f"{_name(path)} imports anything: no package around it says what it may"
            continue
        pure, allowed = _rooms(ROOT)[room]
        for module, names in _imports(path):
            top, *rest = module.split(".")
            if top == "rlstack":
                for target in {_room(f"{module}.{name}") for name in names} or {_room(module)}:
                    if target not in allowed | {room}:
                        yield f"{_name(path)} imports {module}: {room} may not import {target}"
            if rest[:1] == ["agents"] and any(n.startswith("_") for n in (*rest, *names)):
                yield f"{_name(path)} imports a private part of {module}"
            if pure and top in IMPURE_STANDARD:
                yield f"{_name(path)} imports {module}: a pure room does no such thing"
            known = sys.stdlib_module_names | PURE_PACKAGES | {"rlstack"}
            if pure and top not in known:
                yield f"{_name(path)} imports {module}: pure rooms need only {PURE_PACKAGES}"
            if top in HEAVY and not re.fullmatch(HEAVY[top], _name(path)):
                yield f"{_name(path)} imports {module}: only {HEAVY[top]} may"


def test_the_laws_of_rooms_have_no_circle():
    rooms = _rooms(ROOT)
    assert len(rooms) > 15
    unknown = {target for _, allowed in rooms.values() for target in allowed} - set(rooms)
    assert unknown == set()
    open_rooms = dict(rooms)
    while ground := {n for n, (_, allowed) in open_rooms.items() if not allowed & set(open_rooms)}:
        open_rooms = {name: room for name, room in open_rooms.items() if name not in ground}
    assert open_rooms == {}


def test_programs_has_few_rooms_floors_and_arrows():
    rooms = {
        name: {other for other in allowed if other.startswith("rlstack.programs.")}
        for name, (_, allowed) in _rooms(ROOT).items()
        if name.startswith("rlstack.programs.")
    }

    def floor(name):
        return 1 + max(map(floor, rooms[name]), default=0)

    assert 0 < len(rooms) <= MAX_ROOMS
    assert max(map(floor, rooms)) <= MAX_FLOORS
    assert sum(map(len, rooms.values())) <= MAX_ARROWS


def _read_by(start):
    """The files that importing a file reads, by the imports at the top of modules."""
    by_module = {".".join(_module(path)): path for path in SOURCES}
    seen, todo = set(), [start]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        names = {".".join(_module(path)[:n]) for n in range(1, len(_module(path)) + 1)}
        for node in _tree(path).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        todo += [by_module[name] for name in names if name in by_module]
    return seen


def test_the_config_of_an_experiment_imports_no_implementation():
    read = _read_by(ROOT / "programs" / "config" / "experiment.py")
    assert 10 < len(read) <= CONFIG_FILES
    assert sum(len(path.read_text().splitlines()) for path in read) <= CONFIG_LINES
    code = "import sys; from rlstack.programs.config import encoding; "
    code += "from rlstack.programs.config.presets import PRESETS; "
    done = _python(code + "print(len(PRESETS) > 50, {'jax', 'numpy.random'} & set(sys.modules))")
    assert done.stdout.startswith("True"), done.stderr
    assert "jax" not in done.stdout


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(100)
def test_training_imports_little_that_it_does_not_use(tmp_path):
    small = ["--frames", "600", "--evaluator.episodes", "2", "--evaluator.num-envs", "2"]
    arguments = ["train", "cartpole-ppo", *small, "--run-dir", str(tmp_path / "run")]
    done = _python(
        "import sys; from rlstack.programs.__main__ import main\n"
        f"code = main({arguments})\n"
        "found = [name for name in sys.modules if name.split('.')[0] == 'rlstack']\n"
        "print(code, len(found))\n"
    )
    code, files = done.stdout.split()[-2:]
    assert code == "0", done.stderr
    assert 50 < int(files) <= TRAIN_FILES


def test_rooms_import_all_that_they_say():
    """A room must not be allowed to import more than it imports."""
    used = {name: set() for name in _rooms(ROOT)}
    for path in SOURCES:
        room = _room_of(path)
        for module, names in _imports(path):
            if module.split(".")[0] == "rlstack":
                used[room] |= {_room(f"{module}.{name}") for name in names} or {_room(module)}
    unused = {name: allowed - used[name] for name, (_, allowed) in _rooms(ROOT).items()}
    assert {name: left for name, left in unused.items() if left} == {}


def test_imports_point_down_and_heavy_packages_stay_in_their_files():
    assert len(SOURCES) > 20
    assert sum(1 for path in SOURCES for _ in _imports(path)) > 100
    assert list(_breaches()) == []


def test_the_core_finds_games_of_entities_by_name_only():
    """Only what draws, plays or serves games may import them; a config names them."""
    around = ("rlstack/entity/", "programs/pictures/", "programs/tools/")
    core = [path for path in SOURCES if not _name(path).startswith(around)]
    assert len(core) > 300
    imported = {
        (_name(path), name)
        for path in core
        for module, names in _imports(path)
        for name in (module, *(f"{module}.{name}" for name in names))
    }
    assert ("programs/run/train.py", "rlstack.envs.watch") in imported
    assert [pair for pair in imported if f"{pair[1]}.".startswith("rlstack.entity.")] == []


def test_the_law_sees_each_kind_of_breach(tmp_path, monkeypatch):
    rooms = {
        "rlstack": "Pure.\n\nMay import: nothing.",
        "rlstack/acting": "May import: rlstack.",
        "rlstack/envs": "May import: rlstack.",
        "rlstack/math": "Pure.\n\nMay import: rlstack.",
        "rlstack/rpc": "May import: rlstack,\nrlstack.math.",
        "rlstack/replay": "May import: rlstack.",
        "agents": "Pure.\n\nMay import: rlstack.",
        "programs": "May import: rlstack.agents, rlstack.programs.run.",
        "programs/run": "May import: rlstack.agents, rlstack.",
    }
    planted = {
        "rlstack/acting/actor.py": "from rlstack.agents import ppo",
        "rlstack/math/returns.py": "import rlstack.replay\nfrom rlstack import acting",
        "rlstack/agent.py": "def f():\n    import time",
        "rlstack/envs/pool.py": "import envpool",
        "rlstack/rpc/calls.py": "def f():\n    from courier.python import py_client",
        "rlstack/math/deep/net.py": "import torch",
        "rlstack/replay/reverb/table.py": "from rlstack.rpc.calls import serve",
        "agents/ppo.py": "from rlstack.agents.dqn import _targets\nimport rlstack.programs.cli",
        "programs/run/single_process.py": "import launchpad",
        "programs/train.py": "import tyro\nimport tensorflow as tf",
        "agents/fine.py": "from rlstack.types import Batch\n"
        "from rlstack.agents.ppo import PPO\nimport jax",
    }
    files = {f"{name}/__init__.py": f'"""A room.\n\n{text}\n"""' for name, text in rooms.items()}
    for name, text in (files | planted).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "SOURCES", sorted(tmp_path.rglob("*.py")))
    found = [breach.split(" imports ")[0] for breach in _breaches()]
    assert sorted(set(found)) == sorted(set(planted) - {"agents/fine.py"})
    for name in ("rlstack/math/returns.py", "agents/ppo.py", "programs/train.py"):
        assert found.count(name) >= 2


def test_envpool_and_the_services_are_imported_lazily():
    """Imported at the top of a file, they would slow or break every import of that file."""
    early = [
        f"{_name(path)}:{node.lineno}"
        for path in SOURCES
        for node in _tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else _aliases(node))
        if module.split(".")[0]
        in (
            "brax",
            "envpool",
            "reverb",
            "courier",
            "equinox",
            "gymnax",
            "jaxmarl",
            "mctx",
            "tensorflow",
            "orbax",
            "tensorboardX",
            "obstore",
            "optuna",
            "ray",
        )
    ]
    assert early == []


def _aliases(node):
    return [alias.name for alias in node.names]


def test_files_are_short():
    paths = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    sizes = {_name(path): len(path.read_text().splitlines()) for path in paths}
    assert len(sizes) > 300
    assert {name: size for name, size in sizes.items() if size > MAX_FILE} == {}


def test_folders_are_small():
    paths = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    modules = Counter(path.parent for path in paths if path.name != "__init__.py")
    sizes = {_name(folder): size for folder, size in modules.items() if size > MAX_MODULES}
    assert {name: size for name, size in sizes.items() if name not in ONE_FILE_EACH} == {}
    assert len(list((ROOT / "rlstack").glob("*.py"))) <= 7  # the top level


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
    """The user chooses the package source: a host in a file would override mirrors."""
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
def test_a_single_process_loads_none_of_the_services():
    done = _python(
        "import sys, rlstack.programs.run.single_process, rlstack.programs.cli.commands, envpool\n"
        "heavy = {'tensorflow', 'reverb', 'launchpad', 'courier', 'zmq', "
        "'tensorflow_probability', 'ray', 'rlax', 'distrax', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.timeout(60)
def test_help_answers_at_once():
    def seconds(*arguments):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, timeout=30, check=True
        )
        return time.perf_counter() - start, done.stdout

    # The smallest of several, because other load on the machine only adds time.
    pairs = [(seconds("-c", "pass"), seconds("-m", "rlstack", "--help")) for _ in range(5)]
    bare, helping = (min(times) for times in zip(*((b[0], h[0]) for b, h in pairs), strict=True))
    assert b"usage: rlstack" in pairs[0][1][1]
    assert helping - bare < 0.3
