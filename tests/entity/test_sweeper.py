"""The MineSweeper batch that the documents of entity-gym, enn-ppo and rogue-net use as an example.

The batch has three states; every number here is copied from those documents.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlstack.entity import BatchView
from rlstack.entity.padded import PaddedCodec
from rlstack.types import StepType, TimeStep
from tests.entity.cases import SWEEPER, SWEEPER_ACTIONS, SWEEPER_OBS, ragged, split, stacked

FIRE = "Fire Orbital Cannon"


@pytest.fixture(scope="module")
def codec():
    return PaddedCodec(SWEEPER_OBS, SWEEPER_ACTIONS, "MineSweeper")


@pytest.fixture(scope="module")
def timestep(codec):
    observation = stacked([codec.encode(each)[0] for each in SWEEPER])
    zeros = np.zeros(3, np.float32)
    return TimeStep(np.full(3, StepType.MID), zeros, zeros + 1, observation)


@pytest.fixture(scope="module")
def view():
    return BatchView(SWEEPER_OBS, SWEEPER_ACTIONS)


def rows(ragged):
    return [values.tolist() for values in split(ragged)]


def test_vec_obs(view, timestep):
    observed = view.vec_obs(timestep)
    assert list(observed.features) == ["Mine", "Robot", "Orbital Cannon"]
    assert rows(observed.features["Mine"]) == [
        [[0, 2], [0, 1], [2, 2], [0, 0], [1, 0]],
        [[2, 1]],
        [[1, 0], [0, 1], [2, 2]],
    ]
    assert rows(observed.features["Robot"]) == [[[1, 1]], [[2, 0]], [[0, 0], [2, 0]]]
    assert rows(observed.features["Orbital Cannon"]) == [[], [[0]], []]
    assert all(np.all(flags.values) for flags in observed.visible.values())

    move = observed.action_masks["Move"]
    assert rows(move.actors) == [[5], [1], [3, 4]]
    assert rows(move.mask) == [
        [[True, True, True, True, True]],
        [[False, True, True, False, True]],
        [[True, False, True, False, True], [False, True, True, False, True]],
    ]
    assert move.actees is None
    fire = observed.action_masks[FIRE]
    assert rows(fire.actors) == [[], [2], []]
    assert rows(fire.actees) == [[], [0, 1], []]
    assert fire.mask is None

    np.testing.assert_array_equal(observed.reward, np.zeros(3, np.float32))
    np.testing.assert_array_equal(observed.done, [False, False, False])
    np.testing.assert_array_equal(observed.lengths, [6, 3, 5])


def test_actors_among_all_entities(view, timestep):
    observed = view.vec_obs(timestep)
    np.testing.assert_array_equal(observed.flat_actors("Move"), [5, 7, 12, 13])
    np.testing.assert_array_equal(observed.flat_actors(FIRE), [8])


def test_packing(view, timestep):
    packed = view.vec_obs(timestep).packing()
    np.testing.assert_array_equal(
        packed.entities, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 0, 0, 0], [9, 10, 11, 12, 13, 0]]
    )
    nan = np.nan
    batch = [[0, 0, 0, 0, 0, 0], [1, 1, 1, nan, nan, nan], [2, 2, 2, 2, 2, nan]]
    np.testing.assert_array_equal(np.where(packed.batch < 0, nan, packed.batch), batch)
    np.testing.assert_array_equal(packed.inverse, [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 15, 16])


def test_actions_go_back_to_entity_ids(view, codec, timestep):
    chosen = {
        "Move": ragged([[4], [1], [4, 2]]),
        FIRE: ragged([[], [0], []]),
    }
    padded = view.padded_actions(timestep.observation, chosen)
    np.testing.assert_array_equal(padded["Move"], [[4, 0], [1, 0], [4, 2]])
    np.testing.assert_array_equal(padded[FIRE], [[0], [0], [0]])
    again = view.ragged_actions(timestep.observation, padded)
    assert {name: rows(each) for name, each in again.items()} == {
        name: rows(each) for name, each in chosen.items()
    }

    told = []
    for env, observation in enumerate(SWEEPER):
        _, context = codec.encode(observation)
        action = {name: values[env] for name, values in padded.items()}
        codec.check_choices(context, action)
        told.append(codec.decode(context, action))
    robots = [("Robot", 0), ("Robot", 1)]
    for actions, actors, indices, labels in zip(
        told,
        (robots[:1], robots[:1], robots),
        ([4], [1], [4, 2]),
        (["Defuse"], ["Down"], ["Defuse", "Left"]),
        strict=True,
    ):
        assert actions["Move"].actors == actors
        assert actions["Move"].indices.tolist() == indices
        assert actions["Move"].labels == labels
    assert [(list(a[FIRE].actors), list(a[FIRE].actees)) for a in told] == [
        ([], []),
        ([("Orbital Cannon", 0)], [("Mine", 0)]),
        ([], []),
    ]
