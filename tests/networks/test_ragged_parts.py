"""Relative positions, translation, pools and statistics of entities, against slow plain Python.

Also names: types and actions may have any, but modules may not.
"""

import dataclasses
import itertools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.entity import Categorical, EntityType, ObsSpace
from rlstack.entity.games import MineSweeper
from rlstack.entity.padded import PaddedCodec
from rlstack.networks import (
    RaggedTransformerConfig,
    RelativePositionsConfig,
    TranslationConfig,
    ragged_transformer,
)
from rlstack.networks.ragged.blocks import Pool, TokenRows
from rlstack.networks.ragged.entity_layout import module_names, read_layout
from rlstack.networks.ragged.geometry import Poses
from rlstack.networks.ragged.relative_positions import RelativePositions, buckets, displacements
from rlstack.networks.ragged.translation import translated
from tests.agent_cases import quick_jit
from tests.networks.ragged_cases import CODEC, observations, timestep_of

POINTS = [(0.0, 0.0), (1.0, 0.2), (-0.6, 1.4), (2.4, -3.0), (-0.3, -0.45), (0.5, 0.5)]


def _slow_buckets(cfg, x, y):
    """{bucket: weight}, from the description in the config."""
    if cfg.kind == "grid":
        column, row = (
            max(-extent, min(extent, math.floor(v + 0.5)))
            for v, extent in zip((x, y), cfg.extent, strict=True)
        )
        return {(column + cfg.extent[0]) * (2 * cfg.extent[1] + 1) + row + cfg.extent[1]: 1.0}
    turn = math.atan2(y, x) / (2 * math.pi) * cfg.sectors
    ring = min(math.hypot(x, y), 1.0) * (cfg.rings - 1)
    if cfg.interpolate:
        low = math.floor(turn)
        sectors = {low % cfg.sectors: 1 - (turn - low)}
        sectors[(low + 1) % cfg.sectors] = turn - low
        near = min(int(ring), cfg.rings - 2)
        rings = {near: 1 - (ring - near), near + 1: ring - near}
    else:
        sectors, rings = {math.floor(turn + 0.5) % cfg.sectors: 1.0}, {math.floor(ring + 0.5): 1.0}
    if cfg.kind == "radial":
        return sectors
    if cfg.kind == "distance":
        return rings
    return {
        sector * cfg.rings + ring: a * b
        for (sector, a), (ring, b) in itertools.product(sectors.items(), rings.items())
    }


@pytest.mark.parametrize("interpolate", [False, True])
@pytest.mark.parametrize("kind", ["grid", "radial", "distance", "polar"])
def test_buckets_are_those_of_slow_plain_python(kind, interpolate):
    if kind == "grid" and interpolate:
        with pytest.raises(ValueError, match="neither rotated nor interpolated"):
            RelativePositionsConfig(kind=kind, interpolate=interpolate)
        return
    cfg = RelativePositionsConfig(
        kind=kind, extent=(2, 1), sectors=6, rings=4, interpolate=interpolate
    )
    found = buckets(cfg, jnp.array(POINTS))
    for code, weight, (x, y) in zip(found.code, found.weight, POINTS, strict=True):
        dense = np.zeros(cfg.num_buckets)
        np.add.at(dense, np.asarray(code), np.asarray(weight))
        expected = np.zeros(cfg.num_buckets)
        for bucket, share in _slow_buckets(cfg, x, y).items():
            expected[bucket] += share
        np.testing.assert_allclose(dense, expected, atol=1e-5)
        assert dense.sum() == pytest.approx(1)


def test_halves_of_a_cell_are_rounded_along_each_axis():
    """The original rounds the combined index, which gives another cell."""
    cfg = RelativePositionsConfig(kind="grid", extent=(1, 1))
    (code,) = buckets(cfg, jnp.array([[0.4, 0.4]])).code[0]
    assert code == 4  # the middle; 0.4 * 3 + 0.4 rounds to another cell


def test_displacements_are_as_the_attending_entity_sees_them():
    cfg = RelativePositionsConfig(kind="radial", angle_feature="heading", scale=2.0)
    angle = 0.7
    forward = jnp.array([[[math.cos(angle), math.sin(angle)], [1.0, 0.0]]])
    position = jnp.array([[[1.0, 2.0], [4.0, -2.0]]])
    found = displacements(cfg, Poses(position, jnp.ones((1, 2), bool), forward))
    x, y = (1 - 4) / 2, (2 + 2) / 2
    c, s = math.cos(-angle), math.sin(-angle)
    np.testing.assert_allclose(found[0, 0, 1], [c * x - s * y, s * x + c * y], atol=1e-6)
    np.testing.assert_allclose(found[0, 1, 0], [-x, -y], atol=1e-6)
    grid = dataclasses.replace(cfg, kind="grid", angle_feature="")
    np.testing.assert_allclose(
        displacements(grid, Poses(position, jnp.ones((1, 2), bool), forward))[0, 0, 1], [x, y]
    )


