"""Residual blocks, the sphere, places of norms, and critics with options of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlstack.networks import (
    CriticConfig,
    CriticInput,
    NetworkConfig,
    actor_critic,
    policy_and_critic,
    policy_and_distributional_critic,
    q_network,
)
from rlstack.networks.layers.dense import mish
from rlstack.optimizers import OptimizerConfig, component_optimizer, optimizer_step
from rlstack.stateful_params import training
from rlstack.types import TimeStep
from tests.agent_cases import (
    FIRST,
    MID,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    assert_close,
    quick_jit,
    random_timesteps,
)

KEY = jax.random.PRNGKey(2)


def run(network, step, params=None):
    params = quick_jit(network.init)(KEY) if params is None else params
    return params, quick_jit(network.apply)(None, params, step, network.initial_state(5))[0]


def steps(rows=5):
    return random_timesteps(VECTOR, np.full(rows, MID))


def to_numpy(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def rms_norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def test_mish_and_its_gradient_are_those_of_the_paper():
    x = np.array([-100, -20, -5, -1, 0, 0.5, 3, 19, 25, 100], np.float32)
    wide = x.astype(np.float64)
    squashed = np.tanh(np.logaddexp(0, wide))
    np.testing.assert_allclose(mish(x), wide * squashed, rtol=1e-6, atol=1e-30)
    slope = squashed + wide * (1 - squashed**2) / (1 + np.exp(-wide))
    np.testing.assert_allclose(jax.vmap(jax.grad(mish))(x), slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("norm", "by_hand"), [("layer", layer_norm), ("rms", rms_norm)])
def test_residual_blocks_by_hand(norm, by_hand):
    cfg = NetworkConfig(torso="residual", hidden_sizes=(6, 6), activation="relu", norm=norm)
    step = steps()
    params, values = run(q_network(VECTOR, ONE_OF_4, cfg), step)
    layers = to_numpy(params)
    assert layers["torso/linear_1"]["w"].shape == (6, 24)  # four times as many units inside

    def linear(name, x):
        return x @ layers[name]["w"] + layers[name]["b"]

    x = linear("torso/linear", step.observation)
    for inner, outer in ((1, 2), (3, 4)):
        hidden = np.maximum(linear(f"torso/linear_{inner}", by_hand(x)), 0)
        x = x + linear(f"torso/linear_{outer}", hidden)
    np.testing.assert_allclose(values, linear("value_head", by_hand(x)), rtol=1e-4, atol=1e-5)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_the_sphere_by_hand():
    cfg = NetworkConfig(torso="sphere", hidden_sizes=(6, 6))
    step = steps()
    params, values = run(q_network(VECTOR, ONE_OF_4, cfg), step)
    layers = to_numpy(params)
    for name, module in layers.items():
        if "unit_w" in module:
            np.testing.assert_allclose(np.linalg.norm(module["unit_w"], axis=0), 1, rtol=1e-5)
        assert "w" not in module, name

    def number(i):
        return f"_{i}" if i else ""

    def linear(i, x):
        return x @ layers[f"torso/unit_linear{number(i)}"]["unit_w"]

    scale = np.sqrt(2 / 6)  # the initial factors
    x = unit(np.concatenate([step.observation, np.full((5, 1), 3.0)], -1))
    x = unit(scale * linear(0, x))
    for block in (0, 1):
        hidden = np.maximum(scale / 2 * linear(1 + 2 * block, x), 0)
        y = unit(linear(2 + 2 * block, hidden))
        x = unit(x + (y - x) / 3)
    first, last = (layers[f"value_head/unit_linear{number(i)}"]["unit_w"] for i in (0, 1))
    assert first.shape == (6, 6)
    np.testing.assert_allclose(values, x @ first @ last, rtol=1e-4, atol=1e-5)
    factors = params["torso/step"]["scale"]
    np.testing.assert_allclose(factors, 1 / np.sqrt(6), rtol=1e-6)  # they stand for 1 / 3


def test_an_optimizer_step_keeps_weights_on_the_sphere_and_leaves_others_alone():
    params = {
        "sphere": {"unit_w": jnp.array([[[3.0, 0.0], [4.0, 1.0]]]), "b": jnp.array([2.0, 0.0])}
    }
    grads = jax.tree.map(jnp.zeros_like, params)
    grads["sphere"]["unit_w"] = grads["sphere"]["unit_w"].at[0, 0, 1].set(-1.0)
    for optimizer in (
        optax.sgd(1.0),
        component_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0), {}, 0.0),
    ):
        after, *_ = optimizer_step(optimizer, params, optimizer.init(params), grads)
        half = np.sqrt(0.5)
        expected = [[[0.6, half], [0.8, half]]]  # each output has the norm 1, in each member
        np.testing.assert_allclose(after["sphere"]["unit_w"], expected, rtol=1e-6)
        np.testing.assert_array_equal(after["sphere"]["b"], [2.0, 0.0])


def test_params_may_be_a_single_array():
    optimizer = optax.sgd(0.5)
    after, *_ = optimizer_step(optimizer, jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.ones(2))
    np.testing.assert_array_equal(after, [0.5, 0.5])


def test_an_outer_norm_is_of_the_input_and_of_each_output():
    cfg = NetworkConfig(hidden_sizes=(6,), activation="relu", norm="layer", norm_place="outer")
    step = steps()
    params, values = run(q_network(VECTOR, ONE_OF_4, cfg), step)
    layers = to_numpy(params)
    x = layer_norm(step.observation)
    x = np.maximum(x @ layers["torso/linear"]["w"] + layers["torso/linear"]["b"], 0)
    expected = layer_norm(x) @ layers["value_head"]["w"] + layers["value_head"]["b"]
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_batch_renorm_is_batch_norm_at_first_and_has_limits_later():
    cfg = NetworkConfig(
        hidden_sizes=(1,),
        activation="relu",
        norm="batch_renorm",
        renorm_after=2,
        norm_place="outer",
    )
    network = q_network(VECTOR, ONE_OF_4, cfg)
    params = quick_jit(network.init)(KEY)
    name = "torso/batch_norm"
    mean, variance = np.array([0.0, 1.0, -30.0]), np.array([1.0, 100.0, 0.01])
    rng = np.random.default_rng(0)
    step = TimeStep(
        np.full(64, MID), np.zeros(64), np.ones(64), rng.normal(size=(64, 3)).astype(np.float32)
    )
    x = step.observation
    plain = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    deviation = np.sqrt(variance + 1e-5)
    ratio = np.clip(np.sqrt(x.var(0) + 1e-5) / deviation, 1 / 3, 3)
    shift = np.clip((x.mean(0) - mean) / deviation, -5, 5)
    assert ratio[1] == 1 / 3 and ratio[2] == 3 and shift[2] == 5  # the limits matter
    for count, normed in ((1, plain), (2, plain * ratio + shift)):
        state = {
            **params.state,
            name: {
                "mean": mean.astype(np.float32),
                "variance": variance.astype(np.float32),
                "count": np.int32(count),
            },
        }
        learned = training(KEY, params._replace(state=state))
        values = quick_jit(network.apply)(None, learned, step, ())[0]
        weights = to_numpy(params.weights)
        hidden = np.maximum(normed @ weights["torso/linear"]["w"], 0)
        hidden = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)  # its count is 0
        np.testing.assert_allclose(
            values, hidden @ weights["value_head"]["w"], rtol=1e-3, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.chosen
def test_policy_and_critic_have_options_of_their_own():
    critic = CriticConfig(hidden_sizes=(12, 10, 8), norm="layer", dropout=0.1, activation="silu")
    cfg = NetworkConfig(hidden_sizes=(5,), activation="relu", critic=critic)
    both = policy_and_critic(VECTOR, UNEVEN, cfg)
    plain = policy_and_critic(VECTOR, UNEVEN, dataclasses.replace(cfg, critic=CriticConfig()))
    assert both.policy.new_state is None and both.critic.new_state is not None
    assert_close(both.policy.init(KEY), plain.policy.init(KEY), atol=0, rtol=0)
    weights = both.critic.init(KEY).weights
    assert [weights[f"torso/linear{i}"]["w"].shape for i in ("", "_1", "_2")] == [
        (5, 12),
        (12, 10),
        (10, 8),
    ]
    assert "torso/layer_norm_2" in weights
    discrete = policy_and_critic(VECTOR, ONE_OF_4, cfg).critic.init(KEY).weights
    assert discrete["value_head"]["w"].shape == (8, 4)


def test_critics_may_give_several_numbers_for_an_action():
    cfg = NetworkConfig(hidden_sizes=(5,), num_atoms=7)
    step, action = steps(), np.zeros((5, 2), np.float32)
    critic = policy_and_distributional_critic(VECTOR, UNEVEN, cfg).critic
    seen = step._replace(observation=CriticInput(step.observation, action))
    assert run(critic, seen)[1].shape == (5, 7)
    critic = policy_and_distributional_critic(VECTOR, ONE_OF_4, cfg).critic
    assert run(critic, step)[1].shape == (5, 4, 7)
    with pytest.raises(ValueError, match="num_atoms"):
        policy_and_critic(VECTOR, UNEVEN, cfg)


def test_a_value_network_of_its_own_beside_a_policy():
    critic = CriticConfig(hidden_sizes=(12,), norm="rms")
    cfg = NetworkConfig(hidden_sizes=(5,), critic=critic)
    step = steps()
    params, output = run(actor_critic(VECTOR, ONE_OF_4, cfg), step)
    assert params["policy_torso/linear"]["w"].shape == (3, 5)
    assert params["value_torso/linear"]["w"].shape == (3, 12)
    plain, _ = run(
        actor_critic(VECTOR, ONE_OF_4, dataclasses.replace(cfg, critic=CriticConfig())), step
    )
    assert plain.keys() == params.keys() - {"value_torso/rms_norm"}
    layers = to_numpy(params)
    hidden = layers["value_torso/linear"]
    hidden = np.tanh(rms_norm(step.observation @ hidden["w"] + hidden["b"]))
    head = layers["value_head"]
    np.testing.assert_allclose(
        output.value, (hidden @ head["w"] + head["b"])[:, 0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("core", "own", "modules"),
    [
        ("gru", "lstm", {"cores/~/core", "cores/~/value_core/linear"}),
        ("gru", "none", {"core"}),
        ("none", "gru", {"cores/~/value_core"}),
    ],
)
def test_policy_and_value_may_have_cores_of_their_own(core, own, modules):
    cfg = NetworkConfig(
        hidden_sizes=(5,), core=core, core_size=4, critic=CriticConfig(core=own, core_size=3)
    )
    network = actor_critic(VECTOR, ONE_OF_4, cfg)
    params = quick_jit(network.init)(KEY)
    assert modules == {name for name in params if "core" in name}
    unroll = random_timesteps(VECTOR, np.array([[MID] * 5, [FIRST, *[MID] * 4], [MID] * 5]))
    state = network.initial_state(5)
    whole, last = quick_jit(network.unroll)(None, params, unroll, state)
    for t in range(3):  # step by step, as in acting
        step = jax.tree.map(lambda x, t=t: x[t], unroll)
        if t == 1:
            fresh = network.initial_state(5)
            state = jax.tree.map(lambda new, old: old.at[0].set(new[0]), fresh, state)
        output, state = quick_jit(network.apply)(None, params, step, state)
        assert_close(output, jax.tree.map(lambda x, t=t: x[t], whole))
    assert_close(state, last)
    later = jax.tree.map(lambda x: x, unroll)
    later.observation[0, 1] += 1.0
    changed, _ = quick_jit(network.unroll)(None, params, later, network.initial_state(5))
    pairs = zip(changed, whole, strict=True)
    remembers = [np.abs(np.asarray(x - y)[2, 1]).max() > 0 for x, y in pairs]
    assert remembers == [core != "none", own != "none"]


@pytest.mark.slow
@pytest.mark.chosen
def test_a_critic_computes_in_its_own_precision():
    step = steps()
    for low in ("policy", "critic"):
        dtypes = ("bfloat16", None) if low == "policy" else ("float32", "bfloat16")
        critic = CriticConfig(hidden_sizes=(7,), dtype=dtypes[1] or "float32")
        cfg = NetworkConfig(hidden_sizes=(7,), dtype=dtypes[0], critic=critic)
        exact = dataclasses.replace(cfg, dtype="float32", critic=CriticConfig(hidden_sizes=(7,)))
        with jax.disable_jit():  # older versions of XLA keep more precision than asked for
            params, output = run(actor_critic(VECTOR, ONE_OF_4, cfg), step)
            _, expected = run(actor_critic(VECTOR, ONE_OF_4, exact), step, params)
        off = [
            np.abs(np.asarray(x - y)).max() > 1e-6 for x, y in zip(output, expected, strict=True)
        ]
        assert off == [low == "policy", low == "critic"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"torso": "sphere", "hidden_sizes": (4, 8)}, "hidden_sizes must be equal sizes"),
        ({"torso": "sphere", "norm": "layer"}, "norm must be none"),
        ({"torso": "residual", "skip": True}, "skip must be False"),
        ({"critic": CriticConfig(hidden_sizes=())}, "hidden_sizes"),
        ({"critic": CriticConfig(dropout=1.0)}, "dropout"),
        ({"renorm_after": -1}, "renorm_after"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        NetworkConfig(**options)


def test_networks_refuse_a_critic_that_they_do_not_have():
    own = CriticConfig(hidden_sizes=(8,))
    with pytest.raises(ValueError, match="critic must be"):
        q_network(VECTOR, ONE_OF_4, NetworkConfig(critic=own))
    with pytest.raises(ValueError, match="shared must be False"):
        actor_critic(VECTOR, ONE_OF_4, NetworkConfig(critic=own, shared=True))
    with pytest.raises(ValueError, match="core='gru'"):
        policy_and_critic(VECTOR, UNEVEN, NetworkConfig(critic=CriticConfig(core="gru")))


def test_convolutions_of_either_network_are_seen():
    assert not NetworkConfig(torso="sphere", critic=CriticConfig(torso="residual")).convolves
    assert NetworkConfig(critic=CriticConfig(torso="nature")).convolves
    assert NetworkConfig(torso="impala").convolves
