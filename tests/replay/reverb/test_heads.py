"""Large states, which Reverb's items hold at their first step alone."""

import jax
import numpy as np
import pytest

from rlstack.replay import ReplayConfig
from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer
from rlstack.replay.reverb.binding import DATA
from rlstack.replay.reverb.packing import HEAD, Packing, fifo_item
from rlstack.replay.reverb.table_config import is_whole
from rlstack.types import StartSpec, StepType, TimeStep, Transition
from tests.replay.reverb import backend

NUM_ENVS, WIDTH = 3, 400


def step_of(numbers, env_ids, pixels=1):
    """Steps whose reward, picture and state say which ones they are."""
    reward = np.array([100.0 * number + env for number, env in zip(numbers, env_ids, strict=True)])
    rows = len(reward)
    timestep = TimeStep(
        np.full(rows, StepType.MID, np.int32),
        reward.astype(np.float32),
        np.ones(rows, np.float32),
        np.repeat(np.array(numbers, np.uint8)[:, None], pixels, axis=1),
    )
    state = {
        "memory": np.repeat(reward[:, None], WIDTH, axis=1).astype(np.float32),
        "count": reward.astype(np.int32),
    }
    return Transition(timestep, (), state, np.array(numbers, np.int32))


def spec(at=0, pixels=1):
    one = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step_of([0], [0], pixels)
    )
    state = jax.tree.map(lambda x: StartSpec(x.shape, x.dtype, at), one.agent_state)
    return one._replace(agent_state=state)


def config(sampler, period, **options):
    return ReplayConfig(
        sampler=sampler, batch_size=4, unroll_length=6, period=period, max_size=300, **options
    )


def check(trajectory, at=0):
    """All leaves of each item are of one window; the state is that of the step ``at``."""
    reward = np.asarray(trajectory.timestep.reward)
    assert (np.diff(reward, axis=0) == 100).all()
    np.testing.assert_array_equal(trajectory.timestep.observation[..., 0], reward // 100)
    state = trajectory.agent_state
    assert state["memory"].shape == (1, reward.shape[1], WIDTH)
    np.testing.assert_array_equal(state["memory"][0], np.repeat(reward[at][:, None], WIDTH, 1))
    np.testing.assert_array_equal(state["count"][0], reward[at])
    return {(int(r // 100), int(r % 100)) for r in reward[0]}


CASES = [
    ("uniform", 2, 1, 0),
    ("uniform", 2, 3000, 0),  # too large to repeat: items refer to steps
    ("uniform", 3, 3000, 2),
    ("prioritized", 1, 3000, 0),
    ("fifo", 6, 1, 0),
]


@pytest.mark.launchpad
@pytest.mark.skipif(not backend.INSTALLED, reason="Reverb is not installed")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_items_have_the_state_of_their_first_step(case):
    sampler, period, pixels, at = case
    cfg, one = config(sampler, period), spec(at, pixels)
    packing = Packing(one)
    assert packing.head_bytes == 4 * WIDTH + 8 and packing.step_bytes < pixels + 40
    assert is_whole(cfg, packing.step_bytes) == (pixels == 1)
    server = ReverbServer(cfg, NUM_ENVS, one)
    buffer = ReverbReplayBuffer(cfg, NUM_ENVS, server, one, prefetch=0, max_pending=0)
    try:
        ordinal = np.zeros(NUM_ENVS, int)
        for turn in range(20):
            # All environments together, then some of them in another order.
            ids = None if turn < 12 else np.array([2, 0])
            own = np.arange(NUM_ENVS) if ids is None else ids
            buffer.add(ids, step_of(ordinal[own], own, pixels))
            ordinal[own] += 1
        seen = set()
        for _ in range(40):
            if buffer.can_sample():
                seen |= check(buffer.sample().batch.trajectory, at)
        starts = {(start, env) for env in range(NUM_ENVS) for start in range(0, 20, period)}
        assert seen <= {(s, env) for s, env in starts if s + 6 < ordinal[env]}
        assert len(seen) >= (4 if sampler == "fifo" else 6)
    finally:
        buffer.close()
        server.close()


def test_items_of_earlier_versions_are_read():
    """Their rows had all leaves."""
    at, one = 2, spec(2, 5)
    older, packing = Packing(one, with_head=False), Packing(one)
    rows = np.zeros((1, 7, older.step_bytes), np.uint8)
    older.env_ids(rows)[:] = 2
    window = [jax.tree.leaves(step_of([number], [2], 5)) for number in range(3, 10)]
    for view, *leaves in zip(older.views(rows, rows), *window, strict=True):
        view[0] = np.concatenate(leaves)
    raw = [7, np.float64(1), np.int64(1), np.float64(1), rows[0]]
    item = packing.renewed(raw)
    assert item[DATA].shape == (7, packing.step_bytes)
    assert item[HEAD].shape == (packing.head_bytes,)
    assert packing.renewed(item) is item
    found = packing.tree(packing.gather([item[DATA]] * 2, [item[HEAD]] * 2))
    assert check(found, at) == {(3, 2)}
    taken = fifo_item(packing, config("fifo", 6), raw)
    assert (taken.env_id, taken.version, len(taken)) == (2, 4, HEAD + 1)


def test_small_states_stay_in_the_rows():
    one = spec()
    small = one._replace(agent_state={"count": StartSpec((), np.int32)})
    packing = Packing(small)
    assert packing.head_bytes == 0
    assert packing.step_bytes == Packing(small, with_head=False).step_bytes
