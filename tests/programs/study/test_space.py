"""The values that `--space` describes, and the file of a sweep."""

import dataclasses

import pytest

from rlstack.programs.config.presets import preset
from rlstack.programs.session.run_dir import RunDirError
from rlstack.programs.study import space, study
from rlstack.programs.study.space import Range, from_words
from rlstack.programs.study.study import SearchConfig, Study

BASE = preset("cartpole-ppo")
RATE = "agent.optimizer.learning_rate"


@pytest.mark.parametrize(
    ("name", "words", "wanted"),
    [
        (RATE, (1e-5, 1e-2, "log"), Range(1e-5, 1e-2, log=True)),
        (RATE, (1, 2), Range(1, 2)),
        ("agent.num_epochs", (2, 8), Range(2, 8, whole=True)),
        ("agent.num_epochs", (2, 8, "step", 2), Range(2, 8, whole=True, step=2)),
        ("replay.max_size", (16, 4096, "log"), Range(16, 4096, log=True, whole=True)),
        ("agent.discount", (0.9, 0.99, "step", 0.01), Range(0.9, 0.99, step=0.01)),
        ("agent.num_epochs", (2, 4, 8), (2, 4, 8)),
        ("agent.num_epochs", ("choice", 2, 8), (2, 8)),
        ("network.torso", ("mlp", "nature"), ("mlp", "nature")),
        ("agent.normalise_advantages", (True, False), (True, False)),
    ],
)
def test_words_are_a_range_or_choices(name, words, wanted):
    found = from_words(name, words, BASE)
    assert found == wanted
    assert space.from_tree(space.to_tree(found)) == wanted


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        (RATE, (1e-2, 1e-5), "the lower one first; got 0.01 1e-05"),
        (RATE, (0, 1, "log"), "positive with log"),
        (RATE, (0.1, 1, "log", "step", 0.1), "without log"),
        (RATE, (0.1, 1, "lg"), "'lg' is not known. Give LOW HIGH"),
        (RATE, (0.1, 1, "step"), "'step' is not known"),
        (RATE, (0.1,), "two or more different values; got 0.1"),
        (RATE, ("low", "high"), "must be a number; got 'low'"),
        ("agent.num_epochs", (0.5, 3), "whole numbers"),
        ("agent.discount", (0.5, 1.5), r"discount must be in \[0, 1\]"),
        ("agent.lerning_rate", (0.5, 1.5), "--space agent.lerning_rate: there is no option"),
    ],
)
def test_what_words_cannot_mean_is_refused(name, words, text):
    with pytest.raises(ValueError, match=text):
        from_words(name, words, BASE)


def test_a_sweep_is_read_as_it_was_written(tmp_path):
    values = {RATE: Range(1e-5, 1e-2, log=True), "network.torso": ("mlp", "nature")}
    made = Study(BASE, (1, 2), values, SearchConfig(7, prunes=False, storage="sqlite:///x.db"))
    made.write(tmp_path)
    assert study.read(tmp_path) == made
    (tmp_path / study.FILE).write_text("{")
    with pytest.raises(RunDirError, match=r"study\.json cannot be read"):
        study.read(tmp_path)


def test_a_trial_is_evaluated_ten_times_unless_the_experiment_says_otherwise():
    made = Study(BASE, (1, 2), {RATE: Range(1e-5, 1e-2)}, SearchConfig())
    runs = made.of_trial({RATE: 2e-3})
    assert runs.base.evaluator.period == BASE.frames // 10
    assert [m.name for m in runs.trials()] == [f"learning_rate=0.002,seed={s}" for s in (1, 2)]
    assert made.experiment({RATE: 2e-3}).agent.optimizer.learning_rate == 2e-3
    assert made.experiment({RATE: 2e-3}).evaluator == BASE.evaluator
    unpruned = dataclasses.replace(made, scheduler=SearchConfig(prunes=False))
    assert unpruned.of_trial({RATE: 2e-3}).base.evaluator == BASE.evaluator
    own = dataclasses.replace(BASE, evaluator=dataclasses.replace(BASE.evaluator, period=5))
    assert dataclasses.replace(made, base=own).of_trial({RATE: 2e-3}).base.evaluator.period == 5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"values": {}}, "--space NAME LOW HIGH"),
        ({"values": {"seed": Range(1, 5)}}, "--seeds"),
        ({"seeds": ()}, "seeds must be one or more"),
        ({"values": {"agent.discount": Range(0.5, 1.5)}}, "discount must be"),
    ],
)
def test_searches_without_meaning_are_refused(changes, text):
    made = Study(BASE, (1,), {RATE: Range(1e-5, 1e-2)}, SearchConfig())
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(made, **changes)
    with pytest.raises(ValueError, match="trials must be at least 1"):
        SearchConfig(trials=0)
