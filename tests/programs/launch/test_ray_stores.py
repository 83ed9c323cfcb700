"""A program on a Ray cluster whose hosts share no disk: its run directory is in an object store."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("ray")
pytest.importorskip("obstore")
pytest.importorskip("moto")

from rlstack.programs.__main__ import main
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import files
from tests.programs.clusters import VARIABLES, cluster, wait_until_empty
from tests.programs.launched import FAST
from tests.programs.networks import hiding, wait_until_up
from tests.programs.running import metrics
from tests.storage import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.chosen, pytest.mark.timeout(280, method="thread")]


@contextlib.contextmanager
def _host_without(folder, address):
    """Adds a Ray node that finds an empty folder at a path, as on a machine of its own."""
    command = [*hiding(folder), sys.executable, "-m"]
    command += ["ray.scripts.scripts", "start", "--block", "--address", address, "--num-cpus=8"]
    command += ["--object-store-memory=83886080", "--disable-usage-stats"]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **VARIABLES}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until_up(log.name, process)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(5)


def _can_hide(folder):
    command = [*hiding(folder), "true"]
    return shutil.which("unshare") and subprocess.run(command, capture_output=True).returncode == 0


def test_hosts_need_no_shared_disk(tmp_path, monkeypatch, s3):
    copies = tmp_path / "copies"
    copies.mkdir()
    if not _can_hide(copies):
        pytest.skip("hiding a folder from a process needs root and unshare")
    monkeypatch.setenv(files.COPIES, str(copies))
    url = f"s3://{s3_server.BUCKET}/runs/one"
    with cluster(0) as head:
        with _host_without(copies, head.address):
            small = (*map(str, FAST), "--frames", "3000", "--checkpoint-period", "1000")
            nodes = ("--program.num-actors", "4", "--program.num-inferencers", "2")
            ray = ("--launch", "ray", "--ray-address", head.address, "--program.transport", "zmq")
            # This variable makes every node print its imports. JAX_LOG_COMPILES is not enough:
            # actors that use inferencers compile nothing, so they would print nothing.
            nodes += ("--program.ray.env-vars", "PYTHONPROFILEIMPORTTIME", "1")
            args = ("train", "cartpole-ppo", "--topology", "distributed", *ray, *small, *nodes)
            assert main([*args, "--run-dir", url]) == 0
            assert wait_until_empty() == []
        directory = RunDir.open(url)
        lines = (directory.node_logs / "hosts.jsonl").read_text().splitlines()
        where = {line["node"]: line["node_id"] for line in map(json.loads, lines)}
        here = where["learner"]
        assert {where[name] for name in ("coordinator", "replay", "evaluator")} == {here}
        away = {name for name, host in where.items() if host != here}
        for name in away:  # what they printed on the host without the folder
            text = (directory.node_logs / name).read_text()
            assert "import time:" in text, name
        assert away and all(name.startswith(("actor", "inferencer")) for name in away)
        assert json.loads(directory.result.read_text())["env_frames"] >= 3000
        assert metrics(directory.path)[-1]["env_frames"] >= 3000
        stored = {path for _, path, _ in s3.requests}
        assert not [path for path in stored if "keys" in path or ".hosts" in path]
        assert any("/checkpoints/step_" in path for path in stored)
