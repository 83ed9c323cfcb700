"""Every replay returns the steps of entity environments unchanged."""

import contextlib
from typing import NamedTuple

import jax
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer, binding
from rlstack.replay.shared_memory import SharedMemReplayBuffer
from rlstack.types import Transition

NUM_ENVS, LENGTH = 3, 4


class Output(NamedTuple):
    action: dict


@pytest.fixture(scope="module")
def steps():
    """Random steps of MineSweeper with its cannon, so that the number of entities changes."""
    rng, found = np.random.default_rng(0), []
    options = {"orbital_cannon": True, "cooldown_period": 2, "max_steps": 20}
    with SyncEnv("rlstack.entity.games:MineSweeper", NUM_ENVS, seed=0, options=options) as env:
        timestep = env.reset()
        for _ in range(8 * LENGTH + 1):
            action = {}
            for name, actors in timestep.observation["actors"].items():
                legal = timestep.observation["action_mask"][name].reshape(*actors.shape, -1)
                drawn = legal * (rng.random(legal.shape) + 0.1)
                action[name] = drawn.argmax(axis=-1).astype(np.int32)
            version = np.zeros(NUM_ENVS, np.int32)
            step = Transition(timestep, Output(action), (), version)
            found.append(jax.tree.map(np.array, step))
            timestep = env.step(action)
    fired = [
        np.any(step.timestep.observation["actors"]["Fire Orbital Cannon"] >= 0) for step in found
    ]
    assert any(fired) and not all(fired)
    return found


@contextlib.contextmanager
def in_process(cfg, spec):
    yield InProcessReplay(cfg, NUM_ENVS, seed=0, spec=spec)


@contextlib.contextmanager
def shared_memory(cfg, spec):
    with contextlib.closing(SharedMemReplayBuffer(cfg, NUM_ENVS, seed=0, spec=spec)) as buffer:
        yield buffer


@contextlib.contextmanager
def reverb(cfg, spec):
    with (
        contextlib.closing(ReverbServer(cfg, NUM_ENVS, spec)) as server,
        contextlib.closing(
            ReverbReplayBuffer(cfg, NUM_ENVS, server, spec, prefetch=0, max_pending=0)
        ) as buffer,
    ):
        yield buffer


ON_REVERB = [
    pytest.mark.launchpad,
    pytest.mark.skipif(not binding.available(), reason="Reverb is not installed"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "backend", [in_process, shared_memory, pytest.param(reverb, marks=ON_REVERB)]
)
def test_entities_come_back_from_replay(steps, backend):
    cfg = ReplayConfig(
        sampler="fifo", batch_size=NUM_ENVS, unroll_length=LENGTH, max_size=2 * NUM_ENVS
    )
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), steps[0])
    items = 0
    with backend(cfg, spec) as buffer:
        for i, step in enumerate(steps):
            buffer.add(None, step)
            if not buffer.can_sample():
                continue
            wanted = jax.tree.map(lambda *x: np.stack(x), *steps[i - LENGTH : i + 1])
            found = jax.tree.map(np.array, buffer.sample().batch.trajectory)
            order = [_of(found, row, wanted) for row in range(NUM_ENVS)]
            assert sorted(order) == list(range(NUM_ENVS))
            items += NUM_ENVS
    assert items == 8 * NUM_ENVS


def _of(found, row, wanted):
    """The environment whose steps are in this row of a batch."""

    def alike(env):
        pairs = jax.tree.map(lambda x, y: np.array_equal(x[:, row], y[:, env]), found, wanted)
        return all(jax.tree.leaves(pairs))

    (env,) = (env for env in range(NUM_ENVS) if alike(env))
    return env
