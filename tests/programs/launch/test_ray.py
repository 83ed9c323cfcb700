"""The Ray launcher: a program on a cluster gives the same results and leaves nothing behind."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.program.graph import Node
from rlstack.programs.program.launch.ray import cluster, runner
from rlstack.programs.program.launch.ray.nodes import RUNNING, RayNode, RayNodes
from rlstack.programs.program.launch.ray.places import Places
from rlstack.programs.run import launch
from rlstack.programs.session import timing
from tests.programs.clusters import wait_until_empty
from tests.programs.launched import placed
from tests.programs.running import dqn, params, ppo, run, same, series, threads

pytest.importorskip("ray")
from ray.util import scheduling_strategies

pytestmark = pytest.mark.timeout(180, method="thread")


def on(hosts, **program):
    return {"launch": "ray", "ray": RayConfig(address=hosts.address), **program}


@pytest.mark.slow
@pytest.mark.chosen
def test_it_trains_on_all_hosts_and_leaves_nothing(tmp_path, hosts):
    before = threads()
    experiment = ppo("distributed", program=on(hosts, num_actors=2))
    result = run(experiment, tmp_path / "run")
    assert wait_until_empty() == []
    assert threads() <= before
    assert result.env_frames >= experiment.frames
    assert result.learner_steps >= 5
    assert result.eval_episodes == 2
    assert set(series(tmp_path / "run", "program/restarts")) == {0}
    assert set(series(tmp_path / "run", "program/lost_frames")) == {0}
    where = {record["node"]: record for record in placed(tmp_path / "run")}
    assert len(where) == 7
    assert len({record["node_id"] for record in where.values()}) >= 3
    assert len({record["pid"] for record in where.values()}) == 7
    held = {where[name]["node_id"] for name in ("coordinator", "replay", "learner")}
    assert len(held) == 1  # only the loss of this host ends the program
    assert not list((tmp_path / "run").glob(".hosts-*"))


@pytest.mark.slow
def test_lock_step_equals_a_single_process_bit_for_bit(tmp_path, hosts):
    expected = run(ppo("single_process", frames=5200), tmp_path / "single")
    beside = RayConfig(address=hosts.address, together={"actor": "inferencer"})
    lock_step = on(hosts, pacing="lock_step", ray=beside)
    result = run(ppo("distributed", frames=5200, program=lock_step), tmp_path / "run")
    assert (result.env_frames, result.learner_steps, result.eval_return_mean) == (
        expected.env_frames,
        expected.learner_steps,
        expected.eval_return_mean,
    )
    assert same(params(tmp_path / "run"), params(tmp_path / "single"))
    assert set(series(tmp_path / "run", "replay/lag_max")) == {0}
    where = {record["node"]: record["node_id"] for record in placed(tmp_path / "run")}
    assert where["actor/0"] == where["inferencer/0"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [ppo, dqn])
def test_over_zmq_with_the_table_lock_step_equals_a_single_process(tmp_path, hosts, make):
    expected = run(make("single_process", frames=1000), tmp_path / "single")
    experiment = make(
        "distributed",
        frames=1000,
        program=on(hosts, pacing="lock_step", transport="zmq"),
    )
    replay = dataclasses.replace(experiment.replay, service="table")
    result = run(dataclasses.replace(experiment, replay=replay), tmp_path / "run")
    assert wait_until_empty() == []
    assert result.learner_steps == expected.learner_steps > 2
    assert same(params(tmp_path / "run"), params(tmp_path / "single"))
    assert not list((tmp_path / "run").rglob("*keys*"))  # of the transport, for this run only


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_directory_that_a_host_does_not_see_is_refused(tmp_path, hosts, monkeypatch):
    init = RayNodes.__init__

    def elsewhere(self, ray, setup, program, token_file):
        init(self, ray, setup, program, token_file)
        self._token_file = Path("/nowhere") / token_file.name

    monkeypatch.setattr(RayNodes, "__init__", elsewhere)
    with pytest.raises(ValueError, match="every host must see the run directory at the same path"):
        run(ppo("distributed", program=on(hosts)), tmp_path / "run")
    assert wait_until_empty() == []


@pytest.mark.slow
@pytest.mark.chosen
def test_a_cluster_without_room_is_named_with_what_is_missing(tmp_path, hosts):
    cfg = RayConfig(address=hosts.address, gpus={"learner": 1}, place_seconds=1.0)
    with pytest.raises(ValueError, match="have 1 CPUs, 1 GPUs and 0 GB free for learner"):
        run(ppo("distributed", program=on(hosts, ray=cfg)), tmp_path / "run")


def test_other_topologies_and_a_missing_package_are_refused(monkeypatch):
    experiment = ppo("distributed", program={"launch": "ray"})
    assert from_json(to_json(experiment)) == experiment
    for topology in ("single_process", "heavy_env", "light_env"):
        with pytest.raises(ValueError, match="topology must be distributed"):
            dataclasses.replace(experiment, topology=topology)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="the extra `cluster`"):
        launch.check_packages(experiment)


def test_an_older_config_without_ray_is_read():
    tree = json.loads(to_json(ppo("distributed")))
    del tree["program"]["ray"]
    assert from_json(json.dumps(tree)) == ppo("distributed")


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpus": {"actors": 1}},
        {"gpus": {"learner": -1}},
        {"together": {"actor": "inferencer", "inferencer": "learner"}},
        {"together": {"actor": "head"}},
        {"lost_seconds": 0},
        {"place_seconds": 0},
    ],
)
def test_what_cannot_be_reserved_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RayConfig(**wrong)


def test_what_is_reserved_follows_the_config():
    cfg = RayConfig(
        cpus={"actor": 3},
        gpus={"learner": 1},
        memory_gb={"replay": 2},
        together={"actor": "inferencer", "replay": "any"},
        env_vars={"NAME": "value"},
    )
    actor, learner = (cluster.reserved(cfg, group) for group in ("actor", "learner"))
    assert (actor["num_cpus"], actor["num_gpus"], learner["num_gpus"]) == (3, 0, 1)
    assert cluster.reserved(cfg, "replay")["memory"] == 2 << 30
    variables = actor["runtime_env"]["env_vars"]
    assert (variables["JAX_PLATFORMS"], variables["OMP_NUM_THREADS"]) == ("cpu", "3")
    assert variables["NAME"] == "value"
    assert "JAX_PLATFORMS" not in learner["runtime_env"]["env_vars"]
    assert (cfg.host_group("actor"), cfg.host_group("replay")) == ("inferencer", "")
    assert {RayConfig().host_group(group) for group in ("replay", "coordinator")} == {"learner"}


def test_the_log_of_another_host_is_read_in_bounded_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_CHUNK", 10)
    monkeypatch.setattr(runner, "_MOST", 40)
    log = tmp_path / "log"
    with open(log, "ab", buffering=0) as file:
        file.write(b"one\n")
        assert runner.read_log(log, 0) == (b"one\n", 4)
        assert runner.read_log(log, 4) == (b"", 4)
        file.write(b"two\n" + 20 * b"." + b"\nlast line")
        left_out = b"[24 bytes of output are left out]\n"
        assert runner.read_log(log, 4) == (left_out + b"\nlast line", 38)
        file.write(b"end\n")
        assert runner.read_log(log, 38) == (b"end\n", 0)  # it is emptied
        assert runner.read_log(log, 0) == (b"", 0)
        file.write(b"again")
        assert runner.last_of_log(log, 0) == (b"again", 5)
    assert not log.exists()


class _Head:
    """The part of Ray that tells the hosts."""

    def __init__(self):
        self.hosts, self.leaving = ["a", "b"], {}
        here = SimpleNamespace(get_node_id=lambda: "a")
        self.get_runtime_context = lambda: here
        state = SimpleNamespace(get_draining_nodes=lambda: self.leaving)
        self._private = SimpleNamespace(state=SimpleNamespace(state=state))
        self.util = SimpleNamespace(scheduling_strategies=scheduling_strategies)

    def nodes(self):
        resources = {"CPU": 4.0}
        return [{"NodeID": 56 * h, "Alive": True, "Resources": resources} for h in self.hosts]


def _actors(*hosts):
    made = []
    for rank, host in enumerate(hosts):
        node = RayNode(Node(f"actor/{rank}", object, (), "worker", True), rank, None)
        node.host, node.state = 56 * host, RUNNING
        made.append(node)
    return made


@pytest.fixture
def head(monkeypatch):
    monkeypatch.setattr(timing, "RAY_HOSTS", 0.01)
    return _Head()


def _look(places):
    """Lets the launcher notice what the head says now."""
    places._ask()
    assert places.look()


def test_a_host_that_joins_gets_actors_of_the_fullest_until_it_has_nearly_as_many(head):
    places = Places(head, RayConfig(), stored=False)
    actors = _actors("a", "a", "a", "b", "b")
    try:
        _look(places)
        assert places.to_move(actors) is None  # nothing has joined
        head.hosts.append("c")
        _look(places)
        assert places.to_move(actors) is actors[2]
        actors[2].host = 56 * "c"
        assert places.to_move(actors) is None
        head.hosts.append("d")
        _look(places)
        assert places.to_move(actors) is actors[1]
        places.refused()  # it has no room
        assert places.to_move(actors) is None
    finally:
        places.close()
    together = Places(head, RayConfig(together={"actor": "inferencer"}), stored=False)
    try:
        head.hosts.append("e")
        _look(together)
        assert together.to_move(actors) is None
    finally:
        together.close()


def test_a_lost_node_goes_to_the_emptiest_host_that_stays_and_has_room(head):
    places = Places(head, RayConfig(), stored=False)
    lost, *others = _actors("", "a", "a", "b")
    try:
        assert places.next(lost, [lost, *others])[0] == 56 * "b"
        head.leaving = {56 * "b": 0}
        _look(places)
        assert places.is_leaving(56 * "b") and not places.is_leaving(56 * "a")
        assert places.next(lost, [lost, *others])[0] == 56 * "a"
        head.hosts.remove("b")
        others[2].placement = SimpleNamespace(node_id=56 * "b")
        assert places.is_gone(others[2])
    finally:
        places.close()
    few = Places(head, RayConfig(cpus={"actor": 5}), stored=False)
    try:
        assert few.next(lost, [lost, *others]) == ("", "SPREAD")
    finally:
        few.close()


def test_a_head_that_does_not_answer_is_silent(head):
    places = Places(head, RayConfig(), stored=False)
    try:
        head.nodes = lambda: 1 / 0
        time.sleep(0.1)
        assert 0.05 < places.silence < 1.0
        del head.nodes
        time.sleep(0.05)
        assert places.silence < 0.05
    finally:
        places.close()


def _sent():
    sent = [path for path in sys.path if "/py_modules_files/" in path]
    return sorted(name for path in sent for name in os.listdir(path))


@pytest.mark.slow
def test_code_is_sent_if_the_config_says_so(hosts):
    cfg = RayConfig(address=hosts.address, ship_code=True)
    with cluster.joined(ProgramConfig(launch="ray", ray=cfg)) as ray:
        options = cluster.reserved(cfg, "actor")
        asks = ray.remote(_sent).options(
            num_cpus=options["num_cpus"], runtime_env=options["runtime_env"]
        )
        found = ray.get(asks.remote(), timeout=60)
    assert found == ["rlstack"]
