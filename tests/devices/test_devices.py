"""Learning and acting on several devices: four of a CPU, in a child process.

The number of devices is fixed when JAX starts.
"""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.configs.acting import InferencerConfig
from rlstack.configs.learner import LearnerConfig
from rlstack.devices import check
from rlstack.learning.learner import Learner
from rlstack.replay import Sample
from tests.agent_cases import assert_close, case

KEYS = np.array([5, 6, 7, 8], np.uint64)


def in_child(function):
    """Calls a function of a test module in a process with four devices; returns its output."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    }
    code = f"import {function.__module__} as module; module.{function.__name__}()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


def test_an_index_without_a_device_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^Learner: devices .* there are 2 .* 0 to 1; got 2\. "):
        check((1, 2), 2, "Learner: devices")
    with pytest.raises(ValueError, match="the only local device is 0; got 1"):
        check((1,), 1, "devices")
    check((), 0, "devices")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_several_devices_learn_what_one_does():
    assert in_child(learners) == ["dqn", "ppo-separate", "second", "uneven", "loaded", "overlap"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_topology_learns_on_two_devices_and_acts_on_a_third(tmp_path):
    os.environ["DEVICES_DIRECTORY"] = str(tmp_path)
    try:
        assert in_child(programs) == ["single_process", "heavy_env", "light_env", "distributed"]
    finally:
        del os.environ["DEVICES_DIRECTORY"]


def make(name, **config):
    return Learner(LearnerConfig(**config), case(name).agent, None, jax.random.PRNGKey(0))


def sample(name):
    return Sample(case(name).batch, KEYS)


def learners():
    """Runs in the process of a test above."""
    assert len(jax.local_devices()) == 4
    for name in ("dqn", "ppo-separate"):
        # On two devices each part of a batch has rows of both.
        micro_batches = 2 if name == "dqn" else 1
        one, two = make(name), make(name, devices=(3, 1), micro_batches=micro_batches)
        for _ in range(2):
            logs = [learner.step(sample(name)) for learner in (one, two)]
            assert_close(*logs, atol=1e-6, rtol=1e-5)
        # Not bit for bit: each device sums the gradients of its rows before the sums are added,
        # and float32 rounds sums of another order differently.
        assert_close(one.params, two.params, atol=1e-6, rtol=0)
        for leaf in jax.tree.leaves((two.params, two.learner_state)):
            assert {d.id for d in leaf.devices()} == {1, 3} and leaf.is_fully_replicated
        _, published = two.get_params()
        assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(published))
        print(name)
    one, other = make("dqn"), make("dqn", devices=(2,))
    for learner in (one, other):
        learner.step(sample("dqn"))
    assert_close(one.save(), other.save(), atol=0, rtol=0)
    assert all(x.devices() == {jax.devices()[2]} for x in jax.tree.leaves(other.params))
    print("second")
    batch = case("dqn").batch
    three = jax.tree.map(lambda x: x[:, :3], batch.trajectory), batch.weights[:3]
    two = make("dqn", devices=(0, 1))
    with pytest.raises(ValueError, match="batch of 3 items must split evenly over 2 devices"):
        two.step(Sample(type(batch)(*three), KEYS[:3]))
    print("uneven")
    two.load(jax.tree.map(np.asarray, make("dqn").save()))
    assert all(len(leaf.devices()) == 2 for leaf in jax.tree.leaves(two.params))
    two.step(sample("dqn"))
    print("loaded")
    if jax.__version_info__ >= (0, 6):  # older versions compute this update in the calling thread
        check_overlap()
    print("overlap")


class Slow:
    """A replay that takes some time for each batch."""

    seconds = 0.0

    def make_dataset(self, stop=None):
        for _ in range(6):
            time.sleep(self.seconds)
            yield sample("dqn")

    def set_params_version(self, version):
        pass

    def update_priorities(self, keys, priorities):
        pass


def check_overlap():
    """Drawing takes as long as an update; ahead of time, the learner waits half as long for it."""
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    agent, waits = slow_agent(), {}
    for prefetch in ("off", "on"):
        cfg = LearnerConfig(prefetch=prefetch)
        learner = Learner(cfg, agent, Slow(), jax.random.PRNGKey(0))
        started = time.perf_counter()
        learner.step(sample("dqn"))  # compiles
        started = time.perf_counter()
        learner.step(sample("dqn"))
        Slow.seconds = time.perf_counter() - started
        before = learner.stats()["device_seconds"]
        learner.run(stop=lambda: False)
        waits[prefetch] = (learner.stats()["device_seconds"] - before) / Slow.seconds
    assert waits["on"] < 0.6 * waits["off"], waits


def slow_agent():
    """DQN with an update that takes a tenth of a second."""
    agent = case("dqn").agent

    class SlowAgent(type(agent)):
        def learner_step(self, params, learner_state, batch):
            result = super().learner_step(params, learner_state, batch)
            x = batch.weights.sum() * jnp.ones((300, 300))
            x = jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ x), x)
            logs = {**result[2].logs, "idle": x.mean()}
            return result[0], result[1], result[2]._replace(logs=logs)

    made = SlowAgent.__new__(SlowAgent)
    made.__dict__.update(vars(agent))
    return made


def programs():
    """Runs in the process of a test above: params of small runs with and without devices."""
    from tests.programs.running import TOPOLOGIES, params, ppo, run

    root = Path(os.environ["DEVICES_DIRECTORY"])
    cfg = {"learner": LearnerConfig(devices=(0, 1)), "inferencer": InferencerConfig(devices=(2,))}
    run(ppo("single_process", frames=1024), root / "plain")
    plain = params(root / "plain")
    for topology in ("single_process", *TOPOLOGIES):
        program = {"pacing": "lock_step"}
        if topology == "light_env":
            program["launch"] = "processes"
        experiment = ppo(topology, frames=1024, program=program, **cfg)
        experiment = dataclasses.replace(experiment, loggers=("jsonl",))
        run(experiment, root / topology)
        # See `learners` for the reason why they are not equal bit for bit.
        assert_close(params(root / topology), plain, atol=1e-6, rtol=0)
        print(topology)
