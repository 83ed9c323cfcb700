"""Learner processes, and the params that processes of a host share, on hosts with own networks."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from rlstack.programs.program.failures import cause
from rlstack.replay.shared_memory.block import FOLDER
from tests.programs.clusters import wait_until_empty
from tests.programs.data_parallel.test_learner_processes import ENDLESS, ppo
from tests.programs.launched import FAST, Launched
from tests.programs.networks import network, ray_on
from tests.programs.running import series

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.launchpad,
    pytest.mark.slow,
    pytest.mark.timeout(300, method="thread"),
]


def test_on_hosts_with_networks_of_their_own_they_learn_and_the_loss_of_one_is_survived(tmp_path):
    run_dir = tmp_path / "run"
    resumes = ("--program.on-loss", "resume", "--checkpoint-period", 4000)
    with network(2) as hosts, ray_on(hosts) as address:
        args = ppo(
            "distributed", *ENDLESS, "--run-dir", run_dir, "--launch", "ray",
            "--ray-address", address, *resumes,
        )  # fmt: skip
        with Launched(run_dir, *args, within=hosts[0].within) as program:
            program.wait_for_checkpoint()
            placed = map(json.loads, (run_dir / "logs" / "hosts.jsonl").open())
            where = {record["node"]: record for record in placed}
            learners = [where[f"learner/{index}"] for index in (0, 1)]
            assert {record["host"] for record in learners} == {host.address for host in hosts}
            assert [where[f"replay/{i}"]["host"] for i in (0, 1)] == [r["host"] for r in learners]
            lost = psutil.Process(learners[1]["pid"])
            lost.kill()
            program.wait_for(program.failures, "a failure")
            saved = program.saved_frames()
            program.wait_for(lambda: program.saved_frames() > saved, "a later checkpoint")
            program.process.send_signal(signal.SIGINT)
            code, left = program.end(40)
            assert (code, left) == (130, []), program.stderr
        assert wait_until_empty() == []
    assert cause(program.failures()) is None


def test_the_learner_sends_each_version_once_to_each_host(tmp_path):
    run_dir = tmp_path / "run"
    with network(2) as hosts, ray_on(hosts) as address:
        args = (
            "cartpole-ppo", "--topology", "distributed", "--launch", "ray", "--ray-address",
            address, *FAST, "--frames", 16_000, "--run-dir", run_dir,
            "--program.num-actors", 4, "--program.num-inferencers", 4,
        )  # fmt: skip
        with Launched(run_dir, *args, within=hosts[0].within) as program:
            code, left = program.end(120)
            assert (code, left) == (0, []), program.stderr
        assert wait_until_empty() == []
        placed = map(json.loads, (run_dir / "logs" / "hosts.jsonl").open())
        where = {record["node"]: record["host"] for record in placed}
        assert len({where[f"inferencer/{index}"] for index in range(4)}) == 2
    versions = series(run_dir, "learner/steps")[-1] + 1
    reads = series(run_dir, "publisher/reads")[-1]
    # Two hosts with two services each, and one evaluation. A host may skip a version.
    assert versions < reads <= 2 * versions + 2
    found = [path for host in hosts for path in Path(FOLDER).glob(f"rlstack-*-{host.address}")]
    assert found == []
