"""Observations of several entries, and of arrays that look like pictures, in the usual networks."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack.networks import (
    AtFractions,
    CriticInput,
    NatureTorso,
    NetworkConfig,
    actor_critic,
    distributional_q_network,
    implicit_q_network,
    observation_features,
    policy_and_critic,
    q_network,
)
from rlstack.networks.actor_critic import policy_network
from rlstack.networks.configured import dense_features
from tests.agent_cases import (
    FIRST,
    LAST,
    MID,
    ONE_OF_4,
    REAL,
    leaves_differ,
    quick_jit,
    random_timesteps,
)

KEY = jax.random.PRNGKey(0)
CAMERAS = {
    "action_mask": specs.BoundedArray((4,), bool, False, True),
    "arm": {"left camera": specs.BoundedArray((36, 40, 3), np.uint8, 0, 255)},
    "camera": specs.BoundedArray((3, 36, 36), np.uint8, 0, 255),  # channels first
    "goal": specs.DiscreteArray(3),
    "speed": specs.Array((2,), np.float32),
}
WITHOUT_MASK = {name: spec for name, spec in CAMERAS.items() if name != "action_mask"}
GRID = specs.BoundedArray((7, 7, 3), np.uint8, 0, 255)
CONV = [
    NetworkConfig(torso=torso, hidden_sizes=(8, 6)) for torso in ("nature", "impala", "minatar")
]


def steps(obs_spec, step_types):
    return random_timesteps(obs_spec, np.array(step_types, np.int32))


def row(timesteps):
    return jax.tree.map(lambda x: x[0], timesteps)


def shapes(network):
    return jax.eval_shape(network.init, KEY)


def answer(run, network, timestep, state=()):
    """The shapes of a network's output."""
    return jax.eval_shape(run, None, shapes(network), timestep, state)


def modules(params):
    return {part for name in params for part in name.split("/")}


@pytest.mark.parametrize("cfg", CONV, ids=["nature", "impala", "minatar"])
@pytest.mark.parametrize(
    "make",
    [actor_critic, policy_network, q_network, distributional_q_network],
    ids=lambda make: make.__name__,
)
def test_each_entry_has_a_torso_of_its_kind(make, cfg):
    params = shapes(make(CAMERAS, ONE_OF_4, cfg))
    assert {"image_camera", "image_arm_left_camera", "vectors", "joined"} <= modules(params)
    torso = "policy_torso" if make is actor_critic else "torso"
    inputs = params[f"{torso}/vectors/linear"]["w"].shape[0]
    assert inputs == 3 + 2  # a goal as one-hot, and the speed
    assert params[f"{torso}/joined"]["w"].shape == (6 + 6 + 6, 6)


def test_the_output_depends_on_every_entry():
    tiny = {
        "camera": specs.BoundedArray((4, 4, 1), np.uint8, 0, 255),
        "goal": specs.DiscreteArray(3),
    }
    network = q_network(tiny, ONE_OF_4, NetworkConfig(torso="impala", hidden_sizes=(32,)))
    params = quick_jit(network.init)(KEY)
    timestep, apply = row(steps(tiny, [[MID] * 2])), quick_jit(network.apply)
    before, _ = apply(None, params, timestep, ())
    for name in tiny:
        x = timestep.observation[name]
        other = {**timestep.observation, name: (x + 1) % 3 if name == "goal" else 255 - x}
        assert leaves_differ(
            before, apply(None, params, timestep._replace(observation=other), ())[0]
        )


