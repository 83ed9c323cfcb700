"""Options that are refused from the sources of configs: what the parser says, and nothing else."""

import pytest

from rlstack.programs.cli import early_options, sweep, train
from rlstack.programs.cli.commands import main
from rlstack.programs.cli.completion import option_names
from rlstack.programs.config.presets import PRESETS, preset

pytestmark = pytest.mark.timeout(100)
# Presets of several agents, which the parser checks.
OF_SEVERAL = {"supply-chain-policies"}
MISTAKES = [
    "--agent.nosuch 1",
    "--nosuch",
    "--lr 1e-3",
    "--agent.lr=1e-3",
    "--agent.gae_lamda 0.9",
    "--gamma 0.9",
    "--n-envs 4",
    "--agent.optimizer.learningrate 1e-3",
    "--env.nosuch 4",
    "--replay.bach-size 4",
    "--seed 1 2",
    "--seed",
    "--frames 1.5",
    "--frames=abc",
    "--agent.discount abc",
    "--agent.optimizer.learning-rate abc",
    "--agent.optimizer.schedule lineer",
    "--topology ring",
    "--checkpoint-replay yes",
    "--frames 100 --agent.nosuch 1 --seed x",
    "--population many",
    "--program.num-actors two",
]


def test_no_right_option_of_any_preset_is_refused():
    unread = {name for name in PRESETS if len(early_options._configs_of(name)) != 1}
    assert unread == OF_SEVERAL
    taken = {"--resume", "--vary", "--module", "--help", "--help-all", *train._SHORT_OPTIONS}
    own = [option for option in train.option_names() if option not in taken]  # before the check
    for name in PRESETS:
        try:
            words = [*option_names(preset(name)), *own]
            early_options.check("prog", name, words, train._TrainOptions)
        except ValueError as error:  # they have no values
            assert "no option" not in str(error), name


def test_the_fields_and_types_of_every_agent_are_those_of_its_config():
    kinds = {type(preset(name).agent): name for name in PRESETS if name not in OF_SEVERAL}
    assert len(kinds) > 25
    for kind, name in kinds.items():
        ((module, config),) = early_options._configs_of(name)
        assert (module, config) == (kind.__module__, kind.__name__)
        found = early_options.hints_of_class(early_options._stand_in(module, config))
        real = early_options.hints_of_class(kind)
        assert list(found) == list(real)
        for field in real:
            simple = found[field] in (int, float, bool)
            assert simple == (real[field] in (int, float, bool)), (kind, field)
            assert not simple or found[field] is real[field]


@pytest.mark.parametrize(
    "name", ["cartpole-ppo", pytest.param("deepsea-rnd", marks=pytest.mark.slow)]
)
def test_its_words_are_those_of_the_parser(name, monkeypatch, capsys):
    def told(words, check):
        monkeypatch.setattr(early_options, "check", check)
        assert main("train", [name, *words.split()]) == 2
        return capsys.readouterr().err

    check = early_options.check
    for words in MISTAKES:
        parser = told(words, lambda *_: None)
        assert told(words, check) == parser
        with pytest.raises(ValueError) as error:
            check(f"rlstack train {name}", name, words.split(), train._TrainOptions)
        assert f"rlstack train: {error.value}\n" == parser


@pytest.mark.parametrize(
    "words",
    [
        "--env.options.length 4",
        "--agent.optimizer.arguments b1 0.9",
        "--agent.critics-optimizer.nosuch 1",
        "--policies.a.agent.discount 2",
        "--env.name 3 --loggers jsonl mine:f --network.hidden-sizes 3 4",
        "--agent.discount 2",
        "--seeds 1 2 3 --jobs 2 --frames 1e6",
    ],
)
def test_what_the_sources_do_not_tell_is_left_to_the_parser(words):
    for options in (train._TrainOptions, sweep._SweepOptions):
        early_options.check("prog", "pendulum-sac", words.split(), options)


def test_agents_of_the_users_own_are_left_to_the_parser():
    for name in ("mine", "supply-chain-policies", "runs/mine/config.json"):
        early_options.check("prog", name, ["--agent.nosuch", "1"], train._TrainOptions)
