"""Hosts with separate networks and no shared disk, and a store: hosts and the store go away."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray")
pytest.importorskip("obstore")
pytest.importorskip("moto")

from rlstack.programs.session import stored
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import files
from tests.programs.clusters import VARIABLES
from tests.programs.launched import Launched
from tests.programs.networks import network, ray_on
from tests.programs.running import metrics
from tests.storage import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580, method="thread")]
NODES = (
    "--topology", "distributed", "--launch", "ray", "--program.transport", "zmq",
    "--program.num-actors", 4, "--program.num-inferencers", 2, "--checkpoint-period", 5000,
    "--log-period", 1000, "--evaluator.episodes", 2, "--evaluator.num-envs", 2,
)  # fmt: skip


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Three hosts, which share no copies of runs."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with network(3) as made:
        _hide(made, tmp_path / "copies", monkeypatch)
        yield made


def _hide(hosts, folder, monkeypatch):
    """Gives the hosts copies of runs, each its own."""
    folder.mkdir()
    monkeypatch.setenv(files.COPIES, str(folder))
    for host in hosts:
        host.hides = folder


@pytest.fixture
def store(hosts, monkeypatch):
    """A server of S3 that the hosts reach."""
    with s3_server.started(f"{hosts[0].address.rpartition('.')[0]}.254") as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def url(tmp_path):
    return f"s3://{s3_server.BUCKET}/{tmp_path.name}"


@contextlib.contextmanager
def launched(host, url, *args):
    """The command on a host, which alone sees its copies."""
    copy = files.local(url)
    copy.parent.mkdir(parents=True, exist_ok=True)
    with Launched(copy, *args, within=host.within) as program:
        yield program


@contextlib.contextmanager
def as_a_reader(monkeypatch, folder, url):
    """This process has copies of its own, as on another machine."""
    with monkeypatch.context() as there:
        there.setenv(files.COPIES, str(folder))
        stored._fetched.clear()
        yield RunDir.open(url)


def test_a_lost_host_and_an_outage_of_the_store_do_not_keep_a_run_from_learning(
    hosts, store, url, tmp_path, monkeypatch
):
    launcher, other, lost = hosts
    launcher.hides = None
    with ray_on(hosts) as address:
        args = ("cartpole-ppo", *NODES, "--frames", 300_000, "--run-dir", url)
        with launched(launcher, url, *args, "--ray-address", address) as program:
            program.wait_for(lambda: program.saved_frames() > 0, "a checkpoint", 200)
            with store.refusing():
                time.sleep(8.0)
                lost.signal(signal.SIGKILL)
                time.sleep(7.0)
            store.fault = lambda method, path, query: "503"
            time.sleep(15.0)
            store.fault = lambda method, path, query: None
            second = [*other.within, sys.executable, "-m", "rlstack", "train", "--resume", url]
            refused = subprocess.run(second, capture_output=True, text=True, timeout=120)
            assert refused.returncode == 1
            assert "only one command at a time may write to s3://" in refused.stderr
            assert str(program.process.pid) in refused.stderr
            code, left = program.end(200)
            assert (code, left) == (0, []), program.stderr
    assert {f["node"].split("/")[0] for f in program.failures()} <= {"actor", "inferencer"}
    assert program.failures() and all(f["restarts"] for f in program.failures())
    with as_a_reader(monkeypatch, tmp_path / "reader", url) as directory:
        assert metrics(directory.path) == metrics(program.run_dir)
        assert json.loads(directory.result.read_text())["eval_return_mean"] >= 475
        assert (directory.node_logs / "hosts.jsonl").read_text().count(lost.address) >= 2


def test_without_its_head_a_run_ends_with_the_cause_and_is_resumed(
    hosts, store, url, tmp_path, monkeypatch
):
    head, launcher, _ = hosts
    launcher.hides = None
    with ray_on(hosts) as address:
        args = ("cartpole-ppo", *NODES, "--frames", 100_000_000, "--run-dir", url)
        with launched(launcher, url, *args, "--ray-address", address) as program:
            program.wait_for(lambda: program.saved_frames() > 0, "a checkpoint", 200)
            head.signal(signal.SIGKILL)
            assert program.end(100) == (1, []), program.stderr  # Ray itself would end it unsaved
            assert "node head failed: it has not answered for 30 s" in program.stderr
            saved, before = program.saved_frames(), metrics(program.run_dir)
    kept = [line for line in before if line["env_frames"] <= saved]
    assert len(kept) >= len(before) - 1  # some frames come while the learner saves
    _hide(hosts, tmp_path / "other", monkeypatch)  # as on other machines
    launcher.hides = None
    resume = ("--resume", url, "--frames", saved + 10_000)
    with ray_on(hosts), launched(launcher, url, *resume) as program:
        code, left = program.end(250)
        assert (code, left) == (0, []), program.stderr
    with as_a_reader(monkeypatch, tmp_path / "reader", url) as directory:
        after = metrics(directory.path)
    assert after[: len(kept)] == kept
    assert saved < after[len(kept)]["env_frames"] < saved + 10_000 <= after[-1]["env_frames"]
