"""New agent outputs for stored steps: later batches have them, in every item with these steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.fused.packed import PackedSteps
from rlstack.replay import InProcessReplay, SharedMemReplayBuffer
from tests.fused.test_packed import NUM_ENVS, ROWS, SHAPES, assert_same_bits, step_of
from tests.replay.replay_model import SPEC, Output, config, feed
from tests.replay.served import backend as served

MAKE = {
    "in_process": lambda cfg, num_envs: InProcessReplay(cfg, num_envs, seed=3, spec=SPEC),
    "shared_memory": lambda cfg, num_envs: SharedMemReplayBuffer(cfg, num_envs, seed=3, spec=SPEC),
    "served": served.make,
}


@pytest.fixture(params=MAKE)
def make(request):
    buffers = []

    def make(num_envs=2, **changes):
        fields = {"max_size": 24, "batch_size": 6, **changes}
        buffers.append(MAKE[request.param](config(**fields), num_envs))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


def steps_in(sample):
    """The environment and number of each step of a batch, and its values."""
    trajectory = sample.batch.trajectory
    code = trajectory.timestep.observation["code"].ravel().tolist()
    return list(zip(code, trajectory.agent_output.value.ravel().tolist(), strict=True))


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_later_batches_have_what_was_written(make, sampler):
    buffer, written, seen = make(sampler=sampler), {}, 0
    feed(buffer, 2, 0, 12)
    for step in range(12, 90):
        sample = buffer.sample()
        for code, value in steps_in(sample):
            assert value == written.get(code, 0.0)
            seen += value > 0
        trajectory = sample.batch.trajectory
        action = trajectory.agent_output.action.copy()
        if step % 3 == 0:
            # Equal steps in several items get equal values.
            codes = trajectory.timestep.observation["code"]
            values = (1000 * step + codes % 97).astype(np.float32)
            buffer.write_back(sample.keys, Output(None, values))
            written.update(dict(zip(codes.ravel().tolist(), values.ravel().tolist(), strict=True)))
        np.testing.assert_array_equal(trajectory.agent_output.action, action)
        feed(buffer, 2, step, step + 1)
        if step in (40, 41):
            saved = buffer.save()
            buffer = make(sampler=sampler)
            buffer.load(saved)
    assert seen > 500


def test_items_that_are_gone_are_not_written(make):
    buffer = make(1, max_size=4, batch_size=4)
    feed(buffer, 1, 0, 7)
    old = buffer.sample()
    feed(buffer, 1, 7, 7 + 13)  # a ring of shared memory has 4 rows more than the 7 of its items
    buffer.write_back(old.keys, Output(None, np.full((4, 4), 5, np.float32)))
    for _ in range(10):
        assert {value for _, value in steps_in(buffer.sample())} == {0.0}


def test_a_step_after_a_written_one_in_its_row_has_its_own_value(make):
    buffer = make(1, max_size=4, batch_size=4)
    for step in range(0, 60, 2):
        feed(buffer, 1, step, step + 2)
        if step >= 6:
            sample = buffer.sample()
            codes = sample.batch.trajectory.timestep.observation["code"]
            for code, value in steps_in(sample):
                assert value in (0, code + 1) and (value == 0 or code < step)
            buffer.write_back(sample.keys, Output(None, (codes + 1).astype(np.float32)))


def test_all_arrays_may_be_written(make):
    buffer = make(1, max_size=4, batch_size=1)
    feed(buffer, 1, 0, 4)
    sample = buffer.sample()
    new = Output(np.arange(8, dtype=np.int32).reshape(4, 1, 2), np.ones((4, 1), np.float32))
    buffer.write_back(sample.keys, new)
    found = buffer.sample().batch.trajectory.agent_output
    jax.tree.map(np.testing.assert_array_equal, found, new)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones((4, 1)), r"float32\(4, 1\).*got float64\(4, 1\)"),
        (np.ones((3, 1), np.float32), r"float32\(4, 1\).*got float32\(3, 1\)"),
    ],
)
def test_other_shapes_and_types_are_refused(make, values, message):
    buffer = make(1, max_size=4, batch_size=1)
    feed(buffer, 1, 0, 4)
    with pytest.raises(Exception, match=message):
        buffer.write_back(buffer.sample().keys, Output(None, values))


def test_a_fifo_is_refused():
    buffer = InProcessReplay(config("fifo", max_size=24), 2, seed=0, spec=SPEC)
    feed(buffer, 2, 0, 12)
    with pytest.raises(ValueError, match="write_back: the sampler must be uniform or prioritized"):
        buffer.write_back(buffer.sample().keys, Output(None, None))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("shapes", [SHAPES, {"picture": SHAPES["picture"]}], ids=["all", "one"])
def test_packed_steps_are_replaced_bit_for_bit(shapes):
    rng = np.random.default_rng(0)
    written = [step_of(rng, shapes) for _ in range(ROWS)]
    steps = PackedSteps.zeros(ROWS, jax.eval_shape(lambda: written[0]))
    for row, step in enumerate(written):
        steps = steps.with_row(jnp.int32(row), step)
    new = step_of(rng, shapes)
    leaves, structure = jax.tree.flatten(new)
    for kept in (range(0, len(leaves), 2), range(1, len(leaves), 2)):
        given = [None if i in kept else jnp.asarray(x)[None, :2] for i, x in enumerate(leaves)]
        index = jnp.full((1, 2), 1), jnp.array([[2, 0]])
        found = jax.jit(lambda steps, i=index, g=given: steps.replaced(i, g))(steps)
        wanted = [np.array(x) for x in jax.tree.leaves(written[1])]
        for i, x in enumerate(wanted):
            if i not in kept:
                x[2], x[0] = leaves[i][0], leaves[i][1]
        assert_same_bits(found[1], structure.unflatten(wanted))
        for row in (0, 2, 3):
            assert_same_bits(found[row], written[row])
        outside = steps.replaced((jnp.full((1, 2), ROWS), index[1]), given)
        for row in range(ROWS):
            assert_same_bits(outside[row], written[row])
    assert NUM_ENVS == 3


@pytest.mark.launchpad
def test_reverb_refuses_what_only_tables_have():
    from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer

    with pytest.raises(ValueError, match=r"newest_share must be left out, .*C\+\+"):
        ReverbServer(config(newest_share=0.5), 1, SPEC)
    cfg = config(max_size=24, batch_size=6)
    server = ReverbServer(cfg, 1, SPEC)
    buffer = ReverbReplayBuffer(cfg, 1, server, SPEC)
    try:
        feed(buffer, 1, 0, 12)
        with pytest.raises(ValueError, match=r"write_back: .*--replay.service table"):
            buffer.write_back(buffer.sample().keys, Output(None, None))
    finally:
        buffer.close()
        server.close()
