"""Networks of seats for joint rows, and mixers: by hand, and against one seat at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.checks import ActionKindError
from rlstack.networks import NetworkConfig, q_network
from rlstack.networks.seats import (
    monotonic_mixer,
    one_for_each_seat,
    seat_q_network,
    seat_specs,
    seen_by_seats,
    shared_by_seats,
    state_of_game,
    sum_mixer,
)
from rlstack.types import TimeStep
from tests.agent_cases import assert_close, quick_jit

OBSERVATION = {
    "kind": specs.BoundedArray((3,), np.int32, 0, 1),
    "observation": specs.Array((3, 2), np.float32),
    "critic_state": specs.Array((4,), np.float32),
    "action_mask": specs.BoundedArray((3, 5), np.int8, 0, 1),
}
CHOICES = specs.BoundedArray((3,), np.int32, 0, 4)
_LATER = [pytest.mark.slow, pytest.mark.chosen]
GRU = NetworkConfig(hidden_sizes=(8,), core="gru", core_size=6)


def steps(leading, seed=0):
    rng = np.random.default_rng(seed)
    observation = {
        "kind": rng.integers(0, 2, (*leading, 3)).astype(np.int32),
        "observation": rng.normal(size=(*leading, 3, 2)).astype(np.float32),
        "critic_state": rng.normal(size=(*leading, 4)).astype(np.float32),
        "action_mask": np.ones((*leading, 3, 5), np.int8),
    }
    kinds = np.ones(leading, np.int32)
    kinds.flat[-1] = 0
    return TimeStep(kinds, np.zeros(leading, np.float32), np.ones(leading, np.float32), observation)


def test_the_specs_of_a_seat():
    one = seat_specs(OBSERVATION, CHOICES, "test")
    assert one.number == 3
    assert one.action == specs.DiscreteArray(5, np.int32)
    assert one.observation["kind"] == specs.DiscreteArray(2, np.int32)
    assert one.observation["observation"].shape == (2,)
    assert one.observation["seat"] == specs.DiscreteArray(3, np.int32, "seat")
    assert "critic_state" not in one.observation
    moves = specs.BoundedArray((3, 2), np.float32, -1.0, 1.0)
    assert seat_specs(specs.Array((3, 7), np.float32), moves, "test").action.shape == (2,)


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (OBSERVATION, specs.DiscreteArray(5)),
        (OBSERVATION, specs.BoundedArray((3,), np.int32, 0, [4, 4, 5])),
        (OBSERVATION, specs.BoundedArray((3,), np.int32, 1, 4)),
        (OBSERVATION, specs.BoundedArray((3,), np.float32, 0.0, 1.0)),
        (specs.Array((2, 7), np.float32), CHOICES),
        (specs.Array((), np.float32), CHOICES),
    ],
)
def test_other_specs_are_told(observation, action):
    with pytest.raises(ActionKindError, match="test: the action must be that of all seats"):
        seat_specs(observation, action, "test")


def of_seat(timestep, seat):
    """The steps of one seat, with a time axis or without."""
    seen = {
        name: x[..., seat, :] if x.ndim > timestep.step_type.ndim + 1 else x[..., seat]
        for name, x in timestep.observation.items()
        if name != "critic_state"
    }
    seen["seat"] = np.full(timestep.step_type.shape, seat, np.int32)
    return timestep._replace(observation=seen)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "cfg",
    [
        pytest.param(NetworkConfig(hidden_sizes=(8,)), marks=_LATER, id="plain"),
        pytest.param(GRU, id="gru"),
    ],
)
def test_a_shared_network_gives_each_seat_what_it_gives_it_alone(cfg):
    one = seat_specs(OBSERVATION, CHOICES, "test")
    alone, network = q_network(one.observation, one.action, cfg), None
    network = shared_by_seats(alone, 3)
    params = network.init(jax.random.PRNGKey(0))
    state = jax.tree.map(lambda x: x + 0.1, network.initial_state(2))
    assert all(x.shape[:2] == (2, 3) for x in jax.tree.leaves(state))
    for run, own, leading in (
        (network.apply, alone.apply, (2,)),
        (network.unroll, alone.unroll, (4, 2)),
    ):
        timestep = steps(leading)
        values, after = quick_jit(run)(None, params, timestep, state)
        assert values.shape == (*leading, 3, 5)
        for seat in range(3):
            mine = jax.tree.map(lambda x, seat=seat: x[:, seat], state)
            expected = quick_jit(own)(None, params, of_seat(timestep, seat), mine)
            found = values[..., seat, :], jax.tree.map(lambda x, s=seat: x[:, s], after)
            assert_close(found, expected)


def test_networks_of_their_own_have_own_params():
    one = seat_specs(OBSERVATION, CHOICES, "test")
    alone = q_network(one.observation, one.action, NetworkConfig(hidden_sizes=(8,)))
    network = one_for_each_seat(alone, 3)
    params = network.init(jax.random.PRNGKey(0))
    for run, own, leading in (
        (network.apply, alone.apply, (2,)),
        (network.unroll, alone.unroll, (4, 2)),
    ):
        timestep = steps(leading)
        values, _ = quick_jit(run)(None, params, timestep, ())
        for seat in range(3):
            mine = jax.tree.map(lambda x, seat=seat: x[seat], params)
            expected, _ = quick_jit(own)(None, mine, of_seat(timestep, seat), ())
            np.testing.assert_allclose(values[..., seat, :], expected, atol=1e-5)


def test_a_number_that_seats_already_see_is_kept():
    timestep = TimeStep(np.ones(1, np.int32), (), (), {"seat": np.array([[2, 1, 0]], np.int32)})
    np.testing.assert_array_equal(seen_by_seats(timestep, 3)["seat"], [[2, 1, 0]])


def test_the_state_of_a_game_is_that_of_the_game_or_all_observations():
    timestep = steps((4, 2))
    found = state_of_game(OBSERVATION, timestep)
    np.testing.assert_array_equal(found, timestep.observation["critic_state"])
    seen = {k: v for k, v in timestep.observation.items() if k != "critic_state"}
    spec = {k: v for k, v in OBSERVATION.items() if k != "critic_state"}
    found = state_of_game(spec, timestep._replace(observation=seen))
    assert found.shape == (4, 2, 3 + 6)  # without the masks
    np.testing.assert_array_equal(found[..., 3:], seen["observation"].reshape(4, 2, 6))


def test_the_sum_is_the_sum():
    mixer = sum_mixer()
    values = jnp.array([[1.0, 2.0, -4.0], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(mixer.apply({}, values, jnp.zeros((2, 1))), [-1, 1])


@pytest.mark.parametrize("hyper_size", [0, 6])
def test_the_mixing_network_in_numpy_never_falls_with_a_value(hyper_size):
    mixer = monotonic_mixer(3, 4, hyper_size)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: mixer.init(key, 5), jax.random.PRNGKey(1))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    values, state = rng.normal(size=(50, 3)), rng.normal(size=(50, 5))

    def layer(name, x):
        return x @ np.asarray(params[name]["w"], np.float64) + np.asarray(params[name]["b"])

    def weights(name):
        hidden = np.maximum(layer(f"{name}_hidden", state), 0) if hyper_size else state
        return np.abs(layer(name, hidden))

    first = weights("mixer_first").reshape(50, 3, 4)
    x = np.einsum("bs,bsh->bh", values, first) + layer("mixer_bias", state)
    hidden = np.where(x > 0, x, np.expm1(x))
    value = layer("mixer_value", np.maximum(layer("mixer_value_hidden", state), 0))[:, 0]
    expected = (hidden * weights("mixer_last")).sum(1) + value
    one = values.astype(np.float32), state.astype(np.float32)
    found = quick_jit(mixer.apply)(params, *one)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    slopes = quick_jit(jax.grad(lambda v, s: mixer.apply(params, v, s).sum()))(*one)
    assert (slopes >= 0).all()
    assert (slopes > 0).any()


def test_the_factory_builds_the_values_of_seats():
    network = seat_q_network(OBSERVATION, CHOICES, NetworkConfig(hidden_sizes=(8,)))
    params = network.init(jax.random.PRNGKey(0))
    timestep = steps((2,))
    values, _ = network.apply(None, params, timestep, ())
    other = dict(timestep.observation, critic_state=timestep.observation["critic_state"] + 1)
    again, _ = network.apply(None, params, timestep._replace(observation=other), ())
    np.testing.assert_array_equal(values, again)  # seats do not see the state
    with pytest.raises(ValueError, match="noisy_sigma"):
        seat_q_network(OBSERVATION, CHOICES, NetworkConfig(noisy_sigma=0.1))
