"""bsuite as a benchmark: its settings, its scores, its page, and what runs record for them."""

import dataclasses
import importlib
import itertools
from xml.etree import ElementTree

import numpy as np
import pytest

from rlstack.programs.study.benchmark import bsuite, page, records, runs, suites
from rlstack.programs.study.benchmark.records import Record, TaskRecord
from rlstack.programs.study.benchmark.suites import Score, Task
from rlstack.programs.tools import charts
from tests.programs.study.benchmark.test_pages import scored

SUITE = suites.read("bsuite")
TASKS = {task.name: task for task in SUITE.tasks}
NOISE = "env.options.reward_noise"


def run(values=None, episodes=(100.0, 1_000.0), **means):
    """A run with these means of the numbers of its episodes, which may change at a point."""
    totals = {"episodes": episodes}
    for name, mean in means.items():
        parts = np.broadcast_to(mean, len(episodes))
        totals[name] = tuple(np.cumsum(parts * np.diff(episodes, prepend=0.0)).tolist())
    return scored(0.0, 1)._replace(values=values or {}, totals=totals)


def score(rule, found, episodes=1_000, **more):
    return bsuite.score(Task("a", "A-v1", episodes=episodes, score=Score(rule, **more)), found)


def test_the_settings_are_those_of_bsuite():
    sweep = pytest.importorskip("bsuite.sweep")
    theirs = {}
    for name, kwargs in sweep.SETTINGS.items():
        theirs.setdefault(name.split("/")[0], []).append((name, dict(kwargs)))
    assert set(theirs) == set(TASKS)
    total = 0
    for name, settings in theirs.items():
        task = TASKS[name]
        ours = []
        for values in itertools.product(*task.values.values()):
            options = {**task.env_options, **dict(zip(task.values, values, strict=True))}
            options = {key.rpartition(".")[2]: value for key, value in options.items()}
            ours += [options] * task.seeds
        for (_, wanted), found in zip(settings, ours, strict=True):
            found = dict(found)
            if "reward_noise" in found:
                found["noise_scale"] = found.pop("reward_noise")
            if name.startswith("deep_sea"):  # whose default is that of the settings
                assert wanted.pop("mapping_seed") == 42
                assert found.pop("deterministic", True) is (name == "deep_sea")
            if "x_reward_threshold" in wanted:
                height = wanted["height_threshold"]
                assert wanted.pop("x_reward_threshold") == pytest.approx(1 - height)
            wanted.pop("seed", None)
            rest = {"umbrella_distract": {"chain_length": 20}, "memory_size": {"memory_length": 2}}
            assert found == {**rest.get(name, {}), **wanted}, name
        assert {sweep.EPISODES[one] for one, _ in settings} == {task.episodes}
        tags = {tag for tag, names in sweep.TAGS.items() if settings[0][0] in names}
        assert set(task.tags) == tags
        total += SUITE.runs_of(task)
    assert total == len(sweep.SWEEP) == 468
    assert sum(SUITE.runs_of(task, few=True) for task in SUITE.tasks) == 76
    for task in SUITE.tasks:
        for option, some in task.few.items():
            assert set(some) <= set(task.values[option])


def test_scores_are_shares_of_the_regret():
    two = [run(regret=0.1), run(regret=0.2)]
    assert score("regret", two, limit=0.5) == pytest.approx(1 - 0.15 / 0.5)
    assert score("regret", [run(regret=0.7)], limit=0.5) == 0.0
    assert score("regret", [run(regret=-0.1)], limit=0.5) == 1.0
    # Episodes after those of the experiment do not count, and a run with fewer has a score.
    assert score("regret", [run(regret=(0.1, 5.0))], episodes=100, limit=0.5) == pytest.approx(0.8)
    assert score("regret", two, episodes=9_999, limit=0.5) == pytest.approx(0.7)
    half = [run(regret=500.0, solved=(0.0, 0.001)), run(regret=500.0, solved=0.0)]
    assert score("regret", half, limit=1_000, solves=True) == pytest.approx(0.5 * (0.5 + 0.5))


def test_noise_and_scale_lower_a_score_by_what_they_change():
    found = [
        run({NOISE: noise}, regret=regret) for noise, regret in ((0.1, 0), (1, 0.25), (9, 0.5))
    ]
    # The scores are 1, 0.5 and 0, with the deviation sqrt(1 / 6).
    wanted = 0.5 * (0.5 + 0.5 - np.sqrt(1 / 6))
    assert score("regret", found, limit=0.5, by=NOISE, bound=True) == pytest.approx(wanted)
    assert score("regret", found[1:], limit=0.5, by=NOISE) == pytest.approx(0.25)
    ends = [*found[1:], run({NOISE: 2}, regret=0.5)]
    assert score("regret", ends, limit=0.5, by=NOISE, bound=True) == pytest.approx(0.5 / 6)


