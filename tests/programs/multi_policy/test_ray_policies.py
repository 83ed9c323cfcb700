"""Several policies on the hosts of a Ray cluster."""

import dataclasses
import os
import signal
import threading
import time

import pytest

from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.run import train
from rlstack.storage import checkpoint
from tests.programs.clusters import wait_until_empty
from tests.programs.launched import placed
from tests.programs.multi_policy.cases import leaves_equal
from tests.programs.multi_policy.test_topologies import (
    LEARNING,
    chains,
    learned,
    same_policies,
    selfplays,
    versions_in,
)
from tests.programs.running import failures, run, series

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400, method="thread")]

_CHOSEN = pytest.mark.chosen


def on(hosts, **program):
    return {"launch": "ray", "ray": RayConfig(address=hosts.address), **program}


@pytest.mark.parametrize("trainers", [pytest.param("one_each", marks=_CHOSEN), "one"])
def test_lock_step_equals_a_single_process_bit_for_bit(tmp_path, hosts, trainers):
    expected = run(chains("single_process"), tmp_path / "single")
    program = on(hosts, pacing="lock_step", trainers=trainers)
    result = run(chains("distributed", program=program), tmp_path / "run")
    assert wait_until_empty() == []
    assert result.policies == expected.policies
    assert min(policy["learner_steps"] for policy in result.policies.values()) >= 10
    assert same_policies(learned(tmp_path / "run"), learned(tmp_path / "single"))
    where = {record["node"]: record for record in placed(tmp_path / "run")}
    learners = [f"learner/{name}" for name in LEARNING] if trainers == "one_each" else ["learner"]
    replays = [f"replay/{name}" for name in LEARNING]
    services = [f"inferencer/{name}/0" for name in LEARNING]
    assert set(where) == {"coordinator", "actor/0", "evaluator", *learners, *replays, *services}
    assert failures(tmp_path / "run") == []


def test_self_play_in_lock_step_equals_a_single_process_bit_for_bit(tmp_path, hosts):
    def served(experiment):
        replay = dataclasses.replace(experiment.replay, service="table")
        return dataclasses.replace(experiment, replay=replay)

    expected = run(served(selfplays("single_process")), tmp_path / "single")
    program = on(hosts, pacing="lock_step")
    result = run(served(selfplays("distributed", program)), tmp_path / "run")
    assert wait_until_empty() == []
    assert result.policies == expected.policies
    assert same_policies(learned(tmp_path / "run"), learned(tmp_path / "single"))
    assert leaves_equal(versions_in(tmp_path / "run"), versions_in(tmp_path / "single"))


def test_asynchronous_learners_end_with_the_frames_of_the_program(tmp_path, hosts):
    program = on(hosts, num_actors=2, num_inferencers=2)
    experiment = chains("distributed", frames=2000, program=program, checkpoint_period=500)
    result = run(experiment, tmp_path / "run")
    assert wait_until_empty() == []
    assert result.env_frames >= 2000
    assert min(policy["learner_steps"] for policy in result.policies.values()) > 0
    assert failures(tmp_path / "run") == []


@pytest.mark.parametrize("policy", [pytest.param("retailer", marks=_CHOSEN), "distributor"])
def test_a_killed_learner_continues_from_its_checkpoint_perhaps_on_another_host(
    tmp_path, hosts, policy
):
    directory, name = tmp_path / "run", f"learner/{policy}"
    errors = []

    def wait_for(condition, what):
        until = time.monotonic() + 150.0
        while not condition():
            assert time.monotonic() < until, f"{what} did not come"
            time.sleep(0.1)

    def newest(log):
        return (series(directory, log) or [0])[-1] if (directory / "metrics.jsonl").exists() else 0

    def kill():
        try:
            wait_for(lambda: checkpoint.latest(directory / "checkpoints"), "a checkpoint")
            (first,) = [record for record in placed(directory) if record["node"] == name]
            os.kill(first["pid"], signal.SIGKILL)
            wait_for(lambda: newest("program/restarts"), "the restart")
            steps = newest(f"{policy}/learner/steps")
            wait_for(lambda: newest(f"{policy}/learner/steps") >= steps + 10, "updates")
        except BaseException as error:
            errors.append(error)
        os.kill(os.getpid(), signal.SIGINT)

    program = on(hosts, on_learner_loss="restart")
    experiment = chains("distributed", frames=100_000_000, program=program, checkpoint_period=600)
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(train.Interrupted):
        run(experiment, directory)
    thread.join()
    assert errors == []
    assert wait_until_empty() == []
    ((node, restarts),) = [(f["node"], f["restarts"]) for f in failures(directory)]
    assert (node, restarts) == (name, True)
    steps = series(directory, f"{policy}/learner/steps")
    assert steps == sorted(steps)
    assert learned(directory).keys() == set(LEARNING)
