"""Options of an experiment by their dotted names."""

import pytest

from rlstack.checks import hints_of
from rlstack.programs.config import options
from rlstack.programs.config.presets import preset

BASE = preset("memorycue-r2d2")


def test_an_option_is_read_and_set_whatever_its_depth():
    name = "agent.optimizer.learning-rate"
    changed = options.replaced(BASE, name, 1)
    assert options.value_of(changed, name) == changed.agent.optimizer.learning_rate == 1.0
    assert type(changed.agent.optimizer.learning_rate) is float
    assert options.replaced(BASE, "frames", 2e5).frames == 200_000
    assert options.replaced(BASE, "env.options.delay", 7).env.options == {"delay": 7}
    assert options.value_of(BASE, "env.options.delay") == 4
    assert options.value_of(BASE, "agent.nothing.more") is None
    team = preset("supply-chain-policies")
    quiet = options.replaced(team, "policies.distributor.agent.discount", 0.5)
    assert quiet.policies["distributor"].agent.discount == 0.5
    assert quiet.policies["retailer"] == team.policies["retailer"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("agent.learning_rate", 1.0, "did you mean agent.optimizer.learning_rate?"),
        ("env.num-env", 4, "--vary env.num-env: there is no option env.num_env; did you mean"),
        ("zzzz", 4, "--vary zzzz: there is no option zzzz."),
        ("env.num_envs", 2.5, "--vary env.num_envs: must be a whole number; got 2.5."),
        ("env.options.delay", "x", "must be a whole number; got 'x'."),
    ],
)
def test_an_error_names_the_option_and_the_nearest_one(name, value, text):
    with pytest.raises(ValueError) as caught:
        options.replaced(BASE, name, value)
    assert text in str(caught.value)


def test_a_value_that_no_check_can_read_is_placed():
    value = object()
    placed = options.placed(BASE, "agent.optimizer.learning_rate", value)
    assert placed.agent.optimizer.learning_rate is value
    assert BASE.agent.optimizer.learning_rate is not value
    assert placed.env is BASE.env


def test_entries_are_the_fields_of_all_configs_inside():
    found = {entry.name: entry.value for entry in options.entries(BASE)}
    assert found["env.options.delay"] == 4 and found["seed"] == BASE.seed
    assert found["network.core-size"] == BASE.network.core_size
    assert "env" not in found and "agent.optimizer" not in found
    groups = {name.partition(".")[0].replace("-", "_") for name in found}
    assert groups <= set(hints_of(BASE)) and len(found) > 150


@pytest.mark.parametrize(
    ("word", "value"),
    [("True", True), ("3", 3), ("1e-3", 1e-3), ("-2.5", -2.5), ("adam", "adam"), ("true", "true")],
)
def test_a_word_is_a_boolean_a_number_or_itself(word, value):
    assert options.parsed(word) == value and type(options.parsed(word)) is type(value)
