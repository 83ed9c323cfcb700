"""Processes and hosts of a Ray cluster fail: nodes are placed elsewhere, or the program ends."""

import dataclasses
import os
import random
import signal
import time

import numpy as np
import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.run.launch import ProgramError
from rlstack.storage import checkpoint
from tests.programs.clusters import NODE, cluster, wait_until_empty
from tests.programs.launch.test_ray import on
from tests.programs.launched import FAST, Launched, Meanwhile, placed
from tests.programs.running import failures, metrics, ppo, run, series, threads

pytest.importorskip("launchpad")
pytest.importorskip("ray")
pytestmark = [pytest.mark.launchpad, pytest.mark.timeout(240, method="thread")]


@pytest.fixture(autouse=True)
def _nothing_left():
    before = threads()
    yield
    assert wait_until_empty() == []
    assert threads() <= before


def kill(name):
    """Kills a node's process after the first learner step."""

    def does(meanwhile):
        meanwhile.wait_for_update()
        os.kill(meanwhile.where(name)["pid"], signal.SIGKILL)

    return does


def check_moved(directory, name, restarts=1):
    (first, *_, last) = [record for record in placed(directory) if record["node"] == name]
    assert (first["incarnation"], last["incarnation"]) == (0, restarts)
    assert first["pid"] != last["pid"]
    assert all(f["restarts"] for f in failures(directory))
    assert name in {f["node"] for f in failures(directory)}
    assert series(directory, "program/restarts")[-1] >= restarts
    assert np.isfinite(series(directory, "learner/loss")).all()
    return first, last


@pytest.mark.slow
@pytest.mark.chosen
def test_a_killed_inference_service_is_found_at_its_new_address(tmp_path, hosts):
    experiment = ppo("distributed", frames=40_000, program=on(hosts, num_actors=2))
    with Meanwhile(tmp_path / "run", kill("inferencer/0")):
        assert run(experiment, tmp_path / "run").env_frames >= 40_000
    first, last = check_moved(tmp_path / "run", "inferencer/0")
    assert first["ports"] != last["ports"]
    assert [f["node"] for f in failures(tmp_path / "run")] == ["inferencer/0"]


@pytest.mark.slow
def test_a_killed_actor_comes_back_and_its_lost_frames_are_counted(tmp_path, hosts):
    experiment = ppo("distributed", frames=80_000, program=on(hosts, num_actors=2))
    with Meanwhile(tmp_path / "run", kill("actor/1")):
        assert run(experiment, tmp_path / "run").env_frames >= 80_000
    check_moved(tmp_path / "run", "actor/1")
    # One unroll of each environment, and the frames since the actor's last report.
    assert 0 <= series(tmp_path / "run", "program/lost_frames")[-1] < 8 * 32 + 5000


def hosts_by_id(hosts):
    return {node.node_id: node for node in hosts.list_all_nodes()}


def spare(hosts, directory):
    """Hosts that run nodes of the program, but whose loss does not end it."""
    import ray

    last = {record["node"]: record["node_id"] for record in placed(directory)}
    needed = {last["learner"], last["replay"], last["coordinator"]}
    needed |= {hosts.head_node.node_id, ray.get_runtime_context().get_node_id()}
    return [n for i, n in hosts_by_id(hosts).items() if i not in needed and i in last.values()]


