"""Hosts with separate networks and no shared disk, and a store: hosts and the store go away."""

import contextlib
import signal
import time

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("obstore")
pytest.importorskip("moto")

from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint, files
from tests.programs.clusters import VARIABLES
from tests.programs.launched import Launched
from tests.programs.networks import network, ray_on
from tests.programs.running import metrics
from tests.storage import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580, method="thread")]
URL = f"s3://{s3_server.BUCKET}/runs/one"
NODES = (
    "--topology", "distributed", "--launch", "ray", "--program.transport", "zmq",
    "--program.num-actors", 4, "--program.num-inferencers", 2, "--checkpoint-period", 5000,
    "--log-period", 1000, "--evaluator.episodes", 2, "--evaluator.num-envs", 2,
)  # fmt: skip


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Three hosts, which share no copies of runs."""
    with network(3) as made:
        for host in made:
            host.hides = tmp_path / "copies"
        (tmp_path / "copies").mkdir()
        for name, value in {**VARIABLES, files.COPIES: str(tmp_path / "copies")}.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def store(hosts, monkeypatch):
    """A server of S3 that the hosts reach."""
    with s3_server.started(f"{hosts[0].address.rpartition('.')[0]}.254") as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


@contextlib.contextmanager
def launched(host, address, *args):
    """The command on a host, which alone sees its copies."""
    host.hides = None
    copy = files.local(URL)
    copy.parent.mkdir(parents=True, exist_ok=True)
    with Launched(copy, *args, *NODES, "--ray-address", address, within=host.within) as program:
        yield program


def stored_metrics(monkeypatch, folder):
    """The metrics as a reader on a machine of its own sees them."""
    with monkeypatch.context() as on_reader:
        on_reader.setenv(files.COPIES, str(folder))
        return metrics(RunDir.open(URL).path)


def stored_frames(monkeypatch, folder):
    """The frames of the newest checkpoint in the store; 0 without one."""
    with monkeypatch.context() as on_reader:
        on_reader.setenv(files.COPIES, str(folder))
        newest = checkpoint.latest(RunDir.open(URL).newest_checkpoints)
    return 0 if newest is None else checkpoint.read_metadata(newest)["env_frames"]


def check_exact(before, after, frames):
    """A resumed run has the lines up to its checkpoint, and goes on after them."""
    kept = [line for line in before if line["env_frames"] <= frames]
    assert kept and after[: len(kept)] == kept
    assert after[len(kept)]["env_frames"] > frames
    assert (np.diff([line["env_frames"] for line in after]) >= 0).all()


def test_without_its_head_a_run_ends_with_the_cause_and_is_resumed(
    hosts, store, tmp_path, monkeypatch
):
    head, launcher, _ = hosts
    launcher.hides = None
    with ray_on(hosts) as address:
        args = ("cartpole-ppo", "--frames", 100_000_000, "--run-dir", URL)
        with launched(launcher, address, *args) as program:
            program.wait_for(lambda: program.saved_frames() > 0, "a checkpoint", 200)
            time.sleep(12.0)  # until the store has it
            head.signal(signal.SIGKILL)
            killed = time.monotonic()
            code, left = program.end(120)
            print("ended after", time.monotonic() - killed, code, left)
            print(program.stderr[-3000:])
            assert (code, left) == (1, [])
