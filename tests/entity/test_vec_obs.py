"""Ragged records of batches say, entity by entity, what the environments of the batch show."""

from __future__ import annotations

import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rlstack.entity import GLOBAL, BatchView
from rlstack.entity.ragged import (
    from_lists,
    from_padded,
    ladder,
    offsets,
    split,
    to_padded,
    with_capacity,
)
from rlstack.entity.tables import Table
from rlstack.entity.vec_obs import flat_actors, packing
from rlstack.types import StepType, TimeStep
from tests.entity.cases import Skirmish, entities, legal_actions, stacked
from tests.entity.test_tables import observations, who_and_what


def batch(shown):
    table = Table(Skirmish.obs_space, Skirmish.action_space, "Skirmish")
    rows = [table.observe(observation) for observation in shown]
    size = len(rows)
    steps = np.where(np.arange(size) % 2, StepType.LAST, StepType.MID).astype(np.int32)
    padded = stacked([row[0] for row in rows])
    return TimeStep(steps, np.arange(size, dtype=np.float32), np.ones(size), padded), rows, table


def view():
    return BatchView(Skirmish.obs_space, Skirmish.action_space)


@hypothesis.given(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
@hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
def test_vec_obs_says_what_each_environment_shows(seeds):
    """Types that come late, absent actions, masks of some environments only, nobody at all."""
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
        actors, legal = who_and_what(each, name)
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
def test_actions_go_there_and_back_and_name_the_same_entities(seed):
    shown = observations(seed, 6)
    timestep, rows, table = batch(shown)
    observation = timestep.observation
    action = legal_actions(observation, table.action_spec, np.random.default_rng(seed))
    ragged = view().ragged_actions(observation, action)
    again = view().padded_actions(observation, ragged)
    for name, values in action.items():
        assert again[name].dtype == np.int32
        np.testing.assert_array_equal(again[name], values)
    for env, (each, (_, roster)) in enumerate(zip(shown, rows, strict=True)):
        mine = {name: values[env] for name, values in action.items()}
        table.check_choices(roster, mine)
        told = table.act(roster, mine)
        there = entities(each)
        names = {("Scout", i): entity for i, entity in enumerate(each.ids["Scout"])}
        actees = [there[i] for i in split(ragged["Aim"])[env].tolist()]
        assert told["Aim"].actees == [names.get(entity, entity) for entity in actees]
        assert told["Move"].indices.tolist() == split(ragged["Move"])[env].tolist()
        assert told["Shout"].actors == [GLOBAL] * len(split(ragged["Shout"])[env])


def test_packed_rows_hold_every_entity_and_actors_are_found():
    shown = [each for seed in range(5) for each in observations(seed, 8)]
    observed = view().vec_obs(batch(shown)[0])
    packed = packing(observed)
    assert packed.entities.shape[1] == observed.lengths.max()
    assert packed.entities.shape[0] < len(shown)
    first = np.cumsum(observed.lengths) - observed.lengths
    for env, rows in enumerate(split(observed.action_masks["Move"].actors)):
        flat = flat_actors(observed, "Move")
        mine = flat[observed.action_masks["Move"].actors.row_ids == env]
        assert mine.tolist() == (first[env] + rows).tolist()
        assert (packed.batch.ravel()[packed.inverse[mine]] == env).all()
    assert packing(observed, 20).entities.shape[1] == 20


ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8)


@hypothesis.given(ROWS)
@hypothesis.settings(deadline=None, derandomize=True)
def test_ragged_values_go_there_and_back(rows):
    ragged = from_lists(rows, (), np.int32)
    assert [values.tolist() for values in split(ragged)] == rows
    np.testing.assert_array_equal(
        ragged.row_ids, [i for i, values in enumerate(rows) for _ in values]
    )
    assert offsets(ragged).tolist() == [sum(map(len, rows[:i])) for i in range(len(rows))]
    padded = to_padded(ragged, 5, fill=-1)
    assert padded.tolist() == [values + [-1] * (5 - len(values)) for values in rows]
    again = from_padded(padded, ragged.lengths)
    for one, other in zip(again, ragged, strict=True):
        np.testing.assert_array_equal(one, other)
    roomy = with_capacity(ragged)
    size = len(ragged.values)
    assert len(roomy.values) == len(roomy.row_ids) == ladder(size)
    assert (roomy.row_ids[size:] == len(rows)).all() and not roomy.values[size:].any()
    assert [values.tolist() for values in split(roomy)] == rows
    np.testing.assert_array_equal(to_padded(roomy, 5, fill=-1), padded)


def test_too_little_room_is_an_error():
    ragged = from_lists([[1], [2, 3, 4]], (), np.int32)
    with pytest.raises(ValueError, match=r"to_padded: capacity must be at least 3.*got 2"):
        to_padded(ragged, 2)
    with pytest.raises(ValueError, match="with_capacity: must hold 4 values; got a capacity of 3"):
        with_capacity(ragged, 3)


@pytest.mark.timeout(60)
def test_workers_that_import_entities_do_not_pay_for_jax():
    code = "import sys, rlstack.entity, rlstack.entity.derive; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout == "False\n", done.stderr
