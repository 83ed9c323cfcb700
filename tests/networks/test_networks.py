"""Torsos, observations, cores and heads, and `Network` over time."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents import AGENTS
from rlstack.agents.bc import BCConfig
from rlstack.agents.c51 import C51Config
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.iqn import IQNConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.pqn import PQNConfig
from rlstack.agents.r2d2 import R2D2Config
from rlstack.agents.sac import SACConfig
from rlstack.agents.td3 import TD3Config
from rlstack.networks import (
    AtFractions,
    ImpalaTorso,
    MLPTorso,
    NatureTorso,
    NetworkConfig,
    NoisyLinear,
    RaggedTransformerConfig,
    actor_critic,
    distributional_q_network,
    feed_forward,
    implicit_q_network,
    observation_features,
    q_network,
)
from rlstack.networks.torsos import action_mask
from tests.agent_cases import (
    FIRST,
    IMAGE,
    LAST,
    MASKED,
    MID,
    NESTED,
    ONE_OF_4,
    REAL,
    STRUCTURED,
    VECTOR,
    assert_close,
    leaves_differ,
    quick_jit,
    random_timesteps,
)

KEY = jax.random.PRNGKey(0)
SMALL = NetworkConfig(hidden_sizes=(8,), core_size=5)


@pytest.mark.parametrize(
    ("torso", "shape", "size"),
    [
        (lambda: MLPTorso((7, 5)), (3, 4), 5),
        (lambda: NatureTorso(6), (36, 36, 2), 6),
        (lambda: ImpalaTorso(6), (9, 7, 2), 6),
    ],
)
def test_torsos_give_features(torso, shape, size):
    function = hk.without_apply_rng(hk.transform(lambda x: torso()(x)))
    x = jax.random.normal(KEY, (2, *shape))
    params = quick_jit(function.init)(KEY, x)
    features = quick_jit(function.apply)(params, x)
    assert features.shape == (2, size) and features.dtype == jnp.float32
    assert np.isfinite(features).all() and leaves_differ(features[0], features[1])


def test_images_are_scaled_and_put_channels_last():
    image = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 9), np.uint8)
    first = observation_features(specs.BoundedArray((3, 8, 9), np.uint8, 0, 255), image)
    last = observation_features(
        specs.BoundedArray((8, 9, 3), np.uint8, 0, 255), np.moveaxis(image, 1, -1)
    )
    assert first.shape == (2, 8, 9, 3) and first.dtype == jnp.float32
    np.testing.assert_allclose(first, last, rtol=1e-6)
    np.testing.assert_allclose(first, np.moveaxis(image, 1, -1) / 255.0, rtol=1e-6)


def test_discrete_entries_are_one_hot_and_entries_are_joined_without_the_mask():
    np.testing.assert_array_equal(
        observation_features(specs.DiscreteArray(3), np.array([2, 0])), [[0, 0, 1], [1, 0, 0]]
    )
    place = np.arange(6, dtype=np.float32).reshape((2, 3))
    joined = observation_features(NESTED, {"flag": np.array([1, 2]), "place": place})
    np.testing.assert_array_equal(joined, [[0, 1, 0, 0, 1, 2], [0, 0, 1, 3, 4, 5]])
    masked = {"observation": place, "action_mask": np.ones((2, 4), np.int8)}
    np.testing.assert_array_equal(observation_features(MASKED, masked), place)
    assert action_mask(masked).dtype == bool
    assert action_mask(place) is None and action_mask({"place": place}) is None
    scalars = {"a": specs.Array((), np.float32), "b": specs.Array((2,), np.int32)}
    both = {"a": np.ones(2, np.float32), "b": np.array([[2, 3], [4, 5]])}
    np.testing.assert_array_equal(observation_features(scalars, both), [[1, 2, 3], [1, 4, 5]])


def steps(obs_spec, step_types):
    return random_timesteps(obs_spec, np.array(step_types, np.int32))


def run_step_by_step(network, params, timesteps, state):
    outputs, apply = [], quick_jit(network.apply)
    for t in range(len(timesteps.step_type)):
        output, state = apply(None, params, jax.tree.map(lambda x, t=t: x[t], timesteps), state)
        outputs.append(output)
    return jax.tree.map(lambda *x: np.stack(x), *outputs), state


NETWORKS = {
    "actor_critic": functools.partial(actor_critic, NESTED, STRUCTURED, SMALL),
    "image": functools.partial(
        actor_critic, IMAGE, REAL, NetworkConfig(torso="nature", hidden_sizes=(8,), shared=True)
    ),
    "q_network": functools.partial(q_network, MASKED, ONE_OF_4, SMALL),
    **{
        core: functools.partial(
            actor_critic, VECTOR, ONE_OF_4, NetworkConfig(hidden_sizes=(8,), core=core, core_size=6)
        )
        for core in ("lstm", "gru", "mingru", "s5")
    },
}
SPECS = {"actor_critic": NESTED, "image": IMAGE, "q_network": MASKED}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in ("lstm", "s5") else [pytest.mark.slow, pytest.mark.chosen]
        )
        for name in NETWORKS
    ],
)
def test_an_unroll_is_repeated_application(name):
    network = NETWORKS[name]()
    params = quick_jit(network.init)(KEY)
    timesteps = steps(SPECS.get(name, VECTOR), [[FIRST, MID], [MID, LAST], [MID, FIRST], [MID] * 2])
    state = network.initial_state(2)
    together = quick_jit(network.unroll)(None, params, timesteps, state)
    assert_close(together, run_step_by_step(network, params, timesteps, state))


@pytest.mark.parametrize("core", ["lstm", "gru", "mingru", "s5"])
def test_a_core_remembers_until_an_episode_begins(core):
    network = NETWORKS[core]()
    params = quick_jit(network.init)(KEY)
    unroll = quick_jit(network.unroll)
    timesteps = steps(VECTOR, [[MID], [LAST], [FIRST], [MID]])
    zeros = network.initial_state(1)
    other = jax.tree.map(lambda x: x + 0.5, zeros)
    outputs = [unroll(None, params, timesteps, state)[0].policy for state in (zeros, other)]
    assert leaves_differ(outputs[0][1], outputs[1][1])
    assert_close(outputs[0][2:], outputs[1][2:], atol=0, rtol=0)
    tail = jax.tree.map(lambda x: x[2:], timesteps)
    begun = unroll(None, params, tail._replace(step_type=np.ones((2, 1), np.int32)), zeros)[0]
    assert_close(begun.policy, outputs[0][2:])


def test_duelling_values_are_a_state_value_plus_mean_free_advantages():
    cfg = NetworkConfig(hidden_sizes=(8,), duelling=True)
    network = q_network(VECTOR, ONE_OF_4, cfg)
    params = network.init(KEY)
    timestep = jax.tree.map(lambda x: x[0], steps(VECTOR, [[MID] * 3]))
    values, _ = network.apply(None, params, timestep, ())
    state_value = network.apply(None, _only(params, "state_value_head"), timestep, ())[0]
    np.testing.assert_allclose(values.mean(-1), state_value[:, 0], rtol=1e-4)
    assert np.ptp(state_value, axis=-1).max() == 0
    plain = q_network(VECTOR, ONE_OF_4, NetworkConfig(hidden_sizes=(8,)))
    assert "state_value_head" not in plain.init(KEY)


def _only(params, head):
    """The params with every other head at zero."""
    return {
        name: jax.tree.map(jnp.zeros_like, x) if "head" in name and name != head else x
        for name, x in params.items()
    }


def test_noisy_layers_draw_factorised_noise_from_the_key_and_none_without():
    layer = hk.transform(lambda x: NoisyLinear(2, 0.5)(x))
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    params = layer.init(KEY, x)["noisy_linear"]
    w, b, w_sigma, b_sigma = (np.asarray(params[k]) for k in ("w", "b", "w_sigma", "b_sigma"))
    assert np.abs(w).max() <= 3**-0.5 and np.abs(b).max() <= 3**-0.5
    np.testing.assert_allclose([w_sigma.min(), b_sigma.max()], 0.5 * 3**-0.5, rtol=1e-6)
    apply = quick_jit(lambda key, x: layer.apply({"noisy_linear": params}, key, x))
    np.testing.assert_allclose(apply(None, x), x @ w + b, rtol=1e-4, atol=1e-6)
    for i in range(3):
        key = jax.random.PRNGKey(i)
        noise = apply(key, np.eye(3, dtype=np.float32)) - apply(key, np.zeros((3, 3))) - w
        bias = apply(key, np.zeros((1, 3)))[0] - b
        # The noise of the weights is an outer product with the noise of the biases.
        ratio = np.asarray(noise) / np.asarray(bias)
        np.testing.assert_allclose(ratio[:, 0], ratio[:, 1], rtol=1e-2)
        np.testing.assert_allclose(apply(key, x), x @ (w + noise) + b + bias, rtol=1e-3, atol=1e-5)
    draws = [np.asarray(apply(jax.random.PRNGKey(i), x)) for i in range(400)]
    np.testing.assert_allclose(np.mean(draws, 0), x @ w + b, atol=0.3)


@pytest.mark.slow
@pytest.mark.chosen
def test_noise_is_chosen_by_config_and_refused_where_nobody_draws_it():
    cfg = NetworkConfig(hidden_sizes=(8, 8), noisy_sigma=0.5, duelling=True)
    for network in (q_network, distributional_q_network):
        params = network(VECTOR, ONE_OF_4, cfg).init(KEY)
        assert all({"w", "b", "w_sigma", "b_sigma"} == set(module) for module in params.values())
    with pytest.raises(ValueError, match=r"actor_critic.*noisy_sigma"):
        actor_critic(VECTOR, ONE_OF_4, cfg)


@pytest.mark.parametrize("duelling", [False, True])
def test_distributional_heads_are_duelling_atom_by_atom(duelling):
    cfg = NetworkConfig(hidden_sizes=(8,), num_atoms=5, duelling=duelling)
    network = distributional_q_network(VECTOR, ONE_OF_4, cfg)
    params = network.init(KEY)
    timestep = jax.tree.map(lambda x: x[0], steps(VECTOR, [[MID] * 3]))
    outputs, _ = network.apply(None, params, timestep, ())
    assert outputs.shape == (3, 4, 5) and np.ptp(outputs, axis=1).min() > 0
    if duelling:
        state_value, _ = network.apply(None, _only(params, "state_value_head"), timestep, ())
        assert np.ptp(state_value, axis=1).max() == 0
        np.testing.assert_allclose(outputs.mean(1), state_value[:, 0], rtol=1e-3, atol=1e-5)


def test_an_implicit_network_answers_each_fraction_by_itself_by_equation_4():
    cfg = NetworkConfig(hidden_sizes=(8,), num_cosines=6, activation="relu")
    network = implicit_q_network(MASKED, ONE_OF_4, cfg)
    params = network.init(KEY)
    timestep = jax.tree.map(lambda x: x[0], steps(MASKED, [[MID] * 2]))
    fractions = np.array([[0.1, 0.5, 0.9], [0.5, 0.2, 1.0]], np.float32)

    def apply(fractions):
        asked = timestep._replace(observation=AtFractions(timestep.observation, fractions))
        return np.asarray(network.apply(None, params, asked, ())[0])

    together = apply(fractions)
    assert together.shape == (2, 4, 3)
    np.testing.assert_allclose(apply(fractions[:, 1:2])[..., 0], together[..., 1], rtol=1e-4)

    def dense(name, x):
        module = params[name]
        return x @ np.asarray(module["w"]) + np.asarray(module["b"])

    x = timestep.observation["observation"][1]
    features = np.maximum(dense("torso/linear", x), 0)
    cosines = np.cos(np.pi * np.arange(6) * 0.2)
    product = features * np.maximum(dense("fraction_embedding", cosines), 0)
    expected = dense("value_head", np.maximum(dense("quantile_layer", product), 0))
    np.testing.assert_allclose(together[1, :, 1], expected, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match=r"implicit_q_network.*feed-forward"):
        implicit_q_network(VECTOR, ONE_OF_4, NetworkConfig(core="gru"))


def test_modules_have_the_names_that_optimizers_go_by():
    def modules(network):
        return {part for name in network.init(KEY) for part in name.split("/")}

    assert {"policy_torso", "value_torso", "policy_head", "value_head"} <= modules(
        actor_critic(VECTOR, ONE_OF_4, SMALL)
    )
    shared = modules(actor_critic(VECTOR, ONE_OF_4, NetworkConfig(hidden_sizes=(8,), shared=True)))
    assert {"torso", "policy_head", "value_head"} <= shared and "policy_torso" not in shared
    assert {"torso", "core", "policy_head", "value_head"} <= modules(NETWORKS["gru"]())


def test_the_first_policy_is_near_uniform_and_its_log_std_is_zero():
    network = NETWORKS["actor_critic"]()
    params = network.init(KEY)
    timestep = jax.tree.map(lambda x: x[0], steps(NESTED, [[MID] * 3]))
    output, _ = network.apply(None, params, timestep, ())
    assert output.policy.shape == (3, 2 * 2 + 3) and output.value.shape == (3,)
    np.testing.assert_allclose(output.policy, 0, atol=0.1)
    np.testing.assert_array_equal(output.policy[:, 2:4], 0)


def test_a_users_haiku_function_is_a_network():
    network = feed_forward(lambda observation: hk.nets.MLP([4, 2])(observation), VECTOR)
    params = network.init(KEY)
    timesteps = steps(VECTOR, [[MID] * 3] * 2)
    output, state = network.unroll(None, params, timesteps, ())
    assert output.shape == (2, 3, 2) and state == () and network.initial_state(3) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_sizes": ()},
        {"hidden_sizes": (0,)},
        {"core_size": 0},
        {"noisy_sigma": -1.0},
        {"num_atoms": 1},
        {"num_cosines": 0},
        {"torso": "resnet"},
        {"core": "rnn"},
        {"activation": "none"},
    ],
)
def test_configs_that_name_nothing_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        NetworkConfig(**changes)


# What the networks of each agent never read.
IGNORED = [
    (DQNConfig, ONE_OF_4, ["shared", "critic_input", "num_atoms", "num_cosines", "entities"]),
    (R2D2Config, ONE_OF_4, ["noisy_sigma", "shared", "policy_log_std", "num_atoms"]),
    (PQNConfig, ONE_OF_4, ["noisy_sigma", "shared", "policy_log_std", "num_atoms"]),
    (C51Config, ONE_OF_4, ["shared", "critic_input", "num_cosines", "policy_log_std"]),
    (IQNConfig, ONE_OF_4, ["shared", "critic_input", "num_atoms", "policy_log_std", "core"]),
    (PPOConfig, ONE_OF_4, ["duelling", "noisy_sigma", "num_atoms", "num_cosines", "entities"]),
    (PPOConfig, ONE_OF_4, ["policy_log_std", "critic_input"]),
    (BCConfig, ONE_OF_4, ["shared", "critic_input", "duelling", "noisy_sigma"]),
    (SACConfig, REAL, ["shared", "duelling", "noisy_sigma", "num_atoms", "policy_log_std"]),
    (SACConfig, ONE_OF_4, ["shared", "noisy_sigma", "num_atoms", "policy_log_std", "core"]),
    (TD3Config, REAL, ["shared", "critic_input", "duelling", "noisy_sigma", "entities", "core"]),
]
GIVEN = {
    "shared": True,
    "critic_input": "state",
    "duelling": True,
    "noisy_sigma": 0.5,
    "num_atoms": 7,
    "num_cosines": 8,
    "policy_log_std": -1.0,
    "core": "lstm",
    "entities": RaggedTransformerConfig(d_model=8),
}


@pytest.mark.parametrize(
    ("agent", "action", "field"), [(a, b, field) for a, b, fields in IGNORED for field in fields]
)
def test_an_option_that_a_network_would_ignore_is_refused(agent, action, field):
    cfg = NetworkConfig(**{field: GIVEN[field]})
    with pytest.raises(ValueError, match=field):
        AGENTS[agent].network(VECTOR, action, cfg=cfg)
    AGENTS[agent].network(VECTOR, action, cfg=NetworkConfig())
