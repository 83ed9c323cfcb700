"""Stacked frames are stored once and reconstructed exactly."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.replay.frame_stack import FrameStacks, StackedReplay
from rlstack.replay.shared_memory import SharedMemReplayBuffer
from rlstack.types import StartSpec, TimeStep, Transition
from tests.replay.replay_model import FIRST, LAST, MID

DEPTH, SIZE = 4, 5


class Stream:
    """One environment's stacks, padded in one of three ways at FIRST."""

    def __init__(self, env: int, padding: str, rng: np.random.Generator):
        self.env, self.padding, self.rng = env, padding, rng
        self.stack = np.zeros((DEPTH, SIZE, SIZE), np.uint8)
        self.step_type, self.step = LAST, -1

    def next(self):
        self.step += 1
        self.step_type = FIRST if self.step_type == LAST else int(self.rng.choice([MID, MID, LAST]))
        frame = self.rng.integers(1, 256, (SIZE, SIZE), np.uint8)
        if self.step_type == FIRST and self.padding == "repeat":
            self.stack = np.repeat(frame[None], DEPTH, 0)
        elif self.step_type == FIRST and self.padding == "zeros":
            self.stack = np.zeros_like(self.stack)
            self.stack[-1] = frame
        else:
            self.stack = np.concatenate([self.stack[1:], frame[None]])
        return self.stack


def transition(streams):
    stacks = np.stack([s.next() for s in streams])
    n = len(streams)
    code = np.array([s.env * 1000 + s.step for s in streams], np.float32)
    observation = {"image": stacks, "code": code}
    step_types = np.array([s.step_type for s in streams], np.int32)
    timestep = TimeStep(step_types, code, np.ones(n, np.float32), observation)
    state = -code.astype(np.int32)
    return Transition(timestep, code.astype(np.int32), state, np.zeros(n, np.int32))


def config(**changes):
    fields = {
        "sampler": "uniform", "batch_size": 8, "unroll_length": 2, "max_size": 64,
        "frame_stack": DEPTH, "starts": "not_last",
    }  # fmt: skip
    return ReplayConfig(**{**fields, **changes})


def stacked(cfg, num_envs, backend="in_process"):
    streams = [Stream(e, "repeat", np.random.default_rng(e)) for e in range(num_envs)]
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), transition(streams))
    spec = spec._replace(agent_state=StartSpec((), np.int32))
    make = InProcessReplay if backend == "in_process" else SharedMemReplayBuffer
    stacks = FrameStacks(cfg, num_envs, spec)
    return StackedReplay(stacks, make(stacks.cfg, num_envs, seed=0, spec=stacks.spec))


@pytest.mark.parametrize("backend", ["in_process", "shared_memory"])
@pytest.mark.parametrize("sampler", ["uniform", "fifo", "prioritized"])
@pytest.mark.parametrize("padding", ["repeat", "zeros", "continue"])
@pytest.mark.parametrize("period", [None, 2])
def test_stacks_come_back_exactly(backend, sampler, padding, period):
    num_envs, seen = 3, {}
    starts = "any" if sampler == "fifo" else "not_last"
    cfg = config(sampler=sampler, starts=starts, period=period)
    buffer = stacked(cfg, num_envs, backend)
    streams = [Stream(e, padding, np.random.default_rng(e)) for e in range(num_envs)]
    checked = 0
    for t in range(400):
        step = transition(streams)
        for row, stream in enumerate(streams):
            observation = step.timestep.observation
            seen[stream.env * 1000 + stream.step] = observation["image"][row].copy()
        if t % 97 == 50:
            buffer.gap(np.array([1]))
        buffer.add(None, step)
        while t > 20 and buffer.can_sample():
            trajectory = buffer.sample().batch.trajectory
            codes = trajectory.timestep.observation["code"].astype(int)
            assert codes.shape == (cfg.unroll_length + 1, cfg.batch_size)
            assert (np.diff(codes, axis=0) == 1).all()
            if cfg.starts == "not_last":
                assert (trajectory.timestep.step_type[0] != LAST).all()
            expected = np.array([[seen[c] for c in row] for row in codes])
            np.testing.assert_array_equal(trajectory.timestep.observation["image"], expected)
            np.testing.assert_array_equal(trajectory.agent_state, -codes[:1])
            checked += 1
            if sampler != "fifo":
                break
    assert checked > 50
    buffer.close()


