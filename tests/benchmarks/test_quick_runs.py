"""The quick run of each benchmark prints a table and JSON, and leaves no processes or files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import (
    entity,
    fused,
    launchers,
    loggers,
    single_process,
    starts,
    topologies,
    transports,
)

ROOT = Path(__file__).resolve().parents[2]


def run_quick(module, seconds, also=()):
    """Runs a benchmark as a command, checks the common fields, and returns the result."""
    before = set(psutil.pids())
    done = subprocess.run(
        [sys.executable, "-m", module.__name__, "--quick"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    assert not {pid for pid in set(psutil.pids()) - before if _is_ours(pid)}
    *table, line = done.stdout.splitlines()
    result = json.loads(line)
    assert set(result) == {"name", "ratios", "medians", "spread", "where"}
    assert result["name"] == module.__name__.rsplit(".", 1)[1]
    names = {setting.name for setting in module.QUICK}.union(also)
    for part in ("ratios", "medians", "spread", "where"):
        assert set(result[part]) == names
    for name in names:
        assert any(row.startswith(name) for row in table)
        assert 0.01 < result["ratios"][name] < 100
    return result


def _is_ours(pid):
    try:
        return any(word.startswith("benchmarks.") for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_single_process_against_hand_written_loops():
    pytest.importorskip("envpool")
    for sides in run_quick(single_process, 280)["where"].values():
        for shares in sides.values():
            assert {"env", "inference", "rest"} <= set(shares)
            assert sum(shares.values()) == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_loop_against_a_hand_written_one():
    pytest.importorskip("gymnax")
    for medians in run_quick(fused, 280)["medians"].values():
        assert medians["ours_compile_seconds"] > 0


@pytest.mark.slow
@pytest.mark.launchpad
@pytest.mark.timeout(600)
def test_programs_of_several_nodes():
    medians = run_quick(topologies, 580)["medians"]
    service = medians["service/each/4x32"]
    assert 0 < service["ours_latency_ms_p50"] <= service["ours_latency_ms_p99"]
    assert 0 < medians["startup/6_processes"]["seconds"] < 180


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transports():
    result = run_quick(transports, 280)
    for medians in result["medians"].values():
        assert 0 < medians["ours_latency_ms_p50"] <= medians["ours_latency_ms_p99"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_loggers_and_watchers():
    also = [f"loggers/{name}/cpu" for name in ("default", "all")]
    where = run_quick(loggers, 280, also)["where"]
    for name in ("top", "dashboard"):
        assert 0 <= where[f"watching/{name}"]["ours"]["watcher"] < 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_launchers():
    run_quick(launchers, 580)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entities():
    result = run_quick(entity, 580)
    ratios, where = result["ratios"], result["where"]
    assert ratios["batching/MultiSnakex256"] >= entity.TARGETS["batching"]
    for name in ("attention/forwardx64", "attention/gradientx64"):
        assert ratios[name] > 1.5
        assert where[name]["packed"]["padding"] < entity.PADDING
    for game in ("Count", "MultiSnake"):
        shares = where[f"ppo/{game}x64"]["ours"]
        assert {"env", "inference", "learn"} <= set(shares)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_starts_against_a_hand_written_script():
    pytest.importorskip("gymnax")
    for seconds in run_quick(starts, 380)["medians"].values():
        assert 1 < seconds["ours_seconds"] < 100 and 1 < seconds["reference_seconds"] < 100
