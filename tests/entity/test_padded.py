"""Padded arrays contain what the observation contains, and indices and slots agree."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from rlstack.distributions import from_parameters, num_parameters
from rlstack.entity import (
    GLOBAL,
    Categorical,
    CategoricalMask,
    EntityType,
    Observation,
    ObsSpace,
    SelectEntity,
    Slots,
    as_dm_env,
)
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.validator import Validator
from rlstack.entity.vec_obs import BatchView, index_to_slot, slot_to_index
from rlstack.networks.ragged.entity_layout import read_layout
from tests.entity.cases import SWEEPER, SWEEPER_ACTIONS, SWEEPER_OBS, Skirmish, entities, stacked

SEEDS = st.integers(0, 2**31)


def skirmish_codec():
    return PaddedCodec(Skirmish.obs_space, Skirmish.action_space, "Skirmish")


def observations(seed, number=6):
    """Observations of a game; they do not depend on the actions."""
    game = Skirmish(seed)
    shown = []
    for game.time in range(number):
        shown.append(game.show())
    return shown


def actors_and_choices(observation, name):
    """Actors and legal choices of an action as (type, row), computed one by one."""
    there = entities(observation)[:-1]
    ids = {("Scout", i): entity for i, entity in enumerate(observation.ids["Scout"])}

    def meant(wanted, types):
        if wanted is not None:
            return [next(e for e in there if ids.get(e) == w) for w in wanted]
        return [e for t in (Skirmish.obs_space.entities if types is None else types)
                for e in there if e[0] == t]  # fmt: skip

    offer = observation.actions.get(name)
    if offer is None:
        return [], []
    if name == "Shout":
        return [(GLOBAL, 0)], [[0, 1] if offer.mask is None else np.flatnonzero(offer.mask)]
    actors = meant(offer.actor_ids, offer.actor_types)
    options = [0, 1, 2]
    if name == "Aim":
        options = meant(offer.actee_ids, offer.actee_types)
    return actors, [
        [o for j, o in enumerate(options) if offer.mask is None or offer.mask[i][j]]
        for i in range(len(actors))
    ]


@hypothesis.given(SEEDS)
@hypothesis.settings(deadline=None, max_examples=40, derandomize=True)
def test_padded_arrays_contain_what_the_observation_contains(seed):
    codec = skirmish_codec()
    slots = {
        (name, i): slot for name, places in codec.slots.ranges() for i, slot in enumerate(places)
    }
    validator = Validator(Skirmish.obs_space, Skirmish.action_space, "Skirmish")
    for observation in observations(seed):
        validator.check(observation)
        padded, context = codec.encode(observation)
        there = entities(observation)
        for name, count in padded["count"].items():
            assert count == sum(e[0] == name for e in there)
            rows = padded["features"].get(name)
            seen = np.broadcast_to(observation.visible.get(name, True), count)
            np.testing.assert_array_equal(padded["visible"][name][:count], seen)
            assert not padded["visible"][name][count:].any()
            if rows is not None:
                given = observation.features.get(name, np.zeros((0, rows.shape[1])))
                np.testing.assert_array_equal(rows[:count], np.asarray(given, np.float32))
                assert not rows[count:].any()
        np.testing.assert_array_equal(padded["features"][GLOBAL], [observation.global_features])
        for name, kind in Skirmish.action_space.items():
            actors, legal = actors_and_choices(observation, name)
            assert [slots[a] for a in actors] == padded["actors"][name][: len(actors)].tolist()
            assert (padded["actors"][name][len(actors) :] == -1).all()
            assert context.actors[name] == [slots[a] for a in actors]
            mask = padded["action_mask"][name].reshape(kind.capacity, -1)
            for row, options in zip(mask, legal, strict=False):
                if name == "Aim":
                    options = [slots[o] for o in options]
                assert set(np.flatnonzero(row).tolist()) == set(np.asarray(options).tolist())
            assert mask[len(actors) :, 0].all() and not mask[len(actors) :, 1:].any()


@hypothesis.given(st.lists(SEEDS, min_size=1, max_size=5))
@hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
def test_indices_and_slots_are_inverse_and_in_the_order_of_the_space(seeds):
    codec = skirmish_codec()
    shown = [o for seed in seeds for o in observations(seed, 3)]
    batch = stacked([codec.encode(o)[0] for o in shown])
    present = BatchView(Skirmish.obs_space, Skirmish.action_space).present(batch)
    index, slot = slot_to_index(present), index_to_slot(present)
    for row, observation in enumerate(shown):
        there = entities(observation)  # rocks and flags are counted although they have no ids
        expected = [codec.slots.offsets[name] + i for name, i in there]
        assert slot[row, : len(there)].tolist() == expected
        assert (slot[row, len(there) :] == -1).all()
        assert index[row, expected].tolist() == list(range(len(there)))
        assert (index[row] >= 0).sum() == len(there)


def test_specs_describe_observations_and_are_what_networks_read():
    for obs_space, action_space, shown in (
        (SWEEPER_OBS, SWEEPER_ACTIONS, SWEEPER),
        (Skirmish.obs_space, Skirmish.action_space, observations(0, 20)),
    ):
        codec = PaddedCodec(obs_space, action_space, "game")
        for observation in shown:
            padded = codec.encode(observation)[0]
            jax.tree.map(lambda spec, value: spec.validate(value), codec.observation_spec, padded)
        layout = read_layout(codec.observation_spec, codec.action_spec)
        assert layout.num_slots == Slots(obs_space, action_space).total
        spec = codec.observation_spec["features"].get(GLOBAL)
        named = spec.name.split(": ")[1].split(",") if spec is not None else []
        assert named == list(obs_space.global_features)
        by_name = {t.name: t for t in layout.types}
        for name, kind in obs_space.entities.items():
            assert by_name[name].features == kind.features
            assert by_name[name].offset == codec.slots.offsets[name]


@pytest.mark.slow
@pytest.mark.chosen
def test_rows_without_actors_decide_nothing():
    codec = skirmish_codec()
    batch = stacked([codec.encode(o)[0] for o in observations(3, 8)])
    logits = np.random.default_rng(0).normal(size=(8, num_parameters(codec.action_spec)))
    policy = from_parameters(codec.action_spec, jnp.asarray(logits), batch["action_mask"])
    action = policy.sample(jax.random.key(0))
    none = {name: np.full_like(rows, -1) for name, rows in batch["actors"].items()}
    assert any((batch["actors"][name] >= 0).any() for name in none)
    for name, rows in batch["actors"].items():
        assert (np.asarray(action[name])[rows < 0] == 0).all()
    nobody = stacked([codec.encode(Observation({}, global_features=[0.0]))[0]] * 8)
    idle = from_parameters(codec.action_spec, jnp.asarray(logits), nobody["action_mask"])
    np.testing.assert_array_equal(idle.entropy(), np.zeros(8))
    chosen = idle.sample(jax.random.key(0))
    np.testing.assert_array_equal(idle.log_prob(chosen), np.zeros(8))


def test_ids_name_actors_and_actees_and_types_without_ids_are_known_by_row():
    space = ObsSpace({"A": EntityType(("f",), 2), "B": EntityType((), 2)})
    codec = PaddedCodec(space, {"Aim": SelectEntity(4), "Go": Categorical(("x", "y"), 4)}, "game")
    observation = Observation(
        {"A": [[1.0]], "B": 2},
        actions={"Go": CategoricalMask()},
        ids={"B": ["left", "right"]},
    )
    _, context = codec.encode(observation)
    actions = codec.decode(context, {"Go": np.array([1, 0, 1, 0]), "Aim": np.zeros(4, np.int32)})
    assert actions["Go"].actors == [("A", 0), "left", "right"]
    assert actions["Go"].labels == ["y", "x", "y"]
    assert actions["Go"].indices.tolist() == [1, 0, 1]
    assert list(actions["Aim"].actors) == list(actions["Aim"].actees) == []


def test_spaces_without_possible_actors_are_refused():
    with pytest.raises(ValueError, match="game: action_space: must have an action type; got none"):
        PaddedCodec(SWEEPER_OBS, {}, "game")
    with pytest.raises(
        ValueError, match="game: action 'Aim': needs entity types whose entities can act"
    ):
        PaddedCodec(ObsSpace({}, ("hour",)), {"Aim": SelectEntity()}, "game")


def test_the_same_seed_shows_the_same():
    def run():
        env, rng = as_dm_env(Skirmish(7)), np.random.default_rng(0)
        shown = [env.reset()]
        for _ in range(30):
            action = {n: np.zeros(s.shape, np.int32) for n, s in env.action_spec().items()}
            for name, mask in shown[-1].observation["action_mask"].items():
                rows = mask.reshape(len(action[name]), -1)
                action[name][:] = np.argmax(rows * rng.random(rows.shape), axis=1)
            shown.append(env.step(action))
        return shown

    for one, other in zip(run(), run(), strict=True):
        assert one[:3] == other[:3]
        jax.tree.map(np.testing.assert_array_equal, one.observation, other.observation)