def test_a_dict_of_images_and_vectors_goes_through_cores_fractions_and_critics():
    cfg = CONV[0]
    timesteps = steps(CAMERAS, [[MID, LAST], [MID, FIRST]])
    timestep = row(timesteps)
    recurrent = actor_critic(
        CAMERAS, ONE_OF_4, NetworkConfig(torso="nature", hidden_sizes=(6,), core="gru", core_size=5)
    )
    output, _ = answer(recurrent.unroll, recurrent, timesteps, recurrent.initial_state(2))
    assert output.value.shape == (2, 2)

    implicit = implicit_q_network(CAMERAS, ONE_OF_4, cfg)
    asked = AtFractions(timestep.observation, np.full((2, 3), 0.5, np.float32))
    values, _ = answer(implicit.apply, implicit, timestep._replace(observation=asked))
    assert values.shape == (2, 4, 3)

    critic = policy_and_critic(WITHOUT_MASK, REAL, cfg).critic
    seen = {name: timestep.observation[name] for name in WITHOUT_MASK}
    judged = CriticInput(seen, np.zeros((2, *REAL.shape), np.float32))
    assert answer(critic.apply, critic, timestep._replace(observation=judged))[0].shape == (2,)


def test_one_array_keeps_the_names_of_its_modules():
    """Checkpoints hold these names, so they may not change."""
    image = CAMERAS["camera"]
    cfg = NetworkConfig(torso="nature", hidden_sizes=(6,), shared=True)
    expected = {
        *(f"torso/conv2_d{suffix}" for suffix in ("", "_1", "_2")),
        "torso/linear",
        "policy_head",
        "value_head",
    }
    for spec in (image, {"camera": image}, {"camera": image, "action_mask": ONE_OF_4}):
        assert set(shapes(actor_critic(spec, ONE_OF_4, cfg))) == expected
    dense = NetworkConfig(hidden_sizes=(6,), shared=True)
    for spec in (CAMERAS, CAMERAS["speed"]):
        assert set(shapes(actor_critic(spec, ONE_OF_4, dense))) == {
            "torso/linear",
            "policy_head",
            "value_head",
        }


def test_entries_whose_names_become_equal_stay_apart():
    spec = {"a b": CAMERAS["camera"], "a_b": CAMERAS["camera"], "c": CAMERAS["speed"]}
    params = shapes(actor_critic(spec, ONE_OF_4, CONV[0]))
    assert {"image_a_b", "image_a_b_"} <= modules(params)
    params = shapes(actor_critic(tuple(spec.values()), ONE_OF_4, CONV[0]))
    assert {"image_0", "image_1", "vectors"} <= modules(params)


def test_values_that_are_no_pixels_are_not_scaled_if_the_config_says_so():
    grid = np.random.default_rng(0).integers(0, 11, (2, 7, 7, 3), np.uint8)
    np.testing.assert_array_equal(observation_features(GRID, grid, scale_pixels=False), grid)
    np.testing.assert_allclose(observation_features(GRID, grid), grid / 255, rtol=1e-6)
    first = observation_features(CAMERAS["camera"], np.ones((2, 3, 36, 36), np.uint8), False)
    assert first.shape == (2, 36, 36, 3) and (first == 1).all()


@pytest.mark.parametrize("torso", ["mlp", "impala"])
def test_every_network_leaves_them_as_they_are(torso, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "rlstack.networks.torsos._leaf_features",
        lambda spec, x, scale, axes: seen.append(scale) or x.astype(np.float32),
    )
    cfg = NetworkConfig(torso=torso, hidden_sizes=(6,), scale_pixels=False)
    for make in (actor_critic, policy_network, q_network, implicit_q_network):
        shapes(make(GRID, ONE_OF_4, cfg))
    for network in policy_and_critic(GRID, REAL, cfg):
        shapes(network)
    assert len(seen) == 2 + 5 and set(seen) == {False}  # a policy and a value: two torsos


@pytest.mark.parametrize("shape", [(7, 7, 3), (35, 36, 3), (36, 35, 1)])
def test_images_too_small_for_the_torso_are_refused(shape):
    network = functools.partial(actor_critic, specs.BoundedArray(shape, np.uint8, 0, 255), ONE_OF_4)
    rule = r"at least 36 x 36 pixels; got .*--network\.torso impala or mlp"
    with pytest.raises(ValueError, match=rule):
        shapes(network(CONV[0]))
    shapes(network(CONV[1]))


