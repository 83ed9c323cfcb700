"""Parts of a world model: the core in blocks, actions as numbers, and sizes of images."""

import haiku as hk
import jax
import numpy as np
import pytest

from rlstack.networks.image_codec import halved, resolutions
from rlstack.networks.layers.blocks import BlockGRU
from rlstack.networks.layers.dense import Block
from rlstack.networks.recurrent_model import action_features
from tests.agent_cases import SEVERAL, STRUCTURED, UNEVEN, quick_jit


def test_actions_are_numbers_for_the_model():
    several = action_features(SEVERAL, np.array([[0, 2], [2, 1]]))
    np.testing.assert_array_equal(several, [[1, 0, 0, 0, 1], [0, 0, 1, 1, 0]])
    real = action_features(UNEVEN, np.array([[0.0, 6.0], [-2.0, 3.0]], np.float32))
    np.testing.assert_allclose(real, [[0, 1], [-1, 0]])
    action = {"aim": np.array([[0.5, -1.0]], np.float32), "move": np.array([2])}
    np.testing.assert_allclose(action_features(STRUCTURED, action), [[0.5, -1, 0, 0, 1]])


def test_blocks_of_the_recurrent_state_see_themselves_and_the_inputs_only():
    core = hk.without_apply_rng(
        hk.transform(lambda *x: BlockGRU(3, 2, jax.nn.silu, Block("rms"), "core")(*x))
    )
    rng = np.random.default_rng(0)
    state, action = (rng.normal(size=(2, size)).astype(np.float32) for size in (8, 4))
    params = quick_jit(core.init)(jax.random.PRNGKey(0), state, action)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def layer(x, name):
        w, scale = params[f"{name}/linear"], params[f"{name}/rms_norm"]["scale"]
        x = x @ w["w"] + w["b"]
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
        return x * sigmoid(x)

    shared = [layer(state, "core/input_0"), layer(action, "core/input_1")]
    hidden, gates = params["core/hidden"], params["core/gates"]
    blocks = state[:, :4], state[:, 4:]
    x = np.concatenate(
        [
            np.concatenate([block, *shared], -1) @ hidden["w"][g] + hidden["b"][g]
            for g, block in enumerate(blocks)
        ],
        axis=-1,
    )
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["core/rms_norm"]["scale"]
    x = x * sigmoid(x)
    wanted = []
    for g, block in enumerate(blocks):
        parts = x[:, 4 * g : 4 * g + 4] @ gates["w"][g] + gates["b"][g]
        reset, candidate, update = parts[:, :4], parts[:, 4:8], sigmoid(parts[:, 8:] - 1)
        wanted.append(update * np.tanh(sigmoid(reset) * candidate) + (1 - update) * block)
    found = core.apply(params, state, action)
    np.testing.assert_allclose(found, np.concatenate(wanted, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "smallest", "number"),
    [((64, 64), (4, 4), 5), ((84, 84), (6, 6), 5), ((10, 10), (5, 5), 2), ((10, 5), (10, 5), 2)],
)
def test_images_are_halved_until_they_are_small(shape, smallest, number):
    found = resolutions(*shape)
    assert (found[0], found[-1], len(found)) == (shape, smallest, number)
    x = np.arange(2 * shape[0] * shape[1], dtype=np.float32).reshape(2, *shape, 1)
    half = halved(x)
    assert half.shape == (2, -(-shape[0] // 2), -(-shape[1] // 2), 1)
    assert half[1, 0, 0, 0] == x[1, :2, :2].max()
    assert half[0, -1, -1, 0] == x[0, -1, -1, 0]