@pytest.mark.slow
@pytest.mark.chosen
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 4), data=st.data())
def test_any_history_of_some_environments_comes_back_exactly(seed, length, data):
    rng, num_envs, seen = np.random.default_rng(seed), 3, {}
    buffer = stacked(config(unroll_length=length), num_envs)
    paddings = rng.choice(["repeat", "zeros", "continue"], num_envs)
    streams = [Stream(e, paddings[e], rng) for e in range(num_envs)]
    for _ in range(data.draw(st.integers(1, 150))):
        ids = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)]
        if rng.random() < 0.05:
            buffer.gap(ids)
        step = transition([streams[i] for i in ids])
        for row, i in enumerate(ids):
            seen[i * 1000 + streams[i].step] = step.timestep.observation["image"][row]
        buffer.add(ids, step)
        if buffer.can_sample():
            observation = buffer.sample().batch.trajectory.timestep.observation
            codes = observation["code"].astype(int)
            expected = np.array([[seen[c] for c in row] for row in codes])
            np.testing.assert_array_equal(observation["image"], expected)
    buffer.close()


def test_a_stored_step_takes_one_frame_and_scalars():
    spec = transition([Stream(0, "repeat", np.random.default_rng(0))])
    image = jax.ShapeDtypeStruct((DEPTH, 84, 84), np.uint8)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), spec)
    timestep = spec.timestep._replace(observation={"image": image})
    stored = FrameStacks(config(), 1, spec._replace(timestep=timestep)).spec
    step = sum(x.dtype.itemsize * int(np.prod(x.shape)) for x in jax.tree.leaves(stored))
    scalars = 3 * 4 + 4 + 4 + 4 + 1  # step type, reward, discount; action; state; version; age
    assert step == 84 * 84 + scalars
    assert step < 1.05 * 84 * 84


def test_batches_live_until_the_next_but_one():
    buffer = stacked(config(), 2)
    streams = [Stream(e, "repeat", np.random.default_rng(e)) for e in range(2)]
    for _ in range(40):
        buffer.add(None, transition(streams))
    before = buffer.sample().batch.trajectory.timestep.observation["image"]
    kept = before.copy()
    buffer.sample()
    np.testing.assert_array_equal(before, kept)


def test_load_goes_on_as_if_never_interrupted():
    one, two = stacked(config(), 2), stacked(config(), 2)
    streams = [Stream(e, "continue", np.random.default_rng(e)) for e in range(2)]
    for _ in range(40):
        one.add(None, transition(streams))
    two.load(one.save())
    for _ in range(30):
        step = transition(streams)
        one.add(None, step)
        two.add(None, step)
    a, b = one.sample(), two.sample()
    jax.tree.map(np.testing.assert_array_equal, a.batch, b.batch)


def test_stacks_that_cannot_be_put_together_are_refused():
    buffer = stacked(config(), 2)
    streams = [Stream(e, "repeat", np.random.default_rng(e)) for e in range(2)]
    for _ in range(5):
        buffer.add(None, transition(streams))
    step = transition(streams)
    step.timestep.observation["image"][1, 0] += 1
    step.timestep.step_type[1] = MID
    with pytest.raises(ValueError, match=r"another one from environments \[1\].*frame-stack 0"):
        buffer.add(None, step)


def test_an_observation_without_stacks_is_refused():
    with pytest.raises(ValueError, match=r"frame_stack is 3.*must be a stack"):
        stacked(config(frame_stack=3), 2)


@pytest.mark.parametrize("changes", [{"frame_stack": 1}, {"frame_stack": -1}, {"context": 2}])
def test_configs_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(config(), **changes)


def test_envpools_atari_comes_back_exactly():
    pytest.importorskip("envpool")
    from rlstack.envs import SyncEnv

    num_envs, seen = 2, []
    options = {"episodic_life": True, "max_episode_steps": 60}
    with SyncEnv("Breakout-v5", num_envs, seed=3, options=options) as env:
        timestep = env.reset()

        def step_of(timestep):
            zeros = np.zeros(num_envs, np.int32)
            return Transition(timestep, zeros + len(seen), (), zeros)

        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step_of(timestep))
        stacks = FrameStacks(config(), num_envs, spec)
        stored = InProcessReplay(stacks.cfg, num_envs, seed=0, spec=stacks.spec)
        buffer = StackedReplay(stacks, stored)
        rng = np.random.default_rng(0)
        for _ in range(400):
            buffer.add(None, step_of(timestep))
            seen.append(np.array(timestep.observation))
            if buffer.can_sample():
                trajectory = buffer.sample().batch.trajectory
                for now, image in zip(
                    trajectory.agent_output.ravel(),
                    trajectory.timestep.observation.reshape(-1, 4, 84, 84),
                    strict=True,
                ):
                    assert any((image == seen[now][e]).all() for e in range(num_envs))
            timestep = env.step(rng.integers(0, 4, num_envs).astype(np.int32))