@pytest.mark.slow
@pytest.mark.timeout(500, method="thread")
def test_losing_a_host_every_10_s_does_not_keep_a_program_from_learning(tmp_path, monkeypatch):
    """For 60 s, removes one host at a time with all its processes, and adds an empty host."""
    directory, draw, removed = tmp_path / "run", random.Random(1), []
    # Hosts are added in a thread, where Ray cannot install its signal handler.
    monkeypatch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)

    def remove(meanwhile):
        meanwhile.wait_for_update()
        for _ in range(6):
            meanwhile.wait_for(lambda: spare(hosts, directory), 30)
            host = draw.choice(sorted(spare(hosts, directory), key=lambda node: node.node_id))
            removed.append(host.node_id)
            hosts.remove_node(host, allow_graceful=False)
            hosts.add_node(**NODE, wait=False)
            time.sleep(10.0)
        meanwhile.wait_for(lambda: (meanwhile.newest("learner/steps") or 0) >= 590, 240)
        os.kill(os.getpid(), signal.SIGINT)

    with cluster(workers=3) as hosts:
        program = on(hosts, num_actors=4, num_inferencers=2, max_restarts=100)
        chosen = preset("cartpole-ppo")
        experiment = ppo("distributed", frames=100_000_000, program=program)
        experiment = dataclasses.replace(
            experiment, agent=chosen.agent, replay=dataclasses.replace(chosen.replay, max_size=64)
        )
        with Meanwhile(directory, remove), pytest.raises(train.Interrupted):
            run(experiment, directory)
    lost = failures(directory)
    assert len(removed) == 6
    assert len(lost) >= 6
    assert all(f["restarts"] for f in lost)
    assert not {f["node"] for f in lost} & {"learner", "replay", "coordinator"}
    again = sum(record["incarnation"] > 0 for record in placed(directory))  # and moves to new hosts
    assert 3 <= series(directory, "program/restarts")[-1] <= again
    assert series(directory, "program/lost_frames")[-1] > 0
    assert np.isfinite(series(directory, "learner/loss")).all()
    print(f"{len(lost)} restarts, {series(directory, 'program/lost_frames')[-1]:.0f} lost frames")
    assert train.evaluate(directory, episodes=20).returns.mean() >= 475


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learner", "replay", "coordinator"])
def test_losing_what_must_not_be_lost_ends_the_program_with_its_name(tmp_path, hosts, name):
    experiment = ppo("distributed", frames=100_000_000, program=on(hosts))
    with (
        Meanwhile(tmp_path / "run", kill(name)),
        pytest.raises(ProgramError, match=f"node {name} failed: ActorDiedError"),
    ):
        run(experiment, tmp_path / "run")
    assert [f["restarts"] for f in failures(tmp_path / "run")][-1] is False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learner", "replay"])
def test_or_it_goes_on_from_the_last_checkpoint_if_the_config_says_so(tmp_path, hosts, name):
    directory = tmp_path / "run"

    def does(meanwhile):
        meanwhile.wait_for(lambda: checkpoint.latest(directory / "checkpoints") is not None)
        os.kill(meanwhile.where(name)["pid"], signal.SIGKILL)

    program = on(hosts, on_loss="resume")
    experiment = ppo("distributed", frames=60_000, program=program, checkpoint_period=5000)
    with Meanwhile(directory, does):
        assert run(experiment, directory).env_frames >= 60_000
    lost, again = [f for f in failures(directory) if f["node"] == name]
    assert not lost["restarts"] and again["restarts"] and again["program"]
    frames = [line["env_frames"] for line in metrics(directory)]
    assert frames[0] < 5000
    assert min(np.diff(frames)) > -10_000  # back to a checkpoint, not to the start
    steps = series(directory, "learner/steps")
    assert steps[-1] > 60_000 // 256 * 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends_everything(tmp_path, hosts, number, expected):
    run_dir = tmp_path / "run"
    args = (
        "cartpole-ppo", "--topology", "distributed", "--launch", "ray", "--ray-address",
        hosts.address, *FAST, "--frames", 100_000_000, "--run-dir", run_dir,
    )  # fmt: skip
    with Launched(run_dir, *args) as program:
        program.wait_for_update()
        program.process.send_signal(number)
        sent = time.monotonic()
        code, left = program.end(25)
        assert time.monotonic() - sent < 15.0
        assert (code, left) == (expected, [])
        assert "everything is saved" in program.stderr
        assert program.saved_frames() > 0
    assert failures(run_dir) == []


@pytest.mark.slow
def test_a_signal_while_nodes_are_placed_ends_everything(tmp_path, hosts):
    run_dir = tmp_path / "run"
    cfg = ("--program.ray.gpus", "learner", 1)  # a GPU that is never available
    args = (
        "cartpole-ppo", "--topology=distributed", "--launch=ray", f"--ray-address={hosts.address}",
        *cfg, "--run-dir", run_dir,
    )  # fmt: skip
    with Launched(run_dir, *args) as program:
        program.wait_for(lambda: (run_dir / "logs").exists(), "the launch")
        time.sleep(5.0)
        program.process.send_signal(signal.SIGINT)
        assert program.end(20) == (130, []), program.stderr


@pytest.mark.slow
def test_a_ray_of_its_own_is_started_and_removed(tmp_path):
    experiment = ppo("distributed", program={"launch": "ray"})
    experiment = dataclasses.replace(experiment, evaluator=EvaluatorConfig(episodes=2, num_envs=2))
    assert run(experiment, tmp_path / "run").env_frames >= 3000
    assert not [name for name in os.listdir("/tmp") if name.startswith("rlray-")]
