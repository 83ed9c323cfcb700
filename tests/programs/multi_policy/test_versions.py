"""The earlier versions of a policy: which are kept, and which are drawn."""

import dataclasses

import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack.programs.build.policies.history import VersionedInferencer
from rlstack.programs.build.policies.versions import Versions
from rlstack.programs.config.member_config import HistoryConfig
from tests.agent_cases import FIRST, MID, random_timesteps
from tests.families.test_wrapped import Telling

CFG = HistoryConfig(of="learner", period=10, max_versions=4)


def numbered(number):
    return {"w": np.full(2, number, np.float32)}


def kept(frames):
    versions = Versions(CFG, numbered(0))
    for at in frames:
        versions.add(at, numbered(at))
    return versions


def test_versions_stay_spread_over_the_history():
    versions = kept(range(10, 170, 10))
    frames = versions.frames
    assert frames[0] == 0
    assert frames[-1] == 160
    assert len(frames) == 4
    assert np.diff(frames).max() <= 2 * np.diff(frames).min() + 10
    for slot, at in zip(versions.slots, frames, strict=True):
        np.testing.assert_array_equal(versions.params(int(slot))[1]["w"], at)


def test_the_version_is_dropped_whose_neighbours_are_closest():
    versions = kept([10, 50, 55])
    versions.add(100, numbered(100))
    assert list(versions.frames) == [0, 10, 55, 100]  # 50 was between 10 and 55


@pytest.mark.parametrize(("frames", "due"), [(9, False), (10, True), (19, True)])
def test_a_version_is_due_after_each_period(frames, due):
    versions = Versions(CFG, numbered(0))
    assert versions.is_due(frames) is due
    versions.add(12, numbered(12))
    assert not versions.is_due(19)
    assert versions.is_due(20)


def test_probabilities_as_worked_by_hand():
    versions = kept([10, 20])
    np.testing.assert_allclose(versions.win_rates, 0.5)
    np.testing.assert_allclose(versions.probabilities("uniform"), [1 / 3] * 3)
    np.testing.assert_allclose(versions.probabilities("latest"), [0, 0, 1])
    np.testing.assert_allclose(versions.probabilities("prioritised"), [1 / 3] * 3)
    first, second, third = versions.slots
    versions.record(first, 1.0)  # one game and the prior: (1 + 1/2) / 2
    versions.record(second, 0.0)
    np.testing.assert_allclose(versions.win_rates, [0.75, 0.25, 0.5])
    np.testing.assert_allclose(
        versions.probabilities("prioritised"), np.array([1, 9, 4]) / 14, rtol=1e-6
    )
    drawn = versions.draw(np.random.default_rng(0), 2000, "prioritised")
    assert np.mean(drawn == second) == pytest.approx(9 / 14, abs=0.04)
    for _ in range(500):
        versions.record(third, 1.0)
    assert 0.97 < versions.win_rates[2] < 1.0


def test_loaded_versions_are_those_that_were_saved():
    versions = kept([10, 20, 30, 40])
    versions.record(int(versions.slots[1]), 1.0)
    other = Versions(CFG, numbered(7))
    other.params(0)
    other.load(versions.save())
    np.testing.assert_array_equal(other.frames, versions.frames)
    np.testing.assert_array_equal(other.win_rates, versions.win_rates)
    for slot in versions.slots.tolist():
        np.testing.assert_array_equal(other.params(slot)[1]["w"], versions.params(slot)[1]["w"])
    other.add(50, numbered(50))  # what was loaded can be changed
    assert other.frames[-1] == 50
    assert versions.frames[-1] == 40


def test_a_smaller_history_of_other_rules():
    cfg = dataclasses.replace(CFG, max_versions=2)
    versions = Versions(cfg, numbered(0))
    for at in (10, 20, 30):
        versions.add(at, numbered(at))
    assert list(versions.frames) == [0, 30]


def test_a_version_explores_as_the_policy_did_when_it_was_kept():
    versions = Versions(CFG, np.zeros((), np.int32))
    new = versions.add(40, np.int32(7))
    slots = np.array([0, new, new])
    inferencer = VersionedInferencer(
        Telling(), versions, lambda begins, _: slots[begins], 3, jax.random.PRNGKey(0), num_envs=4
    )
    timestep = random_timesteps(specs.Array((2,), np.float32), [FIRST] * 3)
    for _ in range(3):  # whatever its rows have acted since
        params, counts = inferencer.inference(None, timestep).agent_output
        assert params.tolist() == [0, 7, 7]
        assert counts.env_steps.tolist() == [0, 10, 10]
        timestep = timestep._replace(step_type=np.full(3, MID, np.int32))
    slots[:] = new, 0, new
    timestep = timestep._replace(step_type=np.full(3, FIRST, np.int32))
    _, counts = inferencer.inference(None, timestep).agent_output
    assert counts.env_steps.tolist() == [10, 0, 10]
