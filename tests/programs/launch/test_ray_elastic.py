"""Hosts join a Ray cluster, and leave it with and without a notice, while a program runs on it."""

import collections
import dataclasses
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.run import train
from rlstack.storage import checkpoint
from tests.programs.clusters import NODE, cluster, wait_until_empty
from tests.programs.launched import Meanwhile, placed
from tests.programs.running import failures, ppo, run, series, threads

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.chosen, pytest.mark.timeout(280, method="thread")]


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch):
    # Hosts are added in a thread, where Ray cannot install its signal handler.
    monkeypatch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)
    before = threads()
    yield
    assert wait_until_empty() == []
    assert threads() <= before


class _Moving(Meanwhile):
    """Also tells where actors run now."""

    def hosts_of_actors(self):
        """The hosts of the newest incarnation of each actor, by name."""
        records = [r for r in placed(self.directory) if r["node"].startswith("actor")]
        return {record["node"]: record["node_id"] for record in records}

    def wait_for_actors(self, expected, restarts):
        """Waits until the hosts have these numbers of actors, and these restarts are counted."""
        self.wait_for(lambda: collections.Counter(self.hosts_of_actors().values()) == expected)
        self.wait_for(lambda: self.newest("program/restarts") == restarts)


def _drain(hosts, node):
    """Gives notice that a host will leave, as Ray's autoscaler does for a spot machine."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address"]
    command += [hosts.address, "--node-id", node.node_id, "--reason"]
    command += ["DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run([*command, "--deadline-remaining-seconds", "60"], check=True, timeout=60)


def _experiment(hosts, **changes):
    cfg = RayConfig(address=hosts.address, **changes.pop("ray", {}))
    program = {"launch": "ray", "ray": cfg, "max_restarts": 0, **changes}
    return ppo("distributed", frames=100_000_000, program=program)


def test_actors_without_a_host_get_those_that_join(tmp_path):
    directory = tmp_path / "run"
    with cluster(0, num_cpus=4) as hosts:  # room for all but actors

        def does(meanwhile):
            meanwhile.wait_for_update()
            assert len(meanwhile.hosts_of_actors()) == 1
            first = hosts.add_node(**NODE | {"num_cpus": 2}, wait=False)
            meanwhile.wait_for_actors({hosts.head_node.node_id: 1, first.node_id: 2}, restarts=0)
            hosts.remove_node(first, allow_graceful=False)
            meanwhile.wait_for(lambda: len(failures(directory)) == 2)
            second = hosts.add_node(**NODE | {"num_cpus": 2}, wait=False)
            meanwhile.wait_for_actors({hosts.head_node.node_id: 1, second.node_id: 2}, restarts=2)
            os.kill(os.getpid(), signal.SIGINT)

        few = {"cpus": {"inferencer": 0.4}, "place_seconds": 15.0}
        experiment = _experiment(hosts, num_actors=3, ray=few)
        with _Moving(directory, does), pytest.raises(train.Interrupted):
            run(experiment, directory)
    lost = failures(directory)
    assert sorted(f["node"] for f in lost) == ["actor/1", "actor/2"]  # no room is no failure
    assert all(f["restarts"] for f in lost)
    incarnations = {r["node"]: r["incarnation"] for r in placed(directory)}
    assert [incarnations[f"actor/{rank}"] for rank in range(3)] == [0, 1, 1]
    assert np.isfinite(series(directory, "learner/loss")).all()


def test_actors_move_to_a_host_that_joins_and_off_one_that_will_leave(tmp_path):
    directory = tmp_path / "run"
    with cluster(1) as hosts:
        (other,) = hosts.worker_nodes

        def does(meanwhile):
            meanwhile.wait_for_update()
            new = hosts.add_node(**NODE, wait=False)
            meanwhile.wait_for(lambda: new.node_id in meanwhile.hosts_of_actors().values())
            meanwhile.wait_for(lambda: meanwhile.newest("program/restarts") >= 1)
            numbers = collections.Counter(meanwhile.hosts_of_actors().values())
            assert len(numbers) == 3 and max(numbers.values()) <= 2
            gone = other if meanwhile.where("learner")["node_id"] != other.node_id else new
            before = {name for name, host in newest(directory).items() if host == gone.node_id}
            assert before
            _drain(hosts, gone)
            meanwhile.wait_for(lambda: gone.node_id not in newest(directory).values())
            hosts.remove_node(gone, allow_graceful=False)
            steps = meanwhile.newest("learner/steps")
            meanwhile.wait_for(lambda: meanwhile.newest("learner/steps") >= steps + 20)
            _drain(hosts, hosts.head_node)  # with the command

        experiment = _experiment(hosts, num_actors=4)
        with _Moving(directory, does), pytest.raises(train.Interrupted) as ended:
            run(experiment, directory)
    assert ended.value.exit_code == 128 + signal.SIGTERM
    assert failures(directory) == []
    assert np.isfinite(series(directory, "learner/loss")).all()


def test_a_learner_saves_before_its_host_leaves_and_goes_on_elsewhere(tmp_path):
    directory = tmp_path / "run"
    with cluster(2, num_cpus=0) as hosts:  # the launcher's host has no room for a learner

        def does(meanwhile):
            meanwhile.wait_for_update()
            first = newest(directory)["learner"]
            host = next(host for host in hosts.worker_nodes if host.node_id == first)
            frames = meanwhile.newest("env_frames")
            _drain(hosts, host)
            meanwhile.wait_for(lambda: newest(directory)["learner"] != first)
            steps = meanwhile.newest("learner/steps")
            meanwhile.wait_for(lambda: meanwhile.newest("learner/steps") >= steps + 20)
            assert meanwhile.newest("env_frames") > frames  # there was no other checkpoint
            os.kill(os.getpid(), signal.SIGINT)

        experiment = _experiment(hosts, num_actors=1, max_restarts=3, on_loss="resume")
        with _Moving(directory, does), pytest.raises(train.Interrupted):
            run(dataclasses.replace(experiment, checkpoint_period=100_000_000), directory)
    lost, again = failures(directory)
    assert lost["reason"] == "its host will leave the cluster"
    assert again["restarts"] and again["program"]
    assert checkpoint.latest(directory / "checkpoints") is not None


def newest(directory):
    """The host of each node's newest incarnation."""
    return {record["node"]: record["node_id"] for record in placed(directory)}
