"""Datasets: steps are read as written, writes are atomic, and epochs visit the data."""

import errno
import json
import os
import subprocess
import sys
import zipfile
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack.acting.actor import Actor
from rlstack.acting.inference import Inference
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.replay import ReplayConfig
from rlstack.storage.datasets import (
    Dataset,
    DatasetError,
    DatasetWriteError,
    DatasetWriter,
    Windows,
    check_specs,
)
from rlstack.types import EnvSpec, StepType, TimeStep, Transition

FIRST, MID, LAST = (int(step_type) for step_type in StepType)
BARE = EnvSpec(specs.Array((2,), np.float32), specs.DiscreteArray(3))
RICH = EnvSpec(
    {"eyes": [specs.BoundedArray((2, 2), np.uint8, 0, 255), specs.Array((), np.float64)]},
    {"aim": specs.BoundedArray((1,), np.float32, -1, 1), "move": specs.DiscreteArray(3)},
)
ENV = {"name": "Some-v0", "type": "auto", "options": {"level": 2}}


class Output(NamedTuple):
    action: Any


class WithLogProb(NamedTuple):
    action: Any
    behaviour_log_prob: Any


def transition(spec, step_type, number, reward=1.0):
    """One step [1, ...] that carries its number in every leaf."""

    def leaf(spec):
        return np.full((1, *spec.shape), number % 3, spec.dtype)

    timestep = TimeStep(
        np.array([step_type], np.int32),
        np.array([reward if step_type != FIRST else 0.0], np.float32),
        np.array([0.0 if step_type == LAST else 1.0], np.float32),
        jax.tree.map(lambda s: np.full((1, *s.shape), number, s.dtype), spec.observation),
    )
    return Transition(timestep, Output(jax.tree.map(leaf, spec.action)), (), np.zeros(1, np.int32))


def write(path, lengths, spec=BARE, **changes):
    """Writes consecutive episodes of these lengths; steps are numbered from 0."""
    frames = sum(lengths)
    with DatasetWriter(path, spec, 1, frames, env=ENV, source={"run": "r"}, **changes) as writer:
        number = 0
        for length in lengths:
            for t in range(length + 1):
                assert not writer.done
                step_type = FIRST if t == 0 else LAST if t == length else MID
                writer.add(None, transition(spec, step_type, number))
                number += 1
        assert writer.done
        return writer.finish()


def config(**changes):
    return ReplayConfig(
        **{"sampler": "uniform", "batch_size": 4, "unroll_length": 2, "max_size": 99, **changes}
    )


def step_spec(spec=BARE, output=Output):
    one = transition(spec, FIRST, 0)
    rest = [np.zeros(1)] * (len(output._fields) - 1)
    return one._replace(agent_output=output(one.agent_output.action, *rest))


def windows(path, cfg=None, spec=BARE, state=(), seed=1, output=Output):
    return Windows(Dataset(path), cfg or config(), spec, step_spec(spec, output), state, seed)


@pytest.mark.parametrize("shard_bytes", [2**20, 60])
@pytest.mark.parametrize("spec", [BARE, RICH])
def test_what_is_written_comes_back(tmp_path, spec, shard_bytes):
    header = write(tmp_path / "d", [2, 3, 1], spec, shard_bytes=shard_bytes)
    dataset = Dataset(tmp_path / "d")
    assert header == dataset.header._replace(spec=header.spec)
    assert (header.frames, header.steps, header.episodes) == (6, 9, 3)
    assert header.return_mean == 2.0
    assert header.return_std == pytest.approx(np.std([2, 3, 1]))
    assert len(header.shards) == (1 if shard_bytes > 1000 else 3)
    assert header.env == ENV
    check_specs(dataset.header.spec, spec, "here")
    timestep, action = dataset.read(np.arange(9), spec)
    assert timestep.step_type.tolist() == [0, 1, 2, 0, 1, 1, 2, 0, 2]
    assert timestep.reward.tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 1]
    assert timestep.discount.tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 0]
    for name, tree, limit in (("observation", timestep.observation, 9), ("action", action, 3)):
        wanted = getattr(spec, name)
        assert jax.tree.structure(tree) == jax.tree.structure(wanted)
        for x, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
            assert (x.shape, x.dtype) == ((9, *leaf.shape), leaf.dtype)
            rows = x.reshape((9, -1))[:, 0]
            bound = leaf.maximum if leaf.dtype == np.float32 and name == "action" else limit
            np.testing.assert_array_equal(rows, np.minimum(np.arange(9) % limit, np.max(bound)))
    again, _ = dataset.read(np.array([[8, 0], [3, 3]]))  # any order, across shards
    assert again.step_type.tolist() == [[2, 0], [0, 0]]
    assert list(tmp_path.iterdir()) == [tmp_path / "d"]


