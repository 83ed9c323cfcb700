"""The command line."""

import json
import os
import re
import subprocess
import sys

import pytest

import rlstack
from rlstack.programs.__main__ import USAGE, main
from rlstack.programs.cli import commands as cli
from rlstack.programs.config.presets import PRESETS


def run_command(*args, timeout=120, cwd=None):
    """Runs the command in a child process."""
    return subprocess.run(
        [sys.executable, "-m", "rlstack", *args],
        capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False,
    )  # fmt: skip


def test_a_command_needs_no_standard_streams(tmp_path):
    code = """if True:
        import sys
        from rlstack.programs.__main__ import _complete_streams
        _complete_streams()
        print("text")
        print(sys.stdin.read(), file=sys.stderr)
        file = open(sys.argv[1], "w")
        file.write(str(file.fileno()))
    """
    path = tmp_path / "descriptor"
    shell = f"exec {sys.executable} -c '{code}' {path} <&- >&- 2>&-"
    subprocess.run(["sh", "-c", shell], check=True, timeout=60)
    assert int(path.read_text()) > 2


def test_a_terminal_without_a_letter_shows_its_code():
    code = "from rlstack.programs.__main__ import main; main(); print('1 \\u00b1 2')"
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert shown.stdout.splitlines()[-1] == r"1 \xb1 2"


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown == USAGE
    for command in ("train", "eval", "record", "list", "doctor", "rerun", "--resume"):
        assert command in shown


@pytest.mark.parametrize(
    ("command", "purpose"),
    [
        ("eval", "Evaluate the newest params"),
        ("diff", "which options of two runs differ"),
        ("report", "table of finished runs"),
        ("record", "write them to a dataset"),
        ("play", "entity environment"),
        ("watch", "probabilities and its value"),
        ("presets", "List the presets"),
        ("rerun", "update that gave NaN"),
        ("doctor", "how to enable it"),
    ],
)
def test_every_command_has_help(command, purpose, capsys):
    try:
        code = main([command, "--help"])
    except SystemExit as stop:
        code = stop.code
    shown = capsys.readouterr().out
    assert code == 0
    assert f"usage: rlstack {command}" in shown
    assert purpose in " ".join(shown.split())


def test_the_version_is_told_with_the_commit(capsys, monkeypatch):
    monkeypatch.setattr("rlstack.programs.session.result.git_commit", lambda: "abc-dirty")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlstack {rlstack.__version__} (commit abc-dirty)\n"


def test_list_shows_every_preset(capsys):
    assert cli.main("list", []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert {"cartpole-ppo", "cartpole-dqn", "pong-ppo", "cartpole-bc"} <= set(PRESETS)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["train", "cartpol-ppo"], "did you mean 'cartpole-ppo'"),
        (["trian", "cartpole-ppo"], "did you mean 'train'"),
        (["eval", "no/such/run"], "no/such/run"),
        (["train", "cartpole-ppo", "--env.name", "CartPol-v1"], "CartPole-v1"),
        (["train", "cartpole-dqn", "--network.core", "lstm"], "must be feed-forward"),
        (["train", "pendulum-ppo", "--agent.num-minibatches", "100000"], "at most the 2048 rows"),
    ],
)
def test_a_mistake_is_one_line_with_a_suggestion(args, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 1
    shown = capsys.readouterr().err
    assert hint in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--frames", "0"], "frames must be at least 1"),
        (["--framess", "10"], "--frames"),
        (["--topology", "ring"], "single_process"),
        (["--agent.discount", "2"], "must be in [0, 1]"),
    ],
)
def test_a_wrong_option_states_the_rule(args, hint, capsys):
    try:
        code = cli.main("train", ["cartpole-ppo", *args])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).replace("│", " ").split())
    assert code in (1, 2)
    assert hint in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(180)
def test_train_then_eval(tmp_path):
    run_dir = tmp_path / "run"
    trained = run_command(
        "train", "cartpole-ppo", "--frames", "2000", "--run-dir", str(run_dir),
        "--evaluator.episodes", "2", "--evaluator.num-envs", "2", "--env.num-workers", "1",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert "evaluation return" in trained.stdout
    assert "gym" not in trained.stderr.lower()
    result = json.loads((run_dir / "result.json").read_text())
    judged = run_command("eval", str(run_dir))
    assert judged.returncode == 0, judged.stderr
    assert json.loads(judged.stdout)["eval_return_mean"] == result["eval_return_mean"]
    again = run_command("train", "cartpole-ppo", "--run-dir", str(run_dir))
    assert again.returncode == 1
    assert "--resume" in again.stderr


_FULL_DISK = """
import resource, signal, sys
from rlstack.programs.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit, run_dir = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # no file may grow further
sys.exit(main(["train", "cartpole-ppo", "--frames", "30000", "--run-dir", run_dir,
               "--checkpoint-period", "10000", "--log-period", "1000"]))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("limit", "refused"),
    [
        (500, r"config\.json"),
        pytest.param(
            8000, r"metrics\.jsonl|tensorboard", marks=[pytest.mark.slow, pytest.mark.chosen]
        ),
        pytest.param(60_000, "checkpoints", marks=[pytest.mark.slow, pytest.mark.chosen]),
    ],
)
def test_a_full_disk_ends_the_run_with_the_file_and_a_suggestion(tmp_path, limit, refused):
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(limit), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    line = next(line for line in done.stderr.splitlines() if line.startswith("rlstack train:"))
    assert re.search(refused, line) and "ree space" in line
    assert ("--resume" in line) == (limit > 500)  # without a config there is nothing to resume
    assert not list((tmp_path / "run").glob("**/.partial*"))
