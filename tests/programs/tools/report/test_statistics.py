"""Which runs are compared, and with which numbers."""

import numpy as np
import pytest

from rlstack.programs.tools.report import statistics
from rlstack.programs.tools.report.normalisation import from_words
from rlstack.programs.tools.report.runs import methods, read, read_groups
from tests.programs.tools.report.made_runs import make_run, make_runs


def groups(root, **scores_of_tasks):
    """Groups of runs of one method, for each task."""
    return [
        group
        for task, scores in scores_of_tasks.items()
        for group in read_groups(task, make_runs(root / task, scores, env=task))
    ]


@pytest.fixture
def pair(tmp_path):
    sources = {
        "a": groups(tmp_path / "a", Pong=[0, 10, 20], Boxing=[1, 2, 3, 4]),
        "b": groups(tmp_path / "b", Pong=[-5, 10, 15], Freeway=[7, 8]),
    }
    return methods(sources, "directory")


def test_scores_are_averaged_over_tasks_only_when_normalised(pair):
    found = statistics.compute(pair)
    assert found.over_tasks == []
    assert statistics.profiles(found) == []
    rows = {(one.method, one.tasks): one for one in found.of_tasks}
    assert rows["a", ("Boxing",)].values["mean"].estimate == 2.5
    assert rows["a", ("Pong",)].runs == 3
    assert "optimality gap" not in rows["a", ("Pong",)].values

    found = statistics.compute(pair, from_words(["0", "20"]))
    one, _ = found.over_tasks
    assert one.tasks == ("Boxing", "Pong")
    assert one.runs == 7
    assert one.values["mean"].estimate == pytest.approx((2.5 + 10) / 2 / 20)
    assert one.values["optimality gap"].estimate == pytest.approx(1 - (2.5 + 10) / 2 / 20)
    assert one.values["IQM"].estimate == pytest.approx((1 + 2 + 3 + 4 + 10) / 5 / 20)
    for interval in one.values.values():
        assert interval.low < interval.estimate < interval.high


def test_methods_are_compared_on_the_tasks_that_both_have(pair):
    (found,) = statistics.compute(pair, compare=True).comparisons
    assert (found.method, found.other, found.tasks, found.runs) == ("a", "b", ("Pong",), (3, 3))
    assert found.probability.estimate == pytest.approx((1 + 1.5 + 3) / 9)
    assert str(found).startswith("a is better than b on Pong with probability 0.")
    with pytest.raises(ValueError, match="task in common; got a: Boxing, Pong"):
        statistics.compute(pair[:1], compare=True)


def test_several_common_tasks_also_have_one_probability(tmp_path):
    sources = {
        "a": groups(tmp_path / "a", Pong=[1, 2], Boxing=[1, 2]),
        "b": groups(tmp_path / "b", Pong=[0, 0], Boxing=[3, 3]),
    }
    found = statistics.compute(methods(sources, "directory"), compare=True).comparisons
    assert [(len(one.tasks), one.probability.estimate) for one in found] == [
        (2, 0.5), (1, 0.0), (1, 1.0),
    ]  # fmt: skip
    assert "on 2 tasks with" in str(found[0])


def test_methods_by_preset_agent_and_directory(tmp_path):
    def group(name, preset, **options):
        return read_groups(name, make_runs(tmp_path / name, [1, 2], name=preset, **options))

    ppo, dqn = group("p", "cartpole-ppo"), group("d", "cartpole-dqn")
    sources = {"one": ppo, "two": [*dqn, *group("r", "cartpole-rainbow", env="Pong")]}
    found = {by: {m.name: set(m.tasks) for m in methods(sources, by)} for by in ("preset", "agent")}
    assert set(found["preset"]) == {"p", "d", "r"}
    assert set(found["agent"]) == {"PPO", "DQN", "C51"}
    found = {m.name: set(m.tasks) for m in methods(sources, "directory")}
    assert found == {"one": {"CartPole-v1"}, "two": {"CartPole-v1", "Pong"}}
    with pytest.raises(ValueError, match="got one with p and d, which are both of CartPole-v1"):
        methods({"one": [*ppo, *dqn]}, "directory")


def test_curves_are_over_the_frames_of_all_runs(tmp_path):
    first = make_run(tmp_path / "1", 1.0, curve=[(0, 0.0), (100, 10.0)])
    second = make_run(tmp_path / "2", 1.0, curve=[(50, 20.0), (200, 20.0)], seed=2)
    curve = statistics.learning_curve("m", [[read(first), read(second)]])
    assert (curve.x[0], curve.x[-1]) == (50, 100)
    np.testing.assert_allclose(curve.band.estimate, (curve.x / 10 + 20) / 2)
    np.testing.assert_allclose(curve.band.low, curve.x / 10)
    np.testing.assert_allclose(curve.band.high, 20)
    later = make_run(tmp_path / "3", 1.0, curve=[(300, 0.0), (400, 0.0)], seed=3)
    short = make_run(tmp_path / "4", 1.0, curve=[(300, 0.0)], seed=4)
    assert statistics.learning_curve("m", [[read(first), read(later)]]) is None
    assert statistics.learning_curve("m", [[read(short)]]) is None
    assert statistics.learning_curve("m", [[read(first), read(short)]]) is not None


def test_profiles_fall_from_one_to_zero(pair):
    for profile in statistics.profiles(statistics.compute(pair, from_words(["-10", "20"]))):
        assert profile.band.estimate[0] == 1
        assert profile.band.estimate[-1] == 0
        assert np.all(np.diff(profile.band.estimate) <= 0)
        assert np.all(profile.band.low <= profile.band.high)
