"""The Learner: versions, faults, priorities, several devices, save and load."""

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from rlstack.learning.learner import Learner, LearnerConfig, NonFiniteError
from rlstack.replay import Sample
from rlstack.storage.loggers import InMemoryLogger
from tests.agent_cases import assert_close, case

EVENT = threading.Event()
EVENT.set()
KEYS = np.array([5, 6, 7, 8], np.uint64)


class Replay:
    """A replay of one sample that records new priorities."""

    def __init__(self, sample, times=3):
        self.sample, self.times, self.told = sample, times, []

    def update_priorities(self, keys, priorities):
        self.told.append((keys, priorities))

    def set_params_version(self, version):
        self.version = version

    def make_dataset(self, stop=None):
        for _ in range(self.times):
            if stop():
                return
            yield self.sample


def make(name="dqn", replay=None, seed=0, **config):
    return Learner(LearnerConfig(**config), case(name).agent, replay, jax.random.PRNGKey(seed))


def sample(name="dqn"):
    return Sample(case(name).batch, KEYS)


def poisoned(name="dqn"):
    batch = jax.tree.map(np.array, case(name).batch)
    batch.trajectory.timestep.reward[1] = np.nan
    return Sample(batch, KEYS)


def test_every_step_is_a_version_and_priorities_go_to_replay():
    replay = Replay(sample())
    learner = make(replay=replay)
    assert learner.get_params() == (0, learner.params)
    assert learner.get_params(newer_than=0) is None
    before = learner.params
    logs = learner.step(sample())
    version, params = learner.get_params(newer_than=0)
    assert version == learner.version == 1 and params is learner.params
    assert not np.array_equal(before["torso/linear"]["w"], params["torso/linear"]["w"])
    assert all(isinstance(x, np.ndarray | np.generic) for x in logs.values())
    ((keys, priorities),) = replay.told
    assert keys.tolist() == KEYS.tolist()
    _, _, output = case("dqn").learn(before, make().learner_state, case("dqn").batch)
    np.testing.assert_allclose(priorities, output.priorities, rtol=1e-5)
    assert isinstance(priorities, np.ndarray) and priorities.shape == (4,)


@pytest.mark.parametrize(
    ("name", "minibatches"), [("dqn", "auto"), ("ppo-separate", "scan"), ("ppo-separate", "calls")]
)
def test_a_non_finite_update_leaves_all_as_it_was_and_holds_the_batch(name, minibatches):
    replay = Replay(sample(name))
    learner = make(name, replay, minibatches=minibatches)
    learner.step(sample(name))
    replay.told.clear()
    before = jax.tree.map(np.array, learner.save())
    bad = poisoned(name)
    with pytest.raises(NonFiniteError, match=r"update 2 gave non-finite .*loss") as caught:
        learner.step(bad)
    assert_close(learner.save(), before, atol=0, rtol=0)
    assert not replay.told
    assert_close(caught.value.before["params"], before["params"], atol=0, rtol=0)
    bad.batch.trajectory.timestep.reward[:] = 0  # replay may reuse its arrays
    assert np.isnan(caught.value.batch.trajectory.timestep.reward[1]).all()
    assert np.isfinite(learner.step(sample(name))["loss"]) and learner.version == 2


def test_the_check_can_be_left_out():
    learner = make(check_finite=False)
    assert np.isnan(learner.step(poisoned())["loss"]) and learner.version == 1


def test_run_takes_what_there_is_or_stops_when_told():
    replay, logger = Replay(sample(), times=3), InMemoryLogger()
    learner = make(replay=replay)
    learner.run(logger=logger)
    assert learner.version == replay.version == 3
    assert [step for step, _ in logger.series("learner/loss")] == [1, 2, 3]
    learner.run(stop=EVENT)
    assert learner.version == 3
    learner.run(stop=functools.partial(next, iter([False, True])))
    assert learner.version == 4
    with pytest.raises(ValueError, match="replay_buffer must be given; got replay_buffer=None"):
        make().run(stop=lambda: False)


def test_a_learner_that_was_loaded_goes_on_as_the_saved_one():
    one, other = make("ppo-masked", seed=0), make("ppo-masked", seed=1)
    one.step(sample("ppo-masked"))
    other.load(jax.tree.map(np.asarray, one.save()))
    assert other.version == 1
    logs = [learner.step(sample("ppo-masked")) for learner in (one, other)]
    assert_close(*logs, atol=0, rtol=0)
    assert_close(one.save(), other.save(), atol=0, rtol=0)


def test_convolutions_on_the_cpu_are_learned_by_calls(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    from rlstack.learning import learner

    image, vector = case("ppo-image"), case("ppo-separate")
    takes = functools.partial(learner._takes_calls, LearnerConfig())
    assert takes(image.params) and not takes(vector.params)
    assert not learner._takes_calls(LearnerConfig(minibatches="scan"), image.params)
    assert learner._takes_calls(LearnerConfig(minibatches="calls"), vector.params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not takes(image.params)


def test_configs_out_of_range_are_refused():
    for changes in ({"num_devices": 0}, {"minibatches": "loop"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            LearnerConfig(**changes)
    with pytest.raises(ValueError, match="num_devices must be at most"):
        make(num_devices=len(jax.local_devices()) + 1)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
def test_two_devices_learn_what_one_does():
    """Runs in a child process: the number of devices is fixed when JAX starts."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.learning.test_learner import two_devices; two_devices()",
        ],
        cwd=Path(__file__).resolve().parents[2],
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["dqn", "ppo-separate", "uneven", "loaded"]


def two_devices():
    """Runs in the process of the test above."""
    assert len(jax.local_devices()) == 2
    for name in ("dqn", "ppo-separate"):
        # On two devices each part of a batch has rows of both.
        one, two = make(name), make(name, num_devices=2, micro_batches=2 if name == "dqn" else 1)
        for _ in range(2):
            logs = [learner.step(sample(name)) for learner in (one, two)]
            assert_close(*logs, atol=1e-5, rtol=1e-5)
        assert_close(one.save(), two.save(), atol=1e-5, rtol=1e-5)
        for leaf in jax.tree.leaves(two.params):
            assert len(leaf.devices()) == 2 and leaf.is_fully_replicated
        print(name)
    batch = case("dqn").batch
    three = jax.tree.map(lambda x: x[:, :3], batch.trajectory), batch.weights[:3]
    two = make("dqn", num_devices=2)
    with pytest.raises(ValueError, match="batch of 3 items must split evenly over 2 devices"):
        two.step(Sample(type(batch)(*three), KEYS[:3]))
    print("uneven")
    two.load(jax.tree.map(np.asarray, make("dqn").save()))
    assert all(len(leaf.devices()) == 2 for leaf in jax.tree.leaves(two.params))
    two.step(sample("dqn"))
    print("loaded")
