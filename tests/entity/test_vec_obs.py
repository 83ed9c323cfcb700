"""Ragged records of a batch contain, entity by entity, the observations of its environments."""

from __future__ import annotations

import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rlstack.entity import GLOBAL, BatchView, Categorical, EntityType, ObsSpace
from rlstack.entity.padded import PaddedCodec
from rlstack.networks.ragged.packing import ladder
from rlstack.types import StepType, TimeStep
from tests.entity.cases import Skirmish, entities, legal_actions, ragged, split, stacked
from tests.entity.test_padded import actors_and_choices, observations


def batch(shown):
    codec = PaddedCodec(Skirmish.obs_space, Skirmish.action_space, "Skirmish")
    rows = [codec.encode(observation) for observation in shown]
    size = len(rows)
    steps = np.where(np.arange(size) % 2, StepType.LAST, StepType.MID).astype(np.int32)
    padded = stacked([row[0] for row in rows])
    return TimeStep(steps, np.arange(size, dtype=np.float32), np.ones(size), padded), rows, codec


def view():
    return BatchView(Skirmish.obs_space, Skirmish.action_space)


@hypothesis.given(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
@hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
def test_vec_obs_contains_the_observation_of_each_environment(seeds):
    """Covers late types, absent actions, masks in only some environments, and no entities."""
    shown = [each for seed in seeds for each in observations(seed, 4)]
    timestep, _, _ = batch(shown)
    observed = view().vec_obs(timestep)
    np.testing.assert_array_equal(observed.done, np.arange(len(shown)) % 2 == 1)
    np.testing.assert_array_equal(observed.lengths, [len(entities(each)) for each in shown])
    for name, width in (("Rock", 1), ("Scout", 2), ("Flag", 0)):
        assert observed.features[name].values.shape[1:] == (width,)
        for rows, seen, each in zip(
            split(observed.features[name]), split(observed.visible[name]), shown, strict=True
        ):
            given = each.features.get(name, np.zeros((0, width)))
            given = np.zeros((given, 0)) if isinstance(given, int) else given
            np.testing.assert_array_equal(rows, np.asarray(given, np.float32))
            flags = np.broadcast_to(each.visible.get(name, True), len(given))
            np.testing.assert_array_equal(seen, flags)
    np.testing.assert_array_equal(
        observed.features[GLOBAL].values, [each.global_features for each in shown]
    )
    for name in Skirmish.action_space:
        assert_action(observed.action_masks[name], name, shown)


def assert_action(offered, name, shown):
    masks = [None] * len(shown) if offered.mask is None else split(offered.mask)
    everything_legal = True
    for env, each in enumerate(shown):
        index = {entity: i for i, entity in enumerate(entities(each))}
        actors, legal = actors_and_choices(each, name)
        assert split(offered.actors)[env].tolist() == [index[a] for a in actors]
        choices = range({"Move": 3, "Shout": 2}.get(name, 0))
        if name == "Aim":
            choices = split(offered.actees)[env].tolist()
            legal = [[index[a] for a in row] for row in legal]
            assert choices == sorted({i for row in legal for i in row})
        expected = [[c in list(row) for c in choices] for row in legal]
        everything_legal &= all(all(row) for row in expected)
        if masks[env] is not None:
            assert masks[env].ravel().tolist() == [flag for row in expected for flag in row]
    assert (offered.mask is None) == everything_legal


@hypothesis.given(st.integers(0, 2**31))
@hypothesis.settings(deadline=None, max_examples=20, derandomize=True)
def test_actions_convert_both_ways_and_name_the_same_entities(seed):
    shown = observations(seed, 6)
    timestep, rows, codec = batch(shown)
    observation = timestep.observation
    action = legal_actions(observation, codec.action_spec, np.random.default_rng(seed))
    chosen = view().ragged_actions(observation, action)
    again = view().padded_actions(observation, chosen)
    for name, values in action.items():
        assert again[name].dtype == np.int32
        np.testing.assert_array_equal(again[name], values)
    for env, (each, (_, context)) in enumerate(zip(shown, rows, strict=True)):
        mine = {name: values[env] for name, values in action.items()}
        codec.check_choices(context, mine)
        told = codec.decode(context, mine)
        there = entities(each)
        names = {("Scout", i): entity for i, entity in enumerate(each.ids["Scout"])}
        actees = [there[i] for i in split(chosen["Aim"])[env].tolist()]
        assert told["Aim"].actees == [names.get(entity, entity) for entity in actees]
        assert told["Move"].indices.tolist() == split(chosen["Move"])[env].tolist()
        assert told["Shout"].actors == [GLOBAL] * len(split(chosen["Shout"])[env])


def test_packed_rows_hold_every_entity_and_actors_are_found():
    shown = [each for seed in range(5) for each in observations(seed, 8)]
    observed = view().vec_obs(batch(shown)[0])
    packed = observed.packing()
    assert packed.entities.shape[1] == observed.lengths.max()
    assert packed.entities.shape[0] < len(shown)
    first = np.cumsum(observed.lengths) - observed.lengths
    for env, rows in enumerate(split(observed.action_masks["Move"].actors)):
        flat = observed.flat_actors("Move")
        mine = flat[observed.action_masks["Move"].actors.row_ids == env]
        assert mine.tolist() == (first[env] + rows).tolist()
        assert (packed.batch.ravel()[packed.inverse[mine]] == env).all()
    assert observed.packing(20).entities.shape[1] == 20


ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8)


NUMBERS = BatchView(ObsSpace({"A": EntityType((), 5)}), {"go": Categorical(("x", "y"), 5)})


def acted(rows, capacity=5):
    """An observation in which each environment has one actor per value of its row."""
    lengths = np.array([len(values) for values in rows], np.int32)
    places = np.arange(capacity, dtype=np.int32)
    actors = np.where(places < lengths[:, None], places, -1)
    return {"count": {"A": lengths}, "actors": {"go": actors}}


@hypothesis.given(ROWS)
@hypothesis.settings(deadline=None, derandomize=True)
def test_ragged_values_convert_both_ways(rows):
    values, observation = ragged(rows), acted(rows)
    assert [row.tolist() for row in split(values)] == rows
    np.testing.assert_array_equal(
        values.row_ids, [i for i, values in enumerate(rows) for _ in values]
    )
    padded = NUMBERS.padded_actions(observation, {"go": values})
    assert padded["go"].tolist() == [row + [0] * (5 - len(row)) for row in rows]
    again = NUMBERS.ragged_actions(observation, padded)
    for one, other in zip(again["go"], values, strict=True):
        np.testing.assert_array_equal(one, other)
    roomy = values.with_capacity()
    size = len(values.values)
    assert len(roomy.values) == len(roomy.row_ids) == ladder(size)
    assert (roomy.row_ids[size:] == len(rows)).all() and not roomy.values[size:].any()
    assert [row.tolist() for row in split(roomy)] == rows
    same = NUMBERS.padded_actions(observation, {"go": roomy})
    np.testing.assert_array_equal(same["go"], padded["go"])


def test_too_small_capacities_are_errors():
    rows = [[1], [2, 3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match=r"'go' must have at most 5 actors, its capacity; got 6"):
        NUMBERS.padded_actions(acted(rows), {"go": ragged(rows)})
    with pytest.raises(ValueError, match="with_capacity: capacity must be at least 7; got 3"):
        ragged(rows).with_capacity(3)


@pytest.mark.timeout(60)
def test_importing_entities_does_not_import_jax():
    code = "import sys, rlstack.entity, rlstack.entity.derive; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout == "False\n", done.stderr