def test_the_smallest_image_of_the_torso_has_features():
    torso = hk.without_apply_rng(hk.transform(lambda x: NatureTorso(4)(x)))
    x = jax.random.normal(KEY, (2, 36, 36, 1))
    assert jax.eval_shape(torso.apply, jax.eval_shape(torso.init, KEY, x), x).shape == (2, 4)


@pytest.mark.parametrize(
    "spec",
    [
        CAMERAS["speed"],
        CAMERAS["goal"],
        specs.BoundedArray((84, 84), np.uint8, 0, 255),  # Haiku would take it as an unbatched image
        {"goal": CAMERAS["goal"], "speed": CAMERAS["speed"]},
    ],
)
def test_observations_without_an_image_are_refused_by_torsos_for_images(spec):
    for cfg in CONV:
        with pytest.raises(ValueError, match=r"needs an observation with an image.*torso mlp"):
            shapes(q_network(spec, ONE_OF_4, cfg))


def first_kernel(spec, **options):
    cfg = NetworkConfig(torso="impala", hidden_sizes=(4,), **options)
    kernels = [x["w"].shape for x in shapes(q_network(spec, ONE_OF_4, cfg)).values() if "w" in x]
    return next(shape for shape in kernels if len(shape) == 4)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, bool, np.int32])
@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((4, 84, 84), 4),  # Atari
        ((4, 42, 42), 4),
        ((3, 64, 64), 3),  # Procgen in EnvPool
        ((12, 64, 96), 12),
        ((1, 28, 28), 1),
        ((84, 84, 3), 3),
        ((210, 160, 3), 3),
        ((7, 7, 3), 3),  # MiniGrid
        ((10, 10, 4), 4),  # MinAtar
        ((10, 10, 7), 7),
        ((6, 7, 2), 2),  # Connect four
        ((5, 5, 4), 4),
    ],
)
def test_axes_of_images_are_guessed_where_the_shape_tells_them(dtype, shape, channels):
    assert first_kernel(specs.BoundedArray(shape, dtype, 0, 1)) == (3, 3, channels, 16)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(
    "shape", [(8, 8, 12), (10, 10, 10), (6, 7, 12), (3, 3, 3), (9, 10, 10), (5, 4, 26), (20, 8, 20)]
)
def test_axes_that_the_shape_does_not_tell_are_asked_for(dtype, shape):
    spec = specs.BoundedArray(shape, dtype, 0, 1)
    wanted = rf"shape \({', '.join(map(str, shape))}\).*--network\.image-axes hwc if"
    with pytest.raises(ValueError, match=wanted):
        first_kernel(spec)
    assert first_kernel(spec, image_axes="hwc")[2] == shape[2]
    assert first_kernel(spec, image_axes="chw")[2] == shape[0]
    network = q_network(spec, ONE_OF_4, NetworkConfig(hidden_sizes=(4,)))
    assert shapes(network)["torso/linear"]["w"].shape[0] == np.prod(shape)  # any order will do


def test_float_images_are_turned_and_not_scaled():
    spec = specs.BoundedArray((3, 8, 9), np.float32, 0, 1)
    image = np.random.default_rng(0).random((2, 3, 8, 9), np.float32)
    turned = image.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(observation_features(spec, image), turned)
    np.testing.assert_array_equal(observation_features(spec, image, image_axes="hwc"), image)


@pytest.mark.parametrize(
    ("dtype", "shape", "turned"),
    [(np.uint8, (3, 4, 5), True), (np.uint8, (8, 8, 12), True), (np.float32, (3, 4, 5), False)],
)
def test_dense_layers_see_images_in_the_order_of_earlier_versions(dtype, shape, turned):
    """Checkpoints hold weights for this order."""
    image = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype(dtype)
    spec = specs.BoundedArray(shape, dtype, 0, 255)
    seen = dense_features(NetworkConfig(scale_pixels=False), spec, image)
    np.testing.assert_array_equal(seen, np.moveaxis(image, 1, -1) if turned else image)
    other = dense_features(NetworkConfig(scale_pixels=False, image_axes="chw"), spec, image)
    np.testing.assert_array_equal(other, np.moveaxis(image, 1, -1))
