"""--env.options as names and values, for presets with and without options of their own."""

import pytest

from rlstack.programs.cli import commands, env_options
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train


def joined(args, name="memorycue-r2d2"):
    return env_options.join(args, preset(name))


def test_names_and_values_join_those_of_the_preset():
    args = ["--frames", "9", "--env.options", "num_cues", "3", "delay", "2", "--seed", "4"]
    left, experiment = joined(args)
    assert left == ["--frames", "9", "--seed", "4"]
    assert experiment.env.options == {"delay": 2, "num_cues": 3}


def test_values_are_numbers_booleans_and_texts_and_none_removes():
    args = ["--env.options", "delay", "None", "x", "1.5", "y", "-2", "flag", "False", "id", "A-v0"]
    _, experiment = joined(args)
    assert experiment.env.options == {"x": 1.5, "y": -2, "flag": False, "id": "A-v0"}


def test_options_of_evaluation_and_either_spelling_are_joined():
    left, experiment = joined(["--env.eval_options", "frame_skip", "2"], "pong-ppo")
    assert left == []
    assert experiment.env.eval_options == preset("pong-ppo").env.eval_options | {"frame_skip": 2}
    assert experiment.env.options == preset("pong-ppo").env.options


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["--env.options.delay", "3"], "memorycue-r2d2"),
        (["--env.options", "a", "1"], "cartpole-ppo"),
    ],
)
def test_the_parser_gets_the_rest(args, name):
    assert joined(args, name) == (args, preset(name))


@pytest.mark.parametrize("words", [[], ["delay"], ["delay", "1", "num_cues"]])
def test_a_name_without_a_value_is_an_error(words):
    with pytest.raises(ValueError, match=r"--env\.options: must be names and values"):
        joined(["--env.options", *words])


def test_the_command_takes_both_forms(monkeypatch):
    seen = []
    monkeypatch.setattr(train, "run", lambda experiment, *_, **__: seen.append(experiment))
    monkeypatch.setattr("rlstack.programs.cli.train._print_result", lambda _: 0)
    args = ["memorycue-r2d2", "--env.options", "num_cues", "3", "--env.options.delay", "7"]
    assert commands.main("train", args) == 0
    assert seen[0].env.options == {"delay": 7, "num_cues": 3}