def test_numpy_alone_reads_a_shard(tmp_path):
    header = write(tmp_path / "d", [2], RICH)
    with np.load(tmp_path / "d" / header.shards[0].file) as shard:
        assert set(shard) == {
            "step_type", "reward", "discount", "action['aim']", "action['move']",
            "observation['eyes'][0]", "observation['eyes'][1]",
        }  # fmt: skip
        assert shard["observation['eyes'][0]"].shape == (3, 2, 2)


def test_compressed_shards_are_read_too(tmp_path):
    header = write(tmp_path / "d", [4])
    shard = tmp_path / "d" / header.shards[0].file
    with np.load(shard) as arrays:
        np.savez_compressed(shard, **arrays)
    assert zipfile.ZipFile(shard).infolist()[0].compress_type == zipfile.ZIP_DEFLATED
    assert Dataset(tmp_path / "d").read(np.arange(5))[0].observation[:, 0].tolist() == [*range(5)]


class Uniform:
    """An inferencer that always moves right."""

    def inference(self, env_ids, timestep):
        size = len(timestep.step_type)
        return Inference(Output(np.full(size, 2, np.int32)), (), np.zeros(size, np.int32))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_actor_records_whole_episodes_of_every_environment(tmp_path, asynchronous):
    make = (
        (lambda: AsyncEnv("tests.envs.toy:Catch", 3, 2, "thread"))
        if asynchronous
        else (lambda: SyncEnv("tests.envs.toy:Catch", 3))
    )
    with make() as env:
        spec = env.spec
        with DatasetWriter(tmp_path / "d", spec, 3, 30, env=ENV, source={}) as writer:
            actor = Actor(env, Uniform(), writer)
            while not writer.done:
                actor.step()
            header = writer.finish()
    # Episodes have 9 frames. Episodes begun before the 30th frame are played to the end.
    assert header.frames % 9 == 0 and 30 <= header.frames <= 30 + 3 * 9
    assert header.episodes == header.frames // 9
    timestep, action = Dataset(tmp_path / "d").read(np.arange(header.steps))
    boards = timestep.observation.reshape((-1, 10, 10, 5))
    for episode in boards:
        # Each episode is whole and of one environment: the ball falls a row per step, to the last.
        assert [frame[:9].any(axis=1).argmax() for frame in episode[:9]] == list(range(9))
    assert (action == 2).all()
    paddle = boards[:, -1, -1, 4]
    assert (paddle == 1).all()  # the true last observation: the paddle is at the right


def test_an_environment_that_begins_anew_in_mid_episode_drops_it(tmp_path):
    with DatasetWriter(tmp_path / "d", BARE, 1, 3, env=ENV, source={}) as writer:
        for number, step_type in enumerate([FIRST, MID, MID, FIRST, MID, MID, LAST]):
            assert not writer.done
            writer.add(None, transition(BARE, step_type, number))
        assert writer.done
        header = writer.finish()
    assert (header.frames, header.episodes) == (3, 1)
    assert Dataset(tmp_path / "d").read(np.arange(4))[0].observation[0, 0] == 3


