"""`rlstack train PRESET --help`, `--help GROUP`, `--help-all`, and the shell's completion."""

import dataclasses
import re
import subprocess

import pytest

from rlstack.programs.__main__ import main
from rlstack.programs.cli import completion, component_options, help
from rlstack.programs.cli.train import _TrainOptions
from rlstack.programs.config.experiment import agents_of
from rlstack.programs.config.presets import PRESETS, preset
from rlstack.programs.study.study import PbtConfig


def shown(capsys, *args):
    try:
        assert main(["train", *args]) == 0
    except SystemExit as end:
        assert end.code == 0
    return capsys.readouterr().out


def test_help_explains_few_options_and_names_the_groups(capsys):
    text = shown(capsys, "cartpole-ppo", "--help")
    assert len(text.splitlines()) < 100
    assert "--frames 150000" in text and "--agent.optimizer.learning-rate 0.001" in text
    assert "Values: single_process, fused, heavy_env, light_env, distributed." in " ".join(
        text.split()
    )
    for group in ("agent ", "agent.torso-optimizer ", "program.ray ", "general "):
        assert f"\n  {group}" in text
    assert "--agent.gae-lambda" not in text


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_help_without_a_preset_begins_with_usage_and_ends_with_presets(command, capsys):
    texts = []
    for args in ([], ["--help"]):
        assert main([command, *args]) == 0
        texts.append(capsys.readouterr().out)
    text = texts[0]
    assert texts[1] == text and text.startswith(f"usage: rlstack {command} PRESET")
    usage, rest = text.split("\noptions that most runs change", 1)
    options, presets = rest.split("\npresets:\n")
    assert "--resume" in usage and "--vary" in usage
    assert re.findall(r"^  --(\w+)", options, re.M)[:2] == ["frames", "seed"]
    assert sorted(PRESETS) == sorted(line.split()[0] for line in presets.splitlines())


def test_train_and_sweep_explain_what_they_share_in_the_same_words(capsys):
    texts = []
    for command in ("train", "sweep"):
        assert main([command, "cartpole-ppo", "--help", "general"]) == 0
        text = capsys.readouterr().out
        texts.append(
            {
                found[1]: found[0]
                for found in re.finditer(r"^  --([\w-]+).*\n(?:   .*\n?)*", text, re.M)
            }
        )
    for name in ("run-dir", "seeds", "jobs", "loggers", "frames"):
        assert texts[0][name] == texts[1][name]
    assert "--vary NAME VALUE" in " ".join(texts[0]["seeds"].split())


def test_help_of_a_group_has_the_groups_inside_it(capsys):
    text = shown(capsys, "cartpole-ppo", "--help", "agent")
    assert "--agent.gae-lambda 0.8" in text and "--agent.optimizer.warmup-steps 0" in text
    assert "--env.num-envs" not in text
    text = shown(capsys, "cartpole-ppo", "--help", "agent.optimizer")
    assert "--agent.gae-lambda" not in text
    assert "Values: linear, cosine, exponential, constant." in " ".join(text.split())


def test_help_has_values_of_earlier_options(capsys):
    assert "--env.name rlstack.entity.games:MineSweeper" in shown(
        capsys, "entity-minesweeper-ppo", "--help", "env"
    )


def test_an_unknown_group_is_one_line(capsys):
    assert main(["train", "cartpole-ppo", "--help", "agnet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no group of options 'agnet'; did you mean 'agent'?" in line


@pytest.mark.parametrize(
    "name", ["cartpole-ppo", "pendulum-sac", "entity-multi-snake-ppo", "supply-chain-policies"]
)
def test_completion_and_groups_have_the_options_of_the_parser(name, capsys):
    text = shown(capsys, name, "--help-all")
    own = ["--run-dir", "--seeds", "--jobs", "--profile", "--dry-run", "--population"]
    own += ["--auto-resume"]
    own += [f"--pbt.{field.name}" for field in dataclasses.fields(PbtConfig)]
    lines = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    names = sorted(line for line in lines if line.strip("-"))
    assert names == sorted([*own, *completion.option_names(preset(name))])
    # The groups are read from the configs, and the text comes from the parser.
    experiment = component_options.fill_all(preset(name))
    with agents_of(experiment):
        groups = help.groups_of(_TrainOptions(experiment))
    assert sorted(f"--{option.name}" for group in groups for option in group.options) == names
    flat = " ".join(text.split())
    for option in (option for group in groups for option in group.options):
        assert option.text in flat
        default = f"(default: {option.default})" if option.default else f"--{option.name} "
        assert default in flat
        choices = f"--{option.name}{{{','.join(option.choices)}}}"
        assert not option.choices or choices in "".join(text.split())


def completed(script, *words):
    line = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _rlstack; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{line}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_presets_and_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "rlstack", "exp") == ["export"]
    assert completed(script, "rlstack", "train", "cartpole-pq") == ["cartpole-pqn"]
    assert completed(script, "rlstack", "cluster", "k") == ["kuberay"]
    assert completed(script, "rlstack", "cluster", "slurm", "cartpole-pq") == ["cartpole-pqn"]
    assert completed(script, "rlstack", "train", "cartpole-ppo", "--agent.gae") == [
        "--agent.gae-lambda"
    ]
    assert completed(script, "rlstack", "train", "cartpole-dqn", "--agent.gae") == []
    assert completed(script, "rlstack", "train", "cartpole-dqn", "--see") == ["--seed", "--seeds"]
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
