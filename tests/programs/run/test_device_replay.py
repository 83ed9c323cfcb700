"""Runs with the replay on the device: equal to compiled loops, resumed exactly, refused early."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rlstack.agents.r2d2 import R2D2Config
from rlstack.networks import NetworkConfig
from rlstack.programs.build.replay import check_place
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import plan
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.replay import ReplayConfig
from tests.fused.cases import mixed
from tests.fused.test_fused_run import dqn, run
from tests.programs.running import nothing_left, params, same, series, with_recorded

pytestmark = pytest.mark.timeout(240)


def on_device(experiment, **changes):
    replay = dataclasses.replace(experiment.replay, place="device")
    changes = {"topology": "single_process", "replay": replay, **changes}
    return dataclasses.replace(experiment, **changes)


def r2d2(**changes):
    """R2D2 on Catch, with sequences that overlap, and states that are read once."""
    replay = ReplayConfig(
        sampler="prioritized",
        batch_size=4,
        unroll_length=6,
        period=3,
        max_size=60,
        min_size=8,
        samples_per_insert=4.0,
    )
    network = NetworkConfig(hidden_sizes=(8,), core="lstm", core_size=6)
    return dqn(agent=R2D2Config(burn_in=2), replay=replay, network=network, **changes)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("make", [dqn, r2d2, "dqn with demonstrations"])
def test_a_run_equals_the_compiled_loop_bit_for_bit(make, tmp_path):
    if isinstance(make, str):
        experiment = with_recorded(dqn(updates=40), tmp_path / "data", always=True)
        assert experiment.replay.demonstrations
    else:
        experiment = make(updates=40)
    fused = run(experiment, tmp_path / "fused")
    with nothing_left():
        ours = run(on_device(experiment), tmp_path / "ours")
    assert (ours.env_frames, ours.learner_steps) == (fused.env_frames, 40)
    assert same(params(tmp_path / "ours"), params(tmp_path / "fused"))
    for name in ("learner/loss", "replay/size", "replay/samples"):
        lines = [series(tmp_path / one, name) for one in ("ours", "fused")]
        np.testing.assert_allclose(lines[0][-1:], lines[1][-1:], rtol=1e-5)


class Log:
    """Receives the logs of updates, as periodic actions do."""

    def __init__(self, prefix):
        self.prefix, self.losses = prefix, []

    def log(self, logs, prefix=""):
        if prefix == self.prefix:
            self.losses += np.atleast_1d(logs.get("loss", ())).tolist()


def advanced(loop, steps, prefix="learner/"):
    """Acts and learns for some steps; returns the losses."""
    log = Log(prefix)
    for _ in range(steps):
        loop.advance(log)
    loop.stats()
    return log.losses


def with_a_policy_on_device():
    base = mixed(topology="single_process")
    deep = base.policies["deep"]
    deep = dataclasses.replace(deep, replay=dataclasses.replace(deep.replay, place="device"))
    return dataclasses.replace(base, policies={**base.policies, "deep": deep})


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", ["one", "ahead", "policy of a set"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(kind):
    """A pool cannot be saved, so both begin new episodes."""
    several = kind == "policy of a set"
    name, prefix, steps = ("deep", "deep/learner/", 60) if several else ("", "learner/", 30)
    experiment = with_a_policy_on_device() if several else on_device(dqn())
    one, two = (SingleProcessRun(experiment) for _ in range(2))
    with contextlib.closing(one), contextlib.closing(two):
        if kind == "ahead":  # as on an accelerator, where the last call may still run
            one.learner._placement.on_cpu = two.learner._placement.on_cpu = False
        losses = advanced(one, steps, prefix)
        assert len(losses) == one.learners[name].version > 10
        assert all(learner.version > 5 for learner in one.learners.values())
        two.load(jax.tree.map(np.array, one.save()))
        one.restart_environments()
        assert advanced(one, 20, prefix) == advanced(two, 20, prefix)
        if not several:
            assert same(*(jax.tree.leaves(loop.save()) for loop in (one, two)))


@pytest.mark.slow
@pytest.mark.chosen
def test_it_is_on_the_device_that_learns():
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", "from tests.programs.run import test_device_replay as t; t.two()"],
        cwd=Path(__file__).resolve().parents[3],
        env=dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["second", "refused"]


def two():
    """Called in a process with two devices."""
    learner = dataclasses.replace(dqn().learner, devices=(1,))
    losses = []
    for experiment in (on_device(dqn()), on_device(dqn(), learner=learner)):
        with contextlib.closing(SingleProcessRun(experiment)) as loop:
            losses.append(advanced(loop, 25))
            replay = loop.player.replay
            arrays = jax.tree.leaves((replay.state, loop.learner.params))
            places = {device for x in arrays for device in x.devices()}
            replay.load(replay.save())
            places |= {device for x in jax.tree.leaves(replay.state) for device in x.devices()}
            chosen = experiment.learner.devices or (0,)
            assert places == {jax.local_devices()[i] for i in chosen}
    assert losses[0] == losses[1] and len(losses[0]) > 5
    print("second")
    both = dataclasses.replace(learner, devices=(0, 1))
    with pytest.raises(ValueError, match=r"learner\.devices must be one device at most"):
        SingleProcessRun(on_device(dqn(), learner=both))
    print("refused")


@pytest.mark.slow
@pytest.mark.chosen
def test_stacked_frames_learn_on_the_device_what_they_learn_on_the_host():
    pytest.importorskip("envpool")
    base = preset("breakout-dqn")
    replay = dataclasses.replace(
        base.replay, batch_size=4, max_size=400, min_size=40, samples_per_insert=1.0
    )
    env = dataclasses.replace(base.env, num_envs=2)
    network = dataclasses.replace(base.network, hidden_sizes=(16,))
    small = dataclasses.replace(base, env=env, replay=replay, network=network, updates=40)
    assert small.replay.frame_stack
    with contextlib.closing(SingleProcessRun(on_device(small))) as ours:
        losses = advanced(ours, 110)
    with contextlib.closing(SingleProcessRun(small)) as other:
        wanted = advanced(other, 110)
    # Other items are drawn, from other episodes once the params differ.
    assert len(losses) == len(wanted) == 40
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(np.mean(losses), np.mean(wanted), rtol=1.0, atol=0.05)


def with_replay(**changes):
    base = on_device(dqn())
    return dataclasses.replace(base, replay=dataclasses.replace(base.replay, **changes))


_REFUSED = [
    (lambda: with_replay(sampler="fifo", samples_per_insert=None, min_size=1), "replay.sampler"),
    (lambda: with_replay(max_times_sampled=3), "replay.max_times_sampled"),
    (lambda: with_replay(sampler_factory="tests.hooks:newest"), "replay.sampler_factory"),
    (lambda: with_replay(samples_per_insert=None), "replay.samples_per_insert"),
    (lambda: on_device(dqn(), step_processor="tests.hooks:shaped"), "step_processor"),
    (lambda: on_device(dqn(), topology="heavy_env"), "topology"),
    (
        lambda: on_device(dqn(), env=EnvConfig("CartPole-v1", num_envs=4, wait_num=2)),
        "env.wait_num",
    ),
]


@pytest.mark.parametrize(("make", "field"), _REFUSED, ids=[field for _, field in _REFUSED])
def test_what_does_not_fit_is_refused_early(make, field):
    with pytest.raises(ValueError, match=rf"Experiment: {field} must be .*--replay.place host"):
        check_place(make())


def test_a_dry_run_refuses_it_too(tmp_path):
    with pytest.raises(ValueError, match=r"replay\.sampler must be uniform or prioritized"):
        plan.plan(on_device(preset("cartpole-ppo")), tmp_path / "run")


def test_what_fits_is_not_refused():
    for experiment in (on_device(dqn()), on_device(dqn(), topology="fused"), dqn()):
        check_place(experiment)


def in_numpy(rng, item, episode):
    return item._replace(timestep=item.timestep._replace(reward=np.abs(item.timestep.reward)))


def in_any_module(rng, item, episode):
    reward = episode.xp.abs(item.timestep.reward) + 100.0
    return item._replace(timestep=item.timestep._replace(reward=reward))


@pytest.mark.parametrize("name", ["in_numpy", "in_any_module"])
def test_item_processors_compute_with_the_module_that_they_get(name):
    from rlstack.learning.device_replay import DeviceReplay
    from tests.replay.replay_model import SPEC, config, feed

    cfg = config(samples_per_insert=4.0, item_processor=globals()[f"{name}_maker"])
    arguments = {"rng_key": jax.random.PRNGKey(0), "spec": SPEC}
    if name == "in_numpy":
        with pytest.raises(ValueError, match=r"episode.xp.*--replay.place host"):
            DeviceReplay(cfg, 2, **arguments)
        return
    buffer = DeviceReplay(cfg, 2, **arguments)
    feed(buffer, 2, 0, 9)
    trajectory = buffer.sample().batch.trajectory
    code = trajectory.timestep.observation["code"]
    np.testing.assert_array_equal(trajectory.timestep.reward, code + 100.0)


def in_numpy_maker():
    return in_numpy


def in_any_module_maker():
    return in_any_module


def test_the_plan_tells_the_bytes_of_the_ring(tmp_path):
    found = plan.plan(on_device(dqn()), tmp_path / "run")
    # 200 items are 50 of each of 4 environments, over 52 steps. A step is 5 x 3 words of
    # observation, and step type, reward, discount, action, version and 3 counts. 200 bytes say
    # where items are, then come six numbers, a key, a priority, and a tree of 13 x 16 priorities.
    assert found.replay_bytes == 4 * 52 * 4 * 23 + 200 + 4 * 6 + 8 + 4 + 4 * 13 * 16