@pytest.mark.parametrize("kind", ["file", "full", "dataset"])
def test_what_is_there_is_not_overwritten(tmp_path, kind):
    path = tmp_path / "d"
    if kind == "file":
        path.write_text("mine")
    elif kind == "full":
        path.mkdir()
        (path / "mine").touch()
    else:
        write(path, [2])
    with pytest.raises(DatasetError, match="must be new or empty"):
        write(path, [3])
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "d").mkdir()
    write(tmp_path / "d", [2])
    assert Dataset(tmp_path / "d").header.frames == 2


def test_an_error_leaves_nothing_behind(tmp_path):
    with (
        pytest.raises(RuntimeError, match="mine"),
        DatasetWriter(tmp_path / "d", BARE, 1, 3, env=ENV, source={}, shard_bytes=1) as writer,
    ):
        for number, step_type in enumerate([FIRST, LAST, FIRST]):
            writer.add(None, transition(BARE, step_type, number))
        raise RuntimeError("mine")
    assert list(tmp_path.iterdir()) == []


def test_no_whole_episode_is_no_dataset(tmp_path):
    with (
        pytest.raises(DatasetError, match="an episode at least must have ended"),
        DatasetWriter(tmp_path / "d", BARE, 1, 3, env=ENV, source={}) as writer,
    ):
        writer.add(None, transition(BARE, FIRST, 0))
        writer.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path):
    code = (
        "import resource, signal, sys\n"
        "from tests.storage.test_dataset import write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # no file may grow further\n"
        "write(sys.argv[1], [100])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "d")],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert "DatasetWriteError" in line and os.strerror(errno.EFBIG) in line and "--out" in line
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DatasetWriteError, match="Nothing of it is kept"):
        write(tmp_path / "file" / "d", [2])


@pytest.mark.parametrize("damage", ["no header", "not json", "no shard", "torn", "other", "format"])
def test_damage_is_named(tmp_path, damage):
    header = write(tmp_path / "d", [2, 2])
    file, shard = tmp_path / "d" / "dataset.json", tmp_path / "d" / header.shards[0].file
    if damage == "no header":
        file.unlink()
    elif damage == "not json":
        file.write_text("{")
    elif damage == "no shard":
        shard.unlink()
    elif damage == "torn":
        shard.write_bytes(shard.read_bytes()[:500])
    elif damage == "other":
        write(tmp_path / "e", [2])
        os.replace(tmp_path / "e" / header.shards[0].file, shard)
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(DatasetError, match=str(tmp_path)) as caught:
        Dataset(tmp_path / "d")
    assert "ecord it again" in str(caught.value) or "rlstack" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"observation": specs.Array((3,), np.float32)}, "observation is float32"),
        ({"observation": specs.Array((2,), np.float64)}, "observation is float64"),
        ({"observation": {"a": BARE.observation}}, r"observation\['a'\]"),
        ({"action": specs.DiscreteArray(4)}, r"action is int32\[\] in 0..3 there and .* 0..2"),
    ],
)
def test_another_environment_is_refused(tmp_path, change, named):
    write(tmp_path / "d", [5])
    with pytest.raises(DatasetError, match=named):
        Windows(Dataset(tmp_path / "d"), config(), BARE._replace(**change), step_spec(), (), seed=1)


def test_bounds_of_real_numbers_may_differ(tmp_path):
    bounded = BARE._replace(observation=specs.BoundedArray((2,), np.float32, -np.inf, [1, 2]))
    write(tmp_path / "d", [5], bounded)
    assert Dataset(tmp_path / "d").header.spec.observation.minimum == -np.inf
    windows(tmp_path / "d")


