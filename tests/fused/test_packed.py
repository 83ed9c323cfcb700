"""Packed steps come back bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.fused.packed import PackedSteps
from rlstack.types import TimeStep, Transition

NUM_ENVS, ROWS = 3, 4
SHAPES = {
    "position": ((2, 3), np.float32),
    "count": ((), np.int32),
    "bits": ((5,), np.uint32),
    "is_open": ((2,), np.bool_),
    "letter": ((), np.int8),
    "half": ((4,), np.float16),
    "picture": ((7, 7, 2), np.uint8),
    "far": ((40,), np.float32),  # more words than a packed part has
    "nothing": ((0,), np.float32),
}


def step_of(rng, shapes):
    """A step of random bits, NaNs of all kinds among them."""

    def leaf(shape, dtype):
        if dtype == np.bool_:
            return rng.integers(0, 2, (NUM_ENVS, *shape)).astype(bool)
        size = (NUM_ENVS, *shape, np.dtype(dtype).itemsize)
        return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(NUM_ENVS, *shape)

    observation = {name: leaf(*shape) for name, shape in shapes.items()}
    timestep = TimeStep(leaf((), np.int32), leaf((), np.float32), leaf((), np.float32), observation)
    return Transition(timestep, (), (), leaf((), np.int32))


def assert_same_bits(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.mark.parametrize("shapes", [SHAPES, {"picture": SHAPES["picture"]}], ids=["all", "one"])
def test_steps_come_back_bit_for_bit(shapes):
    rng = np.random.default_rng(0)
    written = [step_of(rng, shapes) for _ in range(ROWS)]
    steps = PackedSteps.zeros(ROWS, jax.eval_shape(lambda: written[0]))
    with_row = jax.jit(PackedSteps.with_row)
    for row in (2, 0, 3, 1):
        steps = with_row(steps, row, written[row])
    steps = with_row(steps, 1, written[0])
    written[1] = written[0]
    rows, env_ids = np.array([[3, 1], [0, 2]]), np.array([2, 0])
    every = jax.tree.map(lambda *x: np.stack(x), *written)
    assert_same_bits(jax.jit(lambda s: s[2])(steps), written[2])
    found = jax.jit(lambda s: s[rows, env_ids])(steps)
    assert_same_bits(found, jax.tree.map(lambda x: x[rows, env_ids], every))


def test_small_parts_share_an_array():
    steps = PackedSteps.zeros(
        ROWS, jax.eval_shape(lambda: step_of(np.random.default_rng(0), SHAPES))
    )
    arrays = jax.tree.leaves(steps)
    words = 4 + 6 + 1 + 5  # step type, reward, discount and action; position, count and bits
    assert {str(x.dtype): x.shape[2:] for x in arrays} == {
        "uint32": (words,),
        "float32": (40,),
        "bool": (2,),
        "int8": (),
        "float16": (4,),
        "uint8": (7, 7, 2),
    }
    assert all(x.shape[:2] == (ROWS, NUM_ENVS) for x in arrays)


def test_a_step_of_large_parts_alone_is_not_packed():
    step = jax.ShapeDtypeStruct((NUM_ENVS, 100), jnp.float32)
    (array,) = jax.tree.leaves(PackedSteps.zeros(ROWS, (step,)))
    assert (array.shape, array.dtype) == ((ROWS, NUM_ENVS, 100), jnp.float32)
