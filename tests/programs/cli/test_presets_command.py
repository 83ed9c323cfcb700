"""`rlstack presets`, and experiments from config files."""

import dataclasses

import pytest

from rlstack.programs.__main__ import main
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.presets import PRESETS, preset


def listed(capsys, *args):
    assert main(["presets", *args]) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_all_presets_are_listed(capsys):
    assert listed(capsys) == list(PRESETS)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (
            ["--agent", "SAC"],
            {"pendulum-sac", "halfcheetah-sac", "cartpole-sac", "pendulum-redq", "pendulum-droq"}
            | {"brax-inverted-double-pendulum-sac", "brax-halfcheetah-sac"}
            | {"mountain-car-continuous-rlpd"}
            | {"pendulum-simba", "hopper-simba", "halfcheetah-simba"},  # of CategoricalSAC
        ),
        (["--agent", "SAC", "--env", "cartpole-v"], {"cartpole-sac"}),
        (["--env", "pong", "--agent", "ppo"], {"pong-ppo", "pong-small-ppo", "pong-gpu-ppo"}),
        (["--env", "acrobot"], {"acrobot-ppo", "acrobot-dqn"}),
        (
            ["--topology", "fused", "--env", "cartpole"],
            {"gymnax-cartpole-ppo", "gymnax-cartpole-dqn", "gymnax-cartpole-pqn"},
        ),
    ],
)
def test_options_leave_out_what_does_not_match(args, names, capsys):
    assert set(listed(capsys, *args)) == names


def test_presets_may_be_chosen_by_their_budget(capsys):
    names = listed(capsys, "--max-frames", "20000")
    assert "pendulum-sac" in names and "cartpole-ppo" not in names


def test_no_match_is_one_line(capsys):
    assert main(["presets", "--env", "no-such"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no preset matches" in line


def test_a_config_file_takes_the_place_of_a_preset(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(to_json(dataclasses.replace(preset("cartpole-ppo"), seed=7)))
    args = ["train", str(file), "--frames", "4000", "--dry-run"]
    assert main([*args, "--run-dir", str(tmp_path / "run")]) == 0
    plan = capsys.readouterr().out
    assert '"seed": 7' in plan and '"frames": 4000' in plan
    file.write_text('{"preset": "x"}')
    assert main(args) == 1
    assert str(file) in capsys.readouterr().err
    assert main(["train", str(tmp_path / "missing.json")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "missing.json" in line
