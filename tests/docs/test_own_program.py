"""docs/own_program.md: its program runs as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own_program.md").read_text()


@pytest.mark.launchpad
@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
def test_the_program_of_the_page_learns_and_stops(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "own_program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "own_program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "the learner has made 20 updates" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "did not terminate in time" not in done.stdout