def test_every_window_comes_once_an_epoch_in_the_seeds_order(tmp_path):
    write(tmp_path / "d", [5, 4, 6])  # 18 steps: 16 windows of 3 steps
    drawn = windows(tmp_path / "d", config(batch_size=5))
    assert drawn.num_windows == 16
    epochs = np.concatenate([drawn.sample().keys for _ in range(16)]).reshape((5, 16))
    for epoch in epochs:
        assert sorted(epoch) == list(range(16))
    assert len({tuple(epoch) for epoch in epochs}) == 5
    again = windows(tmp_path / "d", config(batch_size=5))
    assert np.array_equal(np.concatenate([again.sample().keys for _ in range(16)]), epochs.ravel())
    other = windows(tmp_path / "d", config(batch_size=5), seed=2)
    assert not np.array_equal(other.sample().keys, epochs.ravel()[:5])
    assert float(drawn.stats()["epochs"]) == 5


def test_a_window_is_consecutive_steps_time_major(tmp_path):
    write(tmp_path / "d", [5, 4, 6], shard_bytes=60)
    state = {"h": np.arange(8.0).reshape((4, 2))}
    drawn = windows(tmp_path / "d", state=state)
    sample = drawn.sample()
    trajectory = sample.batch.trajectory
    observed = trajectory.timestep.observation[..., 0]
    assert observed.shape == (3, 4)
    np.testing.assert_array_equal(observed, sample.keys + np.arange(3)[:, None])
    assert type(trajectory.agent_output) is Output
    np.testing.assert_array_equal(trajectory.agent_output.action, observed % 3)
    np.testing.assert_array_equal(trajectory.agent_state["h"], np.stack([state["h"]] * 3))
    assert trajectory.params_version.dtype == np.int32
    assert sample.batch.weights.tolist() == [1, 1, 1, 1]


def test_starts_periods_and_the_end(tmp_path):
    write(tmp_path / "d", [3, 4])  # steps 0..3 and 4..8; LAST are 3 and 8

    def starts(**changes):
        drawn = windows(tmp_path / "d", config(batch_size=1, **changes))
        seen = [drawn.sample().batch.trajectory for _ in range(drawn.num_windows)]
        return sorted(int(x.timestep.observation[0, 0, 0]) for x in seen)

    assert starts(unroll_length=1) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert starts(unroll_length=1, starts="not_last") == [0, 1, 2, 4, 5, 6, 7]
    assert starts(unroll_length=3, period=3) == [0, 3, 5]  # the last window ends with the last step
    assert starts(unroll_length=2, starts="not_last", context=1) == [0, 1, 3, 4, 5, 6]
    assert starts(unroll_length=8) == [0]
    with pytest.raises(DatasetError, match="Lower --replay"):
        starts(unroll_length=9)


def test_going_on_from_a_saved_place_is_going_on(tmp_path):
    write(tmp_path / "d", [5, 4, 6])
    unbroken, broken = windows(tmp_path / "d"), windows(tmp_path / "d")
    for _ in range(7):
        unbroken.sample(), broken.sample()
    resumed = windows(tmp_path / "d")
    resumed.load(broken.save())
    for _ in range(9):
        a, b = unbroken.sample(), resumed.sample()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("other", ["dataset", "windows"])
def test_going_on_in_another_dataset_is_refused(tmp_path, other):
    write(tmp_path / "d", [5, 4, 6])
    write(tmp_path / "e", [5, 6, 4])
    saved = windows(tmp_path / "d").save()
    drawn = windows(tmp_path / ("e" if other == "dataset" else "d"), config(unroll_length=3))
    with pytest.raises(DatasetError, match="the dataset that the run began with"):
        drawn.load(saved)


def test_agents_that_need_more_than_actions_are_refused(tmp_path):
    write(tmp_path / "d", [5])
    with pytest.raises(DatasetError, match="WithLogProb needs action, behaviour_log_prob"):
        windows(tmp_path / "d", output=WithLogProb)
    with pytest.raises(ValueError, match="sampler uniform"):
        windows(tmp_path / "d", config(sampler="prioritized"))
