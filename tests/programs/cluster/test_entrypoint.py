"""The command of a RayJob trains on a Ray cluster, as its head runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_dir import RunDir
from tests.programs.cluster.files import documents, made
from tests.programs.clusters import wait_until_empty
from tests.programs.launched import FAST

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240, method="thread")]
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.chosen
def test_the_entry_point_of_a_ray_job_trains_and_starts_again_from_a_checkpoint(
    tmp_path, capsys, hosts
):
    run_dir = tmp_path / "run"
    words = ("--run-dir", run_dir, "--program.num-actors", 2, *FAST)
    more = ("--replay.service", "table", "--program.transport", "zmq")
    ports = ("--program.ports", "25000-25040")
    (tmp_path / "rlstack").write_text(f'#!/bin/sh\nexec {sys.executable} -m rlstack "$@"\n')
    (tmp_path / "rlstack").chmod(0o755)
    for frames in (3000, 3000):
        text = made(capsys, "kuberay", *words, *more, *ports, "--frames", frames)
        entry = documents(text)["RayJob"]["spec"]["entrypoint"]
        assert "--program.ray.address auto" in entry
        # As the job's driver, which finds the cluster by its address.
        variables = {"RAY_ADDRESS": hosts.address, "PYTHONPATH": str(ROOT)}
        variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-c", entry],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr
        assert "evaluation return" in done.stdout
        assert wait_until_empty() == []
    result = read_result(RunDir(run_dir))
    assert result is not None and result.env_frames >= 3000 and result.topology == "distributed"
    placed = [json.loads(line) for line in (run_dir / "logs" / "hosts.jsonl").open()]
    ports = [port for record in placed for port in record["ports"]]
    assert len(ports) >= 4 and all(25000 <= port <= 25040 for port in ports)
    assert "has finished" in done.stderr  # the second job found nothing left to do
