"""Learner processes that learn together are one learner with the joined batch.

JAX joins a group once per process, so the learners of a test run in child processes.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from rlstack.configs.learner import LearnerConfig
from rlstack.devices import group
from rlstack.learning import sharded
from rlstack.learning.learner import Learner, NonFiniteError
from rlstack.replay import Sample
from tests.agent_cases import assert_close, case
from tests.programs.networks import network
from tests.rpc.nodes import free_port

KEYS = np.array([5, 6, 7, 8], np.uint64)
# By one call of an update, by one for each minibatch, and with the mean of the gradients.
NAMES = ("ppo-separate", "ppo-image", "dqn")
_FAST_TO_COMPILE = "--xla_backend_optimization_level=0"


def children(function, directory, count=2, hosts=None):
    """Calls a function of this module in processes of one group; returns their exit codes.

    With `hosts`, each process runs on a host of its own.
    """
    code = f"from tests.devices import test_group as t; t.{function.__name__}(*t.arguments())"
    addresses = [host.address for host in hosts] if hosts else ["127.0.0.1"] * count
    meeting = f"{addresses[0]}:{free_port()}"
    within = [host.within for host in hosts] if hosts else [()] * count
    given = [(str(index), str(count), meeting, addresses[index]) for index in range(count)]
    processes = [
        subprocess.Popen(
            [*within[index], sys.executable, "-c", code, *given[index], str(directory)],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _FAST_TO_COMPILE},
            stderr=open(directory / f"stderr{index}", "wb"),  # noqa: SIM115
        )
        for index in range(count)
    ]
    try:
        return [process.wait(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def arguments():
    """The arguments of a function that runs in a child."""
    index, count, meeting, host, directory = sys.argv[1:]
    return int(index), int(count), (meeting, host), Path(directory)


def join(index, count, addresses):
    meeting, host = addresses
    return group.join(meeting, index, count, host=host, visible=None, timeout=60)


def make(name, processes=1, seed=0):
    cfg = LearnerConfig(processes=processes)
    return Learner(cfg, case(name).agent, Priorities(), jax.random.PRNGKey(seed))


class Priorities:
    """Receives the priorities of a learner."""

    def update_priorities(self, keys, priorities):
        self.keys, self.priorities = keys, priorities


def share(name, index, count):
    """The columns of one process, which follow those of the process before."""
    batch, each = case(name).batch, len(KEYS) // count
    here = slice(index * each, (index + 1) * each)
    trajectory = jax.tree.map(lambda x: x[:, here], batch.trajectory)
    return Sample(type(batch)(trajectory, batch.weights[here]), KEYS[here])


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
def test_two_processes_learn_what_one_does_with_the_joined_batch(tmp_path):
    check_that_they_learn_as_one(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_so_do_processes_on_two_hosts_with_networks_of_their_own(tmp_path):
    with network(2) as hosts:
        check_that_they_learn_as_one(tmp_path, hosts)


def check_that_they_learn_as_one(tmp_path, hosts=None):
    codes = children(learners, tmp_path, hosts=hosts)
    assert codes == [0, 0], (tmp_path / "stderr0").read_text()[-3000:]
    for name in NAMES:
        one = make(name)
        for _ in range(3):
            logs = one.step(share(name, 0, 1))
        found = [np.load(tmp_path / f"{name}-{i}.npz", allow_pickle=True) for i in range(2)]
        leaves = [list(file["params"]) for file in found]
        assert all(map(np.array_equal, *leaves))  # the same on each process, bit for bit
        # Not bit for bit those of one learner: each process sums the gradients of its rows before
        # the sums are added, and float32 rounds sums of another order differently. The difference
        # is relative to the length of all params: Adam makes steps of equal length of gradients of
        # any size, so a param whose gradient is small differs by more of itself.
        ours = np.concatenate([np.ravel(x) for x in jax.tree.leaves(one.params)])
        theirs = np.concatenate([np.ravel(x) for x in leaves[0]])
        assert np.linalg.norm(theirs - ours) <= 1e-6 * np.linalg.norm(ours)
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)
        assert_close(logs, dict(found[0]["logs"].item()), atol=1e-6, rtol=1e-5)
        if name == "dqn":
            joined = np.concatenate([file["priorities"] for file in found])
            np.testing.assert_allclose(joined, one._replay_buffer.priorities, rtol=1e-5)
            assert [list(file["keys"]) for file in found] == [[5, 6], [7, 8]]


def learners(index, count, addresses, directory):
    """Runs in the processes of the test above."""
    sharded._LEAST_WORK = 0  # so that small networks are divided too
    joined = join(index, count, addresses)
    assert len(jax.local_devices()) == 1 and len(jax.devices()) == count
    assert joined.agree(index, -(10**12) * index).tolist() == [[0, 0], [1, -(10**12)]]
    for name in NAMES:
        # With another seed: process 0 decides where the learners begin.
        learner = make(name, count, seed=index)
        learner.load(learner.save())
        for _ in range(3):
            logs = learner.step(share(name, index, count))
        version, params = learner.get_params()
        assert version == 3
        leaves = np.empty(len(jax.tree.leaves(params)), object)
        leaves[:] = [np.asarray(x) for x in jax.tree.leaves(params)]
        received = vars(learner._replay_buffer)
        np.savez(directory / f"{name}-{index}.npz", params=leaves, logs=logs, **received)
    check_votes(learner, index, count)
    # NaN on one process stops all, at the same update.
    bad = share("dqn", index, count)
    if index:
        reward = bad.batch.trajectory.timestep.reward * np.nan
        timestep = bad.batch.trajectory.timestep._replace(reward=reward)
        trajectory = bad.batch.trajectory._replace(timestep=timestep)
        bad = bad._replace(batch=bad.batch._replace(trajectory=trajectory))
    with pytest.raises(NonFiniteError, match="update 5 gave non-finite"):
        learner.step(bad)
    assert learner.version == 4
    with pytest.raises(NonFiniteError, match="update 5 gave non-finite"):
        learner.step_if_all(bad, (1,))
    assert learner.version == 4
    learner.step(share("dqn", index, count))


def check_votes(learner, index, count):
    """An update carries the votes of all, and changes nothing if one is against it."""
    own, version = share("dqn", index, count), learner.version
    before = jax.tree.map(np.array, learner.save())
    learner._replay_buffer.keys = None
    by_process, seen = type(learner._placement).by_process, []

    def read(placement, votes):
        seen.append(learner.version)  # what other threads see while the votes are not known
        return by_process(placement, votes)

    for against in ((1,), (0, 1)):
        sample = None if index in against else own
        with mock.patch.object(type(learner._placement), "by_process", read):
            votes, logs = learner.step_if_all(sample, (sample is not None, 10**7 - index))
        assert logs is None and learner._replay_buffer.keys is None
        assert votes.tolist() == [[i not in against, 10**7 - i] for i in range(count)]
    after = jax.tree.map(np.array, learner.save())
    assert set(seen) == {version}
    jax.tree.map(np.testing.assert_array_equal, before, after)
    votes, logs = learner.step_if_all(own, (1, 0))
    assert votes.tolist() == [[1, 0]] * count and np.isfinite(list(logs.values())).all()
    assert learner.version == version + 1 and learner._replay_buffer.keys.tolist() == list(own.keys)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
def test_a_process_that_has_ended_is_named_and_the_others_end(tmp_path):
    assert children(lost, tmp_path) == [1, 9]  # it does not wait for the lost one at its end
    assert (tmp_path / "named").exists()


def lost(index, count, addresses, directory):
    """Runs in the processes of the test above: one ends in the middle."""
    joined = join(index, count, addresses)
    joined.agree(0)
    if index:
        os._exit(9)
    with pytest.raises(group.GroupLostError, match="another learner process has ended"):
        joined.agree(1)
    (directory / "named").touch()


@pytest.mark.slow
@pytest.mark.chosen
def test_each_listener_is_at_the_address_that_was_given_and_its_thread_preempts_no_other(tmp_path):
    assert children(listeners, tmp_path) == [0, 0], (tmp_path / "stderr0").read_text()[-3000:]


def listeners(index, count, addresses, directory):
    """Runs in the processes of the test above."""
    import psutil

    joined = join(index, count, addresses)
    joined.agree(0)
    found = psutil.Process().net_connections("tcp")
    hosts = {c.laddr.ip.removeprefix("::ffff:") for c in found if c.status == "LISTEN"}
    assert hosts <= {"127.0.0.1"}
    assert index or hosts  # process 0 has the service
    policies = [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]
    assert policies.count(os.SCHED_BATCH) == 1
    joined.agree(0)