def test_other_rules_count_settings():
    length = "env.options.memory_length"
    found = [run({length: 1}, regret=0.7), run({length: 2}, regret=0.8)]
    assert score("below", found, limit=0.75, by=length) == 0.5
    at = (100.0, 1_100.0, 1_200.0)

    def sea(size, regret):
        return run({"env.options.size": size}, at, regret=regret)

    early, late = (1.0, 0.5, 0.5), (1.0, 0.95, 0.0)  # below 0.9 of all at 1,100 and at 1,200
    for size, regret, wanted in ((10, early, 1), (10, late, 0), (12, late, 1), (30, 1.0, 0)):
        assert score("found", [sea(size, regret)], 10_000, limit=0.9) == wanted, (size, regret)
    lucky = (0.5, 1.0, 1.0)
    assert score("found", [sea(20, lucky)], 10_000, limit=0.8, after=100) == 1
    assert score("found", [sea(20, lucky)], 10_000, limit=0.8, after=101) == 0
    # Of 1,000 answers nine in ten are wrong at first, and none of the last hundred.
    answers = run(episodes=(900.0, 1_000.0), regret=(1.8, 0.0))
    assert score("accuracy", [answers], limit=1.8) == pytest.approx(0.5 * (0.1 + 1.0))


def test_what_cannot_be_scored_says_why():
    with pytest.raises(ValueError, match="must have a rule and runs"):
        score("regret", [], limit=1.0)
    with pytest.raises(ValueError, match="no regret of its episodes in its logs"):
        score("regret", [scored(0.0, 1)], limit=1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_scores_are_those_of_bsuites_analysis(monkeypatch):
    """Of data frames with the same sums, at the episodes at which bsuite writes logs."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("bsuite")
    joined = pandas.concat
    monkeypatch.setattr(pandas.Series, "append", lambda a, b: joined([a, b]), raising=False)
    rng = np.random.default_rng(0)
    ratios = np.array([1, 1.2, 1.4, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9])
    for task in SUITE.tasks:
        analysis = importlib.import_module(f"bsuite.experiments.{task.name}.analysis")
        at = np.array([*(10**p * r for p in range(4) for r in ratios), 10_000.0])
        at = at[(at >= 10) & (at <= task.episodes)]
        steps, ours, frames = np.diff(at, prepend=0.0), [], []
        every = itertools.product(*task.values.values())
        choices = [dict(zip(task.values, one, strict=True)) for one in every]
        for number, values in enumerate(choices * task.seeds):
            limit = task.score.limit
            mean = rng.uniform(0, 1.5) * limit * np.linspace(1.2, 0.3, len(at))
            regret = np.cumsum(
                np.clip(mean, 0, 1) * steps if task.score.rule == "found" else mean * steps
            )
            solved = np.cumsum(steps) * (rng.random() < 0.5) * 0.01
            totals = {"episodes": tuple(at), "regret": tuple(regret), "solved": tuple(solved)}
            ours.append(scored(0.0, 1)._replace(values=values, totals=totals))
            best = {"cartpole": 1_000, "cartpole_swingup": 700, "discounting_chain": 1.1}
            family = task.name.removesuffix("_noise").removesuffix("_scale")
            raw = best.get(family, 1) * at - regret
            if family == "mountain_car":
                raw = -100 * at - regret
            good = 501.0 if family == "cartpole" else 101.0
            settings = {key.rpartition(".")[2]: value for key, value in values.items()}
            settings["noise_scale"] = settings.pop("reward_noise", 0.0)
            frames.append(pandas.DataFrame({
                "bsuite_id": f"{task.name}/{number}", "episode": at, "total_regret": regret,
                "raw_return": raw, "total_return": raw, "total_perfect": at - regret / 2,
                "total_bad_episodes": regret, "best_episode": np.where(solved > 0, good, 0.0),
                **settings,
            }))  # fmt: skip
        wanted = analysis.score(pandas.concat(frames, ignore_index=True))
        assert bsuite.score(task, ours) == pytest.approx(wanted, abs=1e-9), task.name


def line(episodes, mean, regret, solved=0.0):
    return {
        "env_frames": 10 * episodes, "actor/episodes": episodes, "actor/episode_return": mean,
        "episode/regret": regret, "episode/solved": solved,
    }  # fmt: skip


def test_sums_over_episodes_are_recorded():
    lines = [line(10, 1.0, 2.0), {"env_frames": 5, "evaluator/episode_return": 3.0}]
    lines += [line(30, 0.0, 1.0, 0.5), line(33, 0.0, 0.0)]
    found = records._totals(lines)
    assert found["episodes"] == (10, 12, 14, 17, 20, 25, 30, 33)
    assert found["regret"] == (20, 22, 24, 27, 30, 35, 40, 40)
    assert found["solved"] == (0, 1, 2, 3.5, 5, 7.5, 10, 10)
    assert records._totals([{"env_frames": 1, "actor/episode_return": 1.0}]) == {}


def record(agent, numbers):
    """A record of runs with these mean regrets, by task."""
    tasks = {}
    for name, regrets in numbers.items():
        task = TASKS[name]
        choices = itertools.product(*task.settings(few=True).values())
        values = [dict(zip(task.values, one, strict=True)) for one in choices]
        made = [
            run(one, (100.0, 10_000.0), regret=regret)
            for one, regret in zip(values * (task.few_seeds or task.seeds), regrets, strict=True)
        ]
        tasks[name] = TaskRecord(SUITE.experiment(task, "ppo", 300_000), made)
    return Record("bsuite", agent, tasks)


def test_a_page_has_scores_by_tag_and_a_chart(tmp_path):
    one = record("ppo", {"bandit": [0.0, 0.1, 0.2], "catch": [0.8] * 3, "memory_size": [0, 0, 1]})
    two = record("dqn", {"bandit": [0.5] * 3, "catch": [0.0] * 3, "memory_size": [1] * 3})
    assert records.read_all(SUITE, records.write(SUITE, one, tmp_path).parents[2]) == [one]
    made = page.pages(SUITE, [two, one])
    text = made["bsuite.md"]
    assert set(made) == {"bsuite.md", "bsuite/tags.svg"} and "(bsuite/tags.svg)" in text
    assert "| basic | 5 | 0.50 | 0.65 |" in text  # of 0 and 1, and of 0.8 and 0.5
    assert "| memory | 2 | 0.00 | 0.67 |" in text
    assert "| exploration | 3 |  |  |" in text
    assert "| bandit | basic | 10,000 | 0.00 (3) | 0.80 (3) |" in text
    assert "--agent ppo --settings few --out docs/benchmarks" in text
    assert "mnist, mnist_noise, mnist_scale did not run, because no data was there" in text
    assert "ppo lacks bandit_noise" in text and "lacks mnist" not in text
    svg = ElementTree.fromstring(made["bsuite/tags.svg"])
    names = [x.text for x in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert names[1] == "ppo: basic 0.65, memory 0.67, credit assignment 0.50"
    short = dataclasses.replace(TASKS["bandit"], episodes=20_000)
    assert bsuite._runs(short, one) == "(3; 10,000 episodes)"
    text = page.pages(SUITE, [record("ppo", {"mountain_car": [100] * 3})])["bsuite.md"]
    assert "ppo has at most 300,000 frames a run, fewer than the benchmark" in text
    assert "--settings few --budget 300000 --out" in text


def test_a_radar_has_the_first_axis_on_top():
    drawn = charts.picture(
        charts.Radar("t", ["a", "b", "c", "d"], [("x & y", [1.0, 0.5, 0.0, 0.25])])
    )
    svg = ElementTree.fromstring(drawn)
    ring, *_, shape = [
        [tuple(map(float, place.split(","))) for place in x.get("points").split()]
        for x in svg.iter("{http://www.w3.org/2000/svg}polygon")
    ][3:]
    (middle, top), (right, _), (_, bottom), (left, _) = ring
    radius = (bottom - top) / 2
    assert right - middle == middle - left == radius
    assert shape == [
        (middle, top), (middle + radius / 2, top + radius), (middle, top + radius),
        (middle - radius / 4, top + radius),
    ]  # fmt: skip


def test_few_settings_and_then_all_are_one_study(tmp_path):
    few = runs.jobs_of(SUITE, "ppo", tmp_path, tasks=["memory_len", "catch"], few=True)
    assert [job.number for job in few] == [5, 3]
    assert few[0].study.base.stop.episodes == 10_000
    names = {trial.name for trial in few[0].study.trials()}
    assert "memory_length=100,seed=1" in names
    for job in few:
        job.path.mkdir()
        job.study.write(job.path)
    every = runs.jobs_of(SUITE, "ppo", tmp_path, tasks=["memory_len", "catch"])
    assert [job.number for job in every] == [23, 20]
    assert names < {trial.name for trial in every[0].study.trials()}
    assert "mnist" not in [job.task.name for job in runs.jobs_of(SUITE, "ppo", tmp_path / "x")]
    shorter = SUITE.experiment(TASKS["catch"], "ppo", 50_000)
    longer = SUITE.experiment(TASKS["catch"], "ppo", 500_000)
    assert (shorter.frames, longer.frames) == (50_000, 90_000)
