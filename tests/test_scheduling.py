"""A worker that crashes fails one test; the suite goes on and ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CRASH = "import os\ndef test_crash(): os.abort()\n"
QUICK = "import time\ndef test_one(): time.sleep(0.05)\n"


@pytest.mark.one_lane
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
