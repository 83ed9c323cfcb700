"""The trials of a sweep, in Optuna's database."""

import dataclasses
import sys

import pytest

from rlstack.programs.config.presets import preset
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study.optuna import Database
from rlstack.programs.study.space import Range
from rlstack.programs.study.study import SearchConfig, Study

pytest.importorskip("optuna")

RATE = "agent.optimizer.learning_rate"
SEARCH = Study(
    preset("cartpole-ppo"),
    (1,),
    {
        RATE: Range(1e-5, 1e-2, log=True),
        "agent.num_epochs": Range(2, 8, whole=True, step=2),
        "network.torso": ("mlp", "nature"),
    },
    SearchConfig(trials=4),
)


@pytest.fixture
def root(tmp_path):
    for worker in ("one", "two"):
        (tmp_path / "sweep" / "workers" / worker).mkdir(parents=True)
    return tmp_path / "sweep"


def stored(url):
    return dataclasses.replace(SEARCH, scheduler=SearchConfig(trials=4, storage=url))


def claimed(root, worker):
    return RunDir(root / "workers" / worker).claimed()


def test_trials_have_values_of_the_space_and_end_in_the_table(root):
    study = Database(SEARCH, root, "one")
    asked = [study.ask() for _ in range(4)]
    assert study.ask() is None
    for number, trial in enumerate(asked):
        assert (trial.number, trial.name) == (number, f"trials/{number}")
        assert 1e-5 <= trial.values[RATE] <= 1e-2
        assert trial.values["agent.num_epochs"] in (2, 4, 6, 8)
        assert trial.values["network.torso"] in ("mlp", "nature")
    study.report(0, 1, 3.0)
    study.complete(0, 5.0)
    study.report(1, 1, -2.0)
    study.prune(1)
    study.fail(2, "it broke")
    rows = Database(SEARCH, root).trials()
    assert [row.state for row in rows] == ["complete", "pruned", "failed", "running"]
    assert [row.value for row in rows] == [5.0, -2.0, None, None]
    assert rows[0].values == asked[0].values and rows[0].evaluations == {1: 3.0}
    assert (rows[2].error, rows[3].name) == ("it broke", "trials/3")
    assert study.ask() is None  # a trial that failed counts


def test_the_seed_gives_the_values_also_to_a_sweep_that_goes_on(tmp_path):
    def values(name, seed, restart):
        base = dataclasses.replace(SEARCH.base, seed=seed)
        made = dataclasses.replace(SEARCH, base=base)
        study, found = None, []
        for _ in range(4):
            if study is None or restart:
                study = Database(made, tmp_path / name, "one")
            trial = study.ask()
            study.complete(trial.number, trial.values[RATE])
            found.append(trial.values)
        return found

    for name in "abc":
        (tmp_path / name).mkdir()
    whole = values("a", 1, restart=False)
    assert len({found[RATE] for found in whole}) == 4
    assert values("b", 1, restart=True) == whole
    assert values("c", 2, restart=False) != whole


def test_a_trial_worse_than_the_median_is_pruned_after_five_are_complete(root):
    study = Database(dataclasses.replace(SEARCH, scheduler=SearchConfig(trials=7)), root, "one")
    for _ in range(5):
        number = study.ask().number
        assert not any(study.report(number, k, 10.0 * k) for k in (1, 2, 3, 4))
        study.complete(number, 40.0)
    bad, good = study.ask().number, study.ask().number
    assert [study.report(bad, k, 1.0) for k in (1, 2, 3)] == [False, False, True]
    assert not any(study.report(good, k, 11.0 * k) for k in (1, 2, 3, 4))


def test_trials_of_a_command_that_ended_are_tried_again(root):
    with claimed(root, "one"):
        study = Database(SEARCH, root, "one")
        first, second = study.ask(), study.ask()
        study.complete(first.number, 1.0)
        (root / second.name).mkdir(parents=True)
        with claimed(root, "two"):
            third = Database(SEARCH, root, "two").ask()
            assert third.values != second.values  # the first command has it still
    with claimed(root, "two"):
        other = Database(SEARCH, root, "two")
        again = other.ask()
        assert again.values == second.values
        assert again.name == second.name
        last = other.ask()
        assert last is not None and other.ask() is None  # a repeated trial counts once
        states = [row.state for row in other.trials()]
    assert states == ["complete", "interrupted", "running", "running", "running"]


def test_a_trial_of_another_machine_is_left_to_it(root):
    Database(SEARCH, root, "a-folder-that-is-elsewhere").ask()
    with claimed(root, "one"):
        study = Database(SEARCH, root, "one")
        assert [study.ask().number for _ in range(3)] == [1, 2, 3]
        assert study.ask() is None


def test_two_commands_that_ask_for_the_last_trial_get_one(root, monkeypatch):
    study = Database(dataclasses.replace(SEARCH, scheduler=SearchConfig(trials=1)), root, "one")
    count = study._count

    def late(before=float("inf")):
        """Another command asks after this one has counted."""
        found = count(before)
        if before == float("inf") and not found:
            assert (
                Database(
                    dataclasses.replace(SEARCH, scheduler=SearchConfig(trials=1)), root, "two"
                ).ask()
                is not None
            )
        return found

    monkeypatch.setattr(study, "_count", late)
    assert study.ask() is None
    assert len(study.trials()) == 1


@pytest.mark.parametrize("name", ["a?b=c", "a b", "100%25", "a#b", "{trial}", "ü&uri=false"])
def test_the_database_is_in_the_directory_of_the_sweep_whatever_its_name(tmp_path, name):
    root = tmp_path / name / "sweep"
    root.mkdir(parents=True)
    study = Database(SEARCH, root)
    study.complete(study.ask().number, 1.0)
    assert [path.name for path in root.iterdir()] == ["study.db"]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [row.value for row in Database(SEARCH, root).trials()] == [1.0]


def test_a_database_of_an_earlier_version_is_read(tmp_path):
    (root := tmp_path / "sweep").mkdir()
    Database(stored(f"sqlite:///{root / 'study.db'}"), root).ask()
    assert [row.number for row in Database(SEARCH, root).trials()] == [0]


def test_a_study_of_other_values_is_refused(root):
    Database(SEARCH, root)
    other = dataclasses.replace(SEARCH, values={RATE: Range(1e-4, 1e-2)})
    with pytest.raises(ValueError, match=r"study 'sweep' that searches other(?s:.*)--run-dir"):
        Database(other, root)


def test_a_database_that_cannot_be_opened_is_one_line(root):
    bad = stored("sqlite:////missing/folder/x.db")
    with pytest.raises(ValueError, match=r"cannot be opened: .*--storage URL") as caught:
        Database(bad, root)
    assert len(str(caught.value).splitlines()) == 1


def test_without_optuna_the_error_says_how_to_install_it(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'rlstack\[sweep\]'"):
        Database(SEARCH, root)
