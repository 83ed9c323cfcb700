"""The benchmark of programs runs, ends with its JSON, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import topologies

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.reference


@pytest.mark.timeout(60)
def test_a_name_that_no_setting_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        topologies.main(["--only", "nothing"])
    assert "no setting's name has 'nothing' in it" in capsys.readouterr().err


def test_what_has_a_target_is_measured_in_both_lengths():
    for settings in (topologies.QUICK, topologies.FULL):
        names = [setting.name for setting in settings]
        assert len(set(names)) == len(names)
        assert all(any(n.startswith(kind) for n in names) for kind in topologies.TARGETS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_runs_and_ends_with_its_json():
    before = set(psutil.pids())
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.topologies", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    result = json.loads(line)
    assert set(result) == {"name", "ratios", "medians", "spread", "where"}
    assert result["name"] == "topologies"
    names = {setting.name for setting in topologies.QUICK}
    for part in ("ratios", "medians", "spread", "where"):
        assert set(result[part]) == names
    for name in names:
        assert any(row.startswith(name) for row in table)
        assert 0.01 < result["ratios"][name] < 100
    service = result["medians"]["service/each/4x32"]
    assert 0 < service["ours_latency_ms_p50"] <= service["ours_latency_ms_p99"]
    assert 0 < result["medians"]["startup/6_processes"]["seconds"] < 180
    assert not {pid for pid in set(psutil.pids()) - before if _is_ours(pid)}


def _is_ours(pid):
    try:
        return any(word.startswith("benchmarks.") for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
