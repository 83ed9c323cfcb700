"""Several policies in one process: parity with one policy, resuming, self-play."""

import dataclasses

import numpy as np
import pytest

from rlstack.acting.evaluator import by_policy
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.storage import checkpoint
from tests.programs.multi_policy.cases import chain, leaves_equal, selfplay, trained

pytestmark = pytest.mark.timeout(180)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("cartpole-ppo", marks=pytest.mark.chosen), "cartpole-dqn"]
)
def test_a_set_of_one_policy_is_the_run_of_that_policy(name):
    experiment = preset(name)
    several = dataclasses.replace(experiment, policies={"all": MemberConfig()})
    one, of_one = SingleProcessRun(experiment), SingleProcessRun(several)
    try:
        for _ in range(2):
            trained(one, 100)
            trained(of_one, 100)
            assert one.env_frames == of_one.env_frames
            assert one.learner.version == of_one.learner.version > 0
            assert leaves_equal(one.learner.params, of_one.learner.params["all"])
            assert leaves_equal(
                one.player.inferencer.save(), of_one.players["all"].inferencer.save()
            )
            one.restart_environments()
            of_one.restart_environments()
        found, same = one.evaluate(), of_one.evaluate()
        np.testing.assert_array_equal(found.returns, same.returns)
    finally:
        one.close()
        of_one.close()


@pytest.mark.slow
@pytest.mark.chosen
def test_policies_of_different_algorithms_learn_side_by_side():
    loop = SingleProcessRun(chain())
    try:
        before = loop.learner.params
        names = trained(loop, 40)
        assert loop.env_frames == 40 * 8 - loop_firsts(40, 8)
        learned = loop.by_policy()
        assert learned["retailer"]["learner_steps"] == 4
        assert learned["distributor"]["learner_steps"] > 10
        assert "factory" not in learned
        for name in before:
            assert not leaves_equal(before[name], loop.learner.params[name])
        for name in ("retailer", "distributor"):
            assert {f"{name}/actor/episode_return", f"{name}/learner/loss"} <= names
            assert loop.stats()[f"{name}/learner/steps"] == learned[name]["learner_steps"]
        assert {"factory/actor/episode_return", "actor/episode_return"} <= names
        assert loop.learner.version == 4
        found = by_policy(loop.evaluate())
        assert {name: len(returns) for name, returns in found.items()} == {
            "retailer": 4,
            "distributor": 4,
        }
    finally:
        loop.close()


def loop_firsts(steps, rows):
    """The number of FIRST steps among the steps of these rows, in episodes of 8 weeks."""
    return rows * -(-steps // 9)


@pytest.mark.slow
@pytest.mark.parametrize("make", [pytest.param(selfplay, marks=pytest.mark.chosen), chain])
def test_a_resumed_set_equals_an_uninterrupted_one(tmp_path, make):
    unbroken, broken, resumed = (SingleProcessRun(make()) for _ in range(3))
    try:
        for loop in (unbroken, broken):
            trained(loop, 8 * 4 + 1)  # the end of an unroll
        unbroken.restart_environments()
        checkpoint.save(tmp_path, broken.env_frames, broken.save(), {})
        saved = checkpoint.restore(checkpoint.latest(tmp_path), resumed.template())
        resumed.load(saved)
        assert resumed.env_frames == broken.env_frames == unbroken.env_frames
        for loop in (unbroken, resumed):
            trained(loop, 33)
        assert unbroken.learner.version == resumed.learner.version > 5
        assert leaves_equal(unbroken.save(), resumed.save())
    finally:
        for loop in (unbroken, broken, resumed):
            loop.close()


def test_self_play_keeps_versions_and_their_win_rates():
    loop = SingleProcessRun(selfplay("prioritised"))
    try:
        past = loop.players["past"]
        assert list(past.versions.frames) == [0]
        trained(loop, 40)
        assert past.versions.frames[0] == 0
        assert len(past.versions.frames) == 3
        assert past.versions.frames[-1] == 80  # 20 throws of 4 games, a version every 16
        np.testing.assert_allclose(past.versions.probabilities("prioritised").sum(), 1.0)
        assert not np.allclose(past.versions.win_rates, 0.5)
        assert loop.stats()["past/versions"] == 3
        np.testing.assert_array_equal(loop.evaluate().returns, loop.evaluate().returns)
    finally:
        loop.close()
