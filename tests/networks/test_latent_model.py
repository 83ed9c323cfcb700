"""MuZero's learned model: shapes and range of latent states, and the options that it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.networks import NetworkConfig, learned_model
from tests.agent_cases import BATCH, ONE_OF_4, SEVERAL, VECTOR, quick_jit

BOARD = specs.BoundedArray((10, 10, 4), np.float32, 0, 1)
_LATER = [pytest.mark.slow, pytest.mark.chosen]
_NEWER = pytest.mark.skipif(
    jax.__version_info__ < (0, 6),
    reason="the older CPU runtime of JAX 0.5 writes outside of its memory in convolutions",
)


@pytest.mark.parametrize(
    ("spec", "torso", "dtype", "shape"),
    [
        (VECTOR, "mlp", "float32", (8,)),
        pytest.param(VECTOR, "residual", "float32", (8,), marks=_LATER),
        pytest.param(VECTOR, "sphere", "float32", (8,), marks=_LATER),
        pytest.param(BOARD, "minatar", "float32", (8, 8, 16), marks=_NEWER),
        pytest.param(BOARD, "minatar", "bfloat16", (8, 8, 16), marks=[_NEWER, *_LATER]),
        pytest.param(BOARD, "impala", "float32", (2, 2, 32), marks=[_NEWER, *_LATER]),
        pytest.param(BOARD, "mlp", "float32", (8,), marks=_LATER),
        pytest.param(
            {"a": BOARD, "b": VECTOR}, "minatar", "float32", (8,), marks=[_NEWER, *_LATER]
        ),
    ],
)
def test_latent_states_reach_from_0_to_1(spec, torso, dtype, shape):
    """They are images if the observation is one and the torso has convolutions."""
    cfg = NetworkConfig(torso=torso, hidden_sizes=(8,), num_atoms=7, dtype=dtype)
    model = learned_model(spec, ONE_OF_4, cfg)

    @quick_jit
    def found(key, observation):
        params = model.init(key)
        state = model.represent(params, observation)
        after, reward = model.step(params, state, jnp.arange(BATCH))
        return state, after, reward, model.predict(params, after)

    rng = np.random.default_rng(0)
    observation = jax.tree.map(lambda x: rng.normal(size=(BATCH, *x.shape)), spec)
    state, after, reward, predicted = found(jax.random.PRNGKey(0), observation)
    for x in (state, after):
        assert x.shape == (BATCH, *shape) and x.dtype == jnp.float32
        np.testing.assert_allclose(x.reshape(BATCH, -1).min(axis=1), 0, atol=1e-6)
        np.testing.assert_allclose(x.reshape(BATCH, -1).max(axis=1), 1, atol=1e-5)
    shapes = [x.shape for x in (reward, *predicted)]
    assert shapes == [(BATCH, 7), (BATCH, 4), (BATCH, 7)]
    assert len({row.tobytes() for row in np.asarray(after)}) == BATCH  # actions differ


@_NEWER
@pytest.mark.slow
@pytest.mark.chosen
def test_a_change_of_a_latent_image_is_local():
    """What an action changes in a pixel depends on the pixels up to two away."""
    model = learned_model(BOARD, ONE_OF_4, NetworkConfig(torso="minatar", hidden_sizes=(8,)))
    params = model.init(jax.random.PRNGKey(0))
    state = np.random.default_rng(0).uniform(0.1, 0.9, size=(1, 8, 8, 16)).astype(np.float32)
    other = state.copy()
    other[0, 2, 2] = 0.5
    first, second = (model.step(params, x, np.array([1]))[0][0] for x in (state, other))

    def unscaled(x):
        """Without shift and stretch, by two numbers far from the change."""
        return (x - x[7, 7, 0]) / (x[7, 7, 1] - x[7, 7, 0])

    changed = np.abs(unscaled(first) - unscaled(second)).max(axis=-1) > 1e-4
    assert changed[2, 2] and not changed[5:].any() and not changed[:, 5:].any()


def test_what_does_not_fit_is_refused():
    for field, value in (("core", "lstm"), ("norm", "batch"), ("dropout", 0.5), ("shared", True)):
        with pytest.raises(ValueError, match=field):
            learned_model(VECTOR, ONE_OF_4, NetworkConfig(**{field: value}))
    with pytest.raises(ValueError, match="one discrete choice"):
        learned_model(VECTOR, SEVERAL)
