"""docs/ is correct: files shown equal the repository's files, and everything named exists."""

import re
from pathlib import Path

from rlstack.agents import AGENTS
from rlstack.programs.config.presets import PRESETS, preset

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()


def test_the_files_shown_are_the_files_there():
    shown = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", ALGORITHMS, re.M | re.S)
    assert len(shown) == 2
    for path, text in shown:
        assert (ROOT / path).read_text() == text, path
    (line,) = re.findall(r"^```python\n(@register\(.*\))\n```$", ALGORITHMS, re.M)
    assert f"\n{line}\nclass Munchausen(" in (ROOT / shown[0][0]).read_text()
    (line,) = re.findall(r"^```python\n(SETTINGS = .*)\n```$", ALGORITHMS, re.M)
    assert f"\n{line}\n" in (ROOT / "tests" / "agents" / "test_munchausen.py").read_text()


def test_every_agent_and_every_preset_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \|.*\|$", ALGORITHMS, re.M)
    assert set(rows) == {
        entry.agent.__name__
        for entry in AGENTS.values()
        if entry.agent.__module__.startswith("rlstack.")
    }
    table = ALGORITHMS.split("## Presets")[1]
    assert set(re.findall(r"`([a-z0-9-]+)`", table)) == set(PRESETS)


def test_results_are_of_presets_as_they_are():
    rows = re.findall(r"^\| ([a-z0-9-]+) \|[^|]*\|[^|]*\| ([\d,]+) \|", RESULTS, re.M)
    assert len(rows) > 10
    for name, frames in rows:
        made, wanted = int(frames.replace(",", "")), preset(name).frames
        assert wanted <= made <= 1.01 * wanted + 1000, name
        assert (ROOT / "docs" / "results" / f"{name}.png").exists()