def test_codes_go_by_type_and_not_to_entities_without_a_position():
    cfg = RelativePositionsConfig(kind="grid", per_type_values=True, value_gate="linear")
    function = hk.without_apply_rng(
        hk.transform(lambda *arguments: RelativePositions(cfg, 4, 2)(*arguments))
    )
    position = jnp.array([[[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [9.0, 9.0]]])
    places = Poses(position, jnp.array([[True, True, True, False]]), jnp.zeros((1, 4, 2)))
    kinds, embedding = jnp.array([[0, 0, 1, 1]]), jnp.ones((1, 4, 3))
    params = function.init(jax.random.PRNGKey(0), places, kinds, embedding)
    codes = function.apply(params, places, kinds, embedding)
    held = params["relative_positions"]
    left = 0 * 3 + 1  # x: -1, y: 0
    np.testing.assert_allclose(codes.key[0, 0, 1], held["key_codes"][left], atol=1e-6)
    np.testing.assert_allclose(codes.key[0, 0, 2], held["key_codes"][left], atol=1e-6)
    gate = params["relative_positions/value_gate"]["w"].sum(0)
    np.testing.assert_allclose(codes.value[0, 0, 1], held["value_codes"][left] * gate, atol=1e-5)
    other = held["value_codes"][9 + left] * gate
    np.testing.assert_allclose(codes.value[0, 0, 2], other, atol=1e-5)
    assert not np.asarray(codes.key[0, 3]).any() and not np.asarray(codes.value[0, :, 3]).any()


SHIP = TranslationConfig(reference="Base", angle_feature="heading", distance_feature=True)


def _fleet():
    space = ObsSpace(
        {"Base": EntityType(("x", "y", "heading")), "Rock": EntityType(("size", "x", "y"), 3)}
    )
    return PaddedCodec(space, {"go": Categorical(("a", "b"))}, "fleet")


def _seen_from(place, heading, rocks):
    """The fleet's observation, with rocks given in the base's coordinate frame."""
    c, s = math.cos(heading), math.sin(heading)
    rows = [[k, place[0] + c * x - s * y, place[1] + s * x + c * y] for k, x, y in rocks]
    return {
        "features": {
            "Base": np.array([[[*place, heading]]], np.float32),
            "Rock": np.array([rows + [[0.0] * 3] * (3 - len(rows))], np.float32),
        },
        "count": {"Base": np.array([1]), "Rock": np.array([len(rows)])},
        "visible": {"Base": np.ones((1, 1), bool), "Rock": np.arange(3)[None] < len(rows)},
        "actors": {"go": np.zeros((1, 1), np.int32)},
        "action_mask": {"go": np.ones((1, 2), bool)},
    }


def test_positions_are_told_as_the_reference_sees_them():
    codec, rocks = _fleet(), [(5.0, 2.0, 1.0), (6.0, -1.0, 0.5)]
    found = read_layout(codec.observation_spec, codec.action_spec)
    cfg = RaggedTransformerConfig(translation=SHIP)
    observation = _seen_from((30.0, -40.0), 1.1, rocks)
    shown = translated(found, cfg, observation)["features"]
    expected = [[k, x, y, math.hypot(x, y)] for k, x, y in rocks]
    np.testing.assert_allclose(shown["Rock"][0, :2], expected, atol=1e-4)
    np.testing.assert_array_equal(shown["Base"], observation["features"]["Base"])
    lost = dict(observation, count={**observation["count"], "Base": np.array([0])})
    np.testing.assert_allclose(
        translated(found, cfg, lost)["features"]["Rock"][..., :3], observation["features"]["Rock"]
    )
    with pytest.raises(ValueError, match="reference must be a type of capacity 1"):
        ragged_transformer(
            codec.observation_spec,
            codec.action_spec,
            RaggedTransformerConfig(translation=TranslationConfig(reference="Rock")),
        ).init(jax.random.PRNGKey(0))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("relative", [False, True])
def test_moving_and_turning_the_world_changes_nothing(relative):
    codec, rocks = _fleet(), [(5.0, 2.0, 1.0), (6.0, -1.0, 0.5), (7.0, 0.3, -2.0)]
    cfg = RaggedTransformerConfig(
        d_model=8,
        num_layers=1,
        translation=dataclasses.replace(SHIP, keep_reference=False),
        relative_positions=RelativePositionsConfig(
            kind="distance", rings=3, scale=3.0, interpolate=True
        )
        if relative
        else RelativePositionsConfig(),
    )
    network = ragged_transformer(codec.observation_spec, codec.action_spec, cfg)
    params = jax.tree.map(lambda x: x + 0.1, network.init(jax.random.PRNGKey(0)))
    places = [((0.0, 0.0), 0.0), ((3.0, -4.0), 1.1), ((-2.0, 1.0), -2.5)]
    outputs = [
        network.apply(None, params, timestep_of(_seen_from(*place, rocks)), ())[0]
        for place in places
    ]
    other = network.apply(None, params, timestep_of(_seen_from(*places[0], rocks[:2])), ())[0]
    for output in outputs[1:]:
        np.testing.assert_allclose(output.policy, outputs[0].policy, atol=1e-5)
        np.testing.assert_allclose(output.value, outputs[0].value, atol=1e-5)
    assert np.abs(other.value - outputs[0].value).max() > 1e-4


@pytest.mark.parametrize("kind", ["mean", "max", "meanmax"])
def test_pools_are_over_what_each_entity_may_see(kind):
    environment = jnp.array([[0, 0, 0, 1, -1]])
    visible = jnp.array([[True, True, False, True, False]])
    x = jax.random.normal(jax.random.PRNGKey(0), (1, 5, 3))
    function = hk.without_apply_rng(hk.transform(lambda *a: Pool(kind, 3)(*a)))
    sees = TokenRows(environment, visible).attention_mask()
    params = function.init(jax.random.PRNGKey(1), x, sees)
    found = function.apply(params, x, sees)
    before, after = params["pooling/before"], params["pooling/after"]
    for i, others in enumerate([[0, 1], [0, 1], [0, 1, 2], [3]]):
        rows = np.asarray(x[0] @ before["w"] + before["b"])[others]
        pools = {"mean": [rows.mean(0)], "max": [rows.max(0)]}
        pools["meanmax"] = pools["mean"] + pools["max"]
        expected = np.concatenate(pools[kind]) @ after["w"] + after["b"]
        np.testing.assert_allclose(found[0, i], expected, atol=1e-5)


def test_statistics_are_by_type_and_over_real_entities():
    network = ragged_transformer(
        CODEC.observation_spec, CODEC.action_spec, RaggedTransformerConfig()
    )
    batches = [
        jax.tree.map(lambda x: x.reshape((2, 3, *x.shape[1:])), observations(6, seed=seed))
        for seed in (0, 1)
    ]
    for batch in batches:
        batch["features"]["Rock"][..., 0] = 7.0  # a feature that never varies; also in the padding
    stats = network.standardiser.initial()
    for batch in batches:
        stats = quick_jit(network.standardiser.update)(stats, batch, np.ones((2, 3), bool))
    for kind in ("Ship", "Rock"):
        rows = np.concatenate(
            [
                features[:count]
                for batch in batches
                for features, count in zip(
                    batch["features"][kind].reshape((6, *batch["features"][kind].shape[2:])),
                    batch["count"][kind].reshape(-1),
                    strict=True,
                )
            ]
        )
        assert stats[kind].num_seen == len(rows)
        np.testing.assert_allclose(stats[kind].mean[0], rows.mean(0), atol=1e-5)
        np.testing.assert_allclose(stats[kind].variance[0], rows.var(0), atol=1e-5)
    assert stats["__global__"].num_seen == 12
    shown = network.standardiser.apply(stats, batches[0], 1.0)
    assert np.abs(shown["features"]["Ship"]).max() == 1.0  # clipped
    first = np.asarray(shown["features"]["Rock"])[..., 0]
    np.testing.assert_allclose(first, 0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["Robot", "__global__", "x2"], ["Robot", "__global__", "x2"]),
        (["Orbital Cannon"], ["Orbital_Cannon"]),
        (["a b", "a-b", "a_b"], ["a_b_", "a_b__", "a_b"]),
        (["2nd", "", "\u00e4"], ["_2nd", "_", "__"]),
    ],
)
def test_names_become_identifiers_that_differ(names, expected):
    found = module_names(names)
    assert [found[name] for name in names] == expected


def test_the_orbital_cannon_has_modules_of_its_own():
    env = MineSweeper(orbital_cannon=True)
    network = ragged_transformer(env.observation_spec(), env.action_spec())
    modules = jax.eval_shape(network.init, jax.random.PRNGKey(0))
    ends = {name.rsplit("/", 1)[-1] for name in modules}
    assert {"Orbital_Cannon_linear", "policy_head_Fire_Orbital_Cannon_query"} <= ends


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": "mean", "relative_positions": RelativePositionsConfig(project_keys=True)},
        {"num_layers": 0, "relative_positions": RelativePositionsConfig(project_values=True)},
    ],
)
def test_relative_positions_need_attention(changes):
    with pytest.raises(ValueError, match="pooling must be none, with layers, for relative"):
        RaggedTransformerConfig(**changes)
