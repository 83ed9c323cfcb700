"""Parts of the suite; a worker that crashes fails one test, and the suite goes on and ends."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import scheduling

CRASH = "import os\ndef test_crash(): os.abort()\n"
QUICK = "import time\ndef test_one(): time.sleep(0.05)\n"


def test_a_crash_fails_one_test_alone(tmp_path):
    for i in range(12):  # files of one and of two tests, finished by the worker before the crash
        text = QUICK + "def test_two(): pass\n" * (i % 2)
        (tmp_path / f"test_{i:02}.py").write_text(CRASH + QUICK if i == 8 else text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    arguments = ["-q", "-n", "2", "-p", "tests.scheduling", "-p", "no:cacheprovider", "-p"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "no:hypothesispytest", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "1 failed, 18 passed" in done.stdout, done.stdout + done.stderr
    assert "test_08.py::test_crash" in done.stdout


def test_each_file_is_in_one_part():
    tests = [f"tests/test_{i}.py::test_{k}" for i in range(40) for k in range(2)]
    parts = [_kept(tests, f"{part}/3") for part in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == sorted(tests)
    assert all(len(part) >= 14 for part in parts)
    files = [{name.split("::")[0] for name in part} for part in parts]
    assert sum(map(len, files)) == 40
    assert _kept(tests, "1/1") == tests


def test_some_folders_are_in_each_part():
    tests = [f"tests/{folder}/test_{i}.py::test" for folder in "abc" for i in range(20)]
    tests.append("tests/ab/test.py::test")
    parts = [
        _kept(tests, f"{part}/2", ["tests/a", "tests/c/", "tests/b/test_3.py"]) for part in (1, 2)
    ]
    assert all({tests[i] for i in (*range(20), *range(40, 60))} < set(part) for part in parts)
    rest = [name for part in parts for name in part if name.startswith(("tests/b/", "tests/ab/"))]
    assert sorted(rest) == sorted([*tests[20:40], tests[23], tests[-1]])


def _kept(tests, part, always=()):
    items = [SimpleNamespace(nodeid=name) for name in tests]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    option = SimpleNamespace(part=scheduling._part(part), always=always)
    scheduling.pytest_collection_modifyitems(SimpleNamespace(option=option, hook=hook), items)
    return [item.nodeid for item in items]


@pytest.mark.parametrize("part", ["", "2", "0/2", "3/2", "1/x"])
def test_wrong_parts_are_refused(part):
    with pytest.raises(pytest.UsageError, match="--part must be K/N"):
        scheduling._part(part)
