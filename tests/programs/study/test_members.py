"""Which runs a set has, and what is refused before any of them starts."""

import dataclasses

import numpy as np
import pytest

from rlstack.programs.config.options import replaced
from rlstack.programs.config.presets import preset
from rlstack.programs.session.run_dir import RunDirError
from rlstack.programs.study import study
from rlstack.programs.study.study import Study

BASE = preset("cartpole-ppo")


def test_each_combination_of_values_has_each_seed():
    vary = {"agent.optimizer.learning_rate": (1e-4, 3e-4), "env.num-envs": (8, 16)}
    found = Study(BASE, (3, 5), vary).trials()
    assert [m.name for m in found][:3] == [
        "learning_rate=0.0001,num-envs=8,seed=3",
        "learning_rate=0.0001,num-envs=8,seed=5",
        "learning_rate=0.0001,num-envs=16,seed=3",
    ]
    assert len({m.name for m in found}) == 8
    last = Study(BASE, (3, 5), vary).experiment(found[-1].values, found[-1].seed)
    assert (last.agent.optimizer.learning_rate, last.env.num_envs, last.seed) == (3e-4, 16, 5)
    assert dataclasses.replace(Study(BASE, (7,)).experiment({}, 7), seed=BASE.seed) == BASE


def test_options_with_one_last_name_have_their_whole_names():
    vary = {"agent.optimizer.eps": (1e-5, 1e-8), "agent.torso_optimizer.eps": (1e-5, 1e-8)}
    base = replaced(BASE, "frames", 2e5)
    optimizer = base.agent.optimizer
    base = dataclasses.replace(
        base, agent=dataclasses.replace(base.agent, torso_optimizer=optimizer)
    )
    first, *_ = Study(base, (1,), vary).trials()
    assert first.name == "agent.optimizer.eps=1e-05,agent.torso_optimizer.eps=1e-05,seed=1"
    assert base.frames == 200_000 and type(base.frames) is int


def test_a_set_is_read_as_it_was_written(tmp_path):
    made = Study(BASE, (1, 2), {"agent.discount": (0.9, 0.99), "env.options.length": (4, 8)})
    made.write(tmp_path)
    assert study.is_study(tmp_path)
    read = study.read(tmp_path)
    assert (read.base, read.seeds, dict(read.values)) == (made.base, made.seeds, made.values)
    assert [m.name for m in read.trials()] == [m.name for m in made.trials()]
    assert read.experiment(read.trials()[0].values).env.options == {"length": 4}
    assert study.finished(tmp_path) == {}
    (tmp_path / study.FILE).write_text("{")
    with pytest.raises(RunDirError, match=r"study\.json cannot be read"):
        study.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "agent.lerning_rate",
            1.0,
            r"no option agent\.lerning_rate; did you mean agent\.optimizer\.learning_rate\?",
        ),
        ("agent.optimizer.learning_rat", 1.0, r"did you mean agent\.optimizer\.learning_rate\?"),
        ("agent.discount", 1.5, r"discount must be in \[0, 1\]"),
        ("agent.discount", "high", "must be a number; got 'high'"),
        ("agent.num_epochs", 2.5, "must be a whole number; got 2.5"),
        ("agent.normalise_advantages", 1, "must be True or False"),
        ("agent.discount.more", 1, r"no option agent\.discount\.more"),
        ("network.hidden_sizes", 64, "must be a tuple"),
        ("topology", "nope", "must be one of single_process, fused, .*; got 'nope'"),
    ],
)
def test_what_an_option_does_not_take_is_refused(name, value, text):
    with pytest.raises(ValueError, match=text):
        Study(BASE, (1,), {name: (value,)}).trials()


def test_values_of_every_type_of_a_field_can_be_compared():
    made = Study(BASE, (1,), {"evaluator.period": ("off", 100, 200.0)})
    found = [made.experiment(trial.values) for trial in made.trials()]
    assert [experiment.evaluator.period for experiment in found] == ["off", 100, 200]


def test_seeds_may_be_numbers_of_numpy(tmp_path):
    Study(BASE, tuple(np.arange(2)), {"agent.discount": (np.float32(0.5),)}).write(tmp_path)
    assert [run.name for run in study.read(tmp_path).trials()] == [
        "discount=0.5,seed=0",
        "discount=0.5,seed=1",
    ]


@pytest.mark.parametrize(
    ("seeds", "vary", "text"),
    [
        ((), {}, "seeds must be one or more different values"),
        ((1, 1), {}, "got 1 1"),
        ((1,), {"agent.discount": ()}, r"agent\.discount must be"),
        ((1,), {"seed": (1, 2)}, "--seeds"),
        # Each run must have a directory of its own.
        ((1,), {"agent.discount": (0.5, 1, 1.0)}, r"agent\.discount .*; 1 and 1\.0 are both 1\."),
        (
            (1,),
            {"env.name": ("ALE/Pong-v5", "ALE-Pong-v5")},
            "; 'ALE/Pong-v5' and 'ALE-Pong-v5' are both ALE-Pong-v5",
        ),
        ((1, 1.0), {}, r"seeds .*; 1 and 1\.0 are both 1\."),
        (
            (1,),
            {"agent.num-epochs": (1, 2), "agent.num_epochs": (3, 4)},
            r"varied once; agent\.num-epochs and agent\.num_epochs are the same",
        ),
    ],
)
def test_sets_without_meaning_are_refused(seeds, vary, text):
    with pytest.raises(ValueError, match=text):
        Study(BASE, seeds, vary)
