"""Norms, dropout, skips and layers of cores, by hand; and the two modes of networks with state."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.networks import (
    BatchNorm,
    CriticInput,
    NetworkConfig,
    SpectralLinear,
    actor_critic,
    deterministic_policy_and_critic,
    ensemble,
    network_with_state,
    q_network,
)
from rlstack.networks.layers.dense import Block, dense
from rlstack.stateful_params import (
    StatefulParams,
    TrainingParams,
    evaluating,
    is_stateful,
    moved_towards,
    training,
    weights_of,
    with_weights,
)
from tests.agent_cases import (
    ENTITIES,
    FIRST,
    IMAGE,
    MID,
    ONE_OF_4,
    REAL,
    VECTOR,
    assert_close,
    quick_jit,
    random_timesteps,
)
from tests.networks import ragged_cases

KEY = jax.random.PRNGKey(0)
_LATER = [pytest.mark.slow, pytest.mark.chosen]
X = np.array([[1.0, -2.0], [3.0, 2.0], [8.0, 3.0]], np.float32)
SMALL = NetworkConfig(hidden_sizes=(4,))
with_options = functools.partial(dataclasses.replace, SMALL)


def test_batch_norm_by_hand():
    norm = hk.transform_with_state(lambda x, learns: BatchNorm(decay=0.75, eps=0.0)(x, learns))
    params, state = norm.init(KEY, X, True)
    assert_close(norm.apply(params, state, None, X, False)[0], X)  # mean 0 and variance 1 so far
    learned, after = norm.apply(params, state, None, X, True)
    mean, variance = X.mean(axis=0), X.var(axis=0)
    assert_close(learned, (X - mean) / np.sqrt(variance))
    assert_close(after["batch_norm"], {"count": 1, "mean": mean, "variance": variance})
    state = {"batch_norm": {**after["batch_norm"], "count": jnp.array(9), "mean": jnp.zeros(2)}}
    _, after = norm.apply(params, state, None, X, True)
    kept = after["batch_norm"]
    assert_close(kept, {"count": 10, "mean": 0.25 * mean, "variance": variance})
    acted, same = norm.apply(params, after, None, X[:1], False)
    assert_close(acted, (X[:1] - kept["mean"]) / np.sqrt(kept["variance"]))
    assert_close(same, after, atol=0, rtol=0)


def test_renormalised_outputs_are_those_of_evaluation_with_the_gradients_of_the_batch():
    norm = hk.transform_with_state(lambda x, learns: BatchNorm(0.5, renorm=True)(x, learns))
    params, state = norm.init(KEY, X, True)
    state = {
        "batch_norm": {
            "count": jnp.array(1),
            "mean": jnp.array([3.0, 0.0]),
            "variance": jnp.array([8.0, 6.0]),
        }
    }
    for x in (X, X / 100, X + 50):  # also for rows that are alike, and for those that are far
        outputs = [norm.apply(params, state, None, x, learns)[0] for learns in (True, False)]
        assert_close(*outputs, atol=1e-3)

    def squares(x, learns):
        return (norm.apply(params, state, None, x, learns)[0] ** 2).sum()

    # The output does not change if the whole batch moves, as with plain batch norm.
    assert_close(jax.grad(squares)(X, True).sum(axis=0), np.zeros(2), atol=1e-4)
    assert np.abs(jax.grad(squares)(X, False).sum(axis=0)).min() > 0.1


def test_spectral_norm_makes_the_largest_singular_value_1():
    layer = hk.transform_with_state(lambda x, learns: SpectralLinear(3, is_training=learns)(x))
    params, state = layer.init(KEY, X, True)
    learn = quick_jit(lambda state: layer.apply(params, state, None, X, True)[1])
    for _ in range(30):
        state = learn(state)
    matrix = layer.apply(params, state, None, np.eye(2, dtype=np.float32), False)[0]
    assert_close(np.linalg.svd(matrix)[1].max(), np.float32(1), atol=1e-3)
    same = layer.apply(params, state, None, X, False)[1]
    assert_close(same, state, atol=0, rtol=0)


def test_a_layer_drops_and_scales_only_in_training():
    x = np.ones((200, 50), np.float32)

    def forward(x, is_training):
        return dense(x, 20, jax.nn.softplus, Block(dropout=0.25), is_training)

    layer = hk.transform(forward)
    params = layer.init(KEY, x, True)
    plain, dropped = (layer.apply(params, KEY, x, learns) for learns in (False, True))
    kept = np.asarray(dropped) != 0
    assert abs(kept.mean() - 0.75) < 0.03
    assert_close(np.where(kept, plain / 0.75, 0), dropped)


def test_a_skip_adds_the_input_or_its_projection():
    for size in (2, 3):
        layer = hk.transform(lambda x, size=size: dense(x, size, jnp.tanh, Block(skip=True)))
        params = layer.init(KEY, X)
        plain = np.tanh(X @ params["linear"]["w"])
        skipped = X if size == 2 else X @ params["skip"]["w"]
        assert_close(layer.apply(params, None, X), plain + skipped)


def test_networks_without_state_keep_their_params():
    network = q_network(VECTOR, ONE_OF_4, SMALL)
    params = quick_jit(network.init)(KEY)
    assert network.new_state is None and not is_stateful(params)
    assert set(params) == {"torso/linear", "value_head"}
    assert jax.tree.leaves(training(KEY, params))[0] is jax.tree.leaves(params)[0]
    normed = q_network(VECTOR, ONE_OF_4, with_options(norm="layer", skip=True))
    normed = jax.eval_shape(normed.init, KEY)
    assert set(normed) == {"torso/linear", "torso/layer_norm", "torso/skip", "value_head"}


@pytest.mark.parametrize(
    ("cfg", "spec"),
    [
        (with_options(norm="batch", dropout=0.5), VECTOR),
        pytest.param(
            with_options(spectral_norm=True, dropout=0.5, core="lstm", core_layers=2),
            VECTOR,
            marks=_LATER,
        ),
        pytest.param(
            with_options(norm="batch_renorm", dropout=0.5, torso="nature"), IMAGE, marks=_LATER
        ),
    ],
)
def test_only_params_in_training_mode_drop_units_and_change_state(cfg, spec):
    network = actor_critic(spec, ONE_OF_4, cfg)
    params = quick_jit(network.init)(KEY)
    assert isinstance(params, StatefulParams)
    timestep = random_timesteps(spec, np.full((2, 3), MID))
    state = network.initial_state(3)
    learned = training(KEY, params)
    assert isinstance(learned, TrainingParams)
    unroll = quick_jit(network.unroll)
    outputs = [unroll(key, params, timestep, state)[0].policy for key in (None, KEY)]
    assert_close(*outputs, atol=0, rtol=0)
    again = unroll(None, evaluating(learned), timestep, state)[0].policy
    assert_close(again, outputs[0], atol=0, rtol=0)
    first, same = (unroll(None, learned, timestep, state)[0].policy for _ in range(2))
    other = unroll(None, training(KEY, params, 1), timestep, state)[0].policy
    assert_close(first, same, atol=0, rtol=0)
    assert np.abs(first - other).max() > 0 and np.abs(first - outputs[0]).max() > 0
    new = quick_jit(network.new_state)(learned, timestep, state)
    assert jax.tree.structure(new) == jax.tree.structure(params.state)
    changes = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), new, params.state)
    assert any(change > 0 for change in jax.tree.leaves(changes))


def test_cores_have_layers():
    network = actor_critic(VECTOR, ONE_OF_4, with_options(core="gru", core_size=5, core_layers=2))
    assert [x.shape for x in jax.tree.leaves(network.initial_state(3))] == [(3, 5), (3, 5)]
    timestep = random_timesteps(VECTOR, [FIRST, MID, MID])
    params = quick_jit(network.init)(KEY)
    _, state = quick_jit(network.apply)(None, params, timestep, network.initial_state(3))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(state))


def test_critics_of_an_ensemble_have_states_and_draws_of_their_own():
    cfg = with_options(norm="batch", dropout=0.5)
    critics = ensemble(deterministic_policy_and_critic(VECTOR, REAL, cfg).critic, 2)
    params = quick_jit(critics.init)(KEY)
    same = jax.tree.map(lambda x: jnp.stack([x[0], x[0]]), params)
    timestep = random_timesteps(VECTOR, np.full((1, 6), MID))
    actions = np.zeros((1, 6, 2), np.float32)
    timestep = timestep._replace(observation=CriticInput(timestep.observation, actions))
    values, _ = quick_jit(critics.unroll)(None, training(KEY, same), timestep, ())
    assert np.abs(values[..., 0] - values[..., 1]).max() > 0  # different units are dropped
    new = quick_jit(critics.new_state)(training(KEY, params), timestep, ())
    assert all(x.shape[0] == 2 for x in jax.tree.leaves(new))


def test_params_of_any_structure_are_taken_apart_and_put_together():
    params = {"a": StatefulParams({"w": jnp.ones(2)}, {"count": jnp.array(3)}), "b": jnp.zeros(1)}
    weights = weights_of(params)
    assert jax.tree.structure(weights) == jax.tree.structure({"a": {"w": 0}, "b": 0})
    doubled = with_weights(params, jax.tree.map(lambda x: 2 * x, weights))
    assert doubled["a"].weights["w"].tolist() == [2, 2] and doubled["a"].state["count"] == 3
    learned = training(KEY, {**params, "c": params["a"]})
    assert learned["a"].rng_key.tolist() != learned["c"].rng_key.tolist()
    target = moved_towards(doubled, {**params, "b": jnp.ones(1)}, 0.25)
    assert target["a"].weights["w"].tolist() == [1.25, 1.25] and target["b"].tolist() == [0.75]
    counter = target["a"].state["count"]  # counters are copied, and stay integers
    assert counter == 3 and counter.dtype == params["a"].state["count"].dtype


def test_a_network_of_plain_functions_has_a_state():
    def init(rng_key, observation):
        return {"w": jnp.ones((observation.shape[-1], 4))}, {"count": jnp.zeros((), jnp.int32)}

    def apply(weights, state, rng_key, observation, is_training):
        return observation @ weights["w"], {"count": state["count"] + is_training}

    network = network_with_state(init, apply, VECTOR)
    params = network.init(KEY)
    timestep = random_timesteps(VECTOR, np.full((2, 3), MID))
    assert network.unroll(None, params, timestep, ())[0].shape == (2, 3, 4)
    assert network.new_state(training(KEY, params), timestep, ())["count"] == 1


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"noisy_sigma": 0.5, "dropout": 0.1}, "noisy_sigma must be 0 with"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"norm": "group"}, "norm must be one of"),
        ({"core_layers": 0}, "core_layers must be at least 1"),
        ({"batch_norm_decay": 1.0}, "batch_norm_decay must be in"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, hint):
    with pytest.raises(ValueError, match=hint):
        with_options(**options)


def test_entities_have_no_dense_blocks():
    with pytest.raises(ValueError, match="dropout must be 0"):
        actor_critic(ENTITIES, ragged_cases.CODEC.action_spec, with_options(dropout=0.1))
