"""Mistakes and failures: each is one line, which says what to do."""

import io
import json
import os
import subprocess
import sys

import pytest

from rlstack.programs.__main__ import main
from rlstack.programs.cli.options import whole_number
from rlstack.programs.config.options import _ELSEWHERE, entries, nearest
from rlstack.programs.config.presets import preset
from rlstack.storage import checkpoint

pytestmark = pytest.mark.timeout(60)


def one_line(capsys, *args, code):
    """Runs a command that must fail; returns its only line on standard error."""
    assert main(list(args)) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    (line,) = shown.err.splitlines()
    assert line.startswith("rlstack")
    return line


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--framess", "10"], "no option --framess; did you mean --frames?"),
        (["--agent.lerning-rate", "1"], "did you mean --agent.optimizer.learning-rate?"),
        (["--learning-rate=1"], "did you mean --agent.optimizer.learning-rate?"),
        (["--agent.lr", "1"], "did you mean --agent.optimizer.learning-rate?"),
        (["--n-envs", "8"], "did you mean --env.num-envs?"),
        (["--total_timesteps", "8"], "did you mean --frames?"),
        (["--gamma=0.9"], "did you mean --agent.discount?"),
        (["--clip-range", "1"], "did you mean --agent.clip-ratio?"),
        (["--env-id", "x"], "did you mean --env.name?"),
        (["--n-steps", "8"], "did you mean --replay.unroll-length?"),
        (["--log-dir", "x"], "did you mean --run-dir?"),
        (["--program.launhc", "ray"], "did you mean --program.launch?"),
        (["--qqqqqq", "1"], "no option --qqqqqq"),
        (["--frames", "1e5x"], "--frames: must be a whole number, such as 100000 or 1e5"),
        (["--frames", "1.5"], "must be a whole number"),
        (["--topology", "ring"], "'single_process', 'fused', 'heavy_env'"),
        (["--agent.discount", "2"], "discount must be in [0, 1]; got 2.0"),
        (["--frames"], "Missing value for argument '--frames'"),
        (["extra"], "extra"),
        (["--qqqqqq", "1"], "no option --qqqqqq (rlstack train cartpole-ppo --help)"),
        (["--seeds", "--frames", "10"], "--seeds must be followed by one or more seeds"),
        (["--seeds", "1", "2", "--seed", "3"], "--seeds has the seeds of all runs"),
        (["--dry-run", "--jobs", "2"], "--jobs needs --seeds or --vary"),
        (["--population", "0"], "--population must be at least 2; got 0"),
        (["--population=0", "--vary", "agent.discount", "0.5", "0.9"], "must be at least 2; got 0"),
        (["--population", "-1", "--vary", "agent.discount", "0.5", "0.9"], "must be at least 2"),
        (["--env.options", "gravity"], "--env.options: must be names and values, such as"),
        (["--module"], "--module must be followed by the name of a module"),
        (["--module=no_such_module_7"], "there is no such module"),
    ],
)
def test_a_wrong_argument(args, hint, capsys):
    line = one_line(capsys, "train", "cartpole-ppo", *args, code=1 if "no_such" in args[0] else 2)
    assert hint in line


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["train", "--frames", "10"], "a preset must come first"),
        (["train", "--resum", "x"], "did you mean --resume?"),
        (["eval"], "PATH The directory of the run"),
        (["eval", "a", "--epsodes", "3"], "did you mean --episodes?"),
        (["report"], "directories of runs must be given"),
        (["train", "--resume", "x", "--seed", "3"], "RUN_DIR/config.json trains a new run"),
        (["record", "a", "--policy", "gredy"], "'greedy', 'explore'"),
    ],
)
def test_other_commands(args, hint, capsys):
    assert hint in one_line(capsys, *args, code=2)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["train", "runs"], "--resume runs continues a run, and runs/config.json trains"),
        (["eval", "runs"], "it holds 2 of them. Name one, such as runs/seed=1."),
        (["rerun", "runs"], "There is runs/dump-3 in it."),
        (["rerun", "runs/seed=1"], "runs/seed=1 must be a directory dump-N"),
        (["train", "cartpole-ppo", "--dry-run", "--profile", "30..20"], "such as 20..30"),
    ],
)
def test_a_directory_of_another_kind(args, hint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("seed=1", "seed=2", "dump-3"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        path = "update.pkl" if name == "dump-3" else "config.json"
        (tmp_path / "runs" / name / path).touch()
    assert hint in one_line(capsys, *args, code=1)


def test_a_reader_that_goes_away_is_no_error(capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken, monkeypatch.context() as changed:
        changed.setattr("sys.stdout", broken)
        assert main(["presets"]) == 1
    assert capsys.readouterr().err == ""


def test_a_mistake_has_its_exit_code_even_if_nobody_reads_standard_error(monkeypatch):
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as changed:
        changed.setattr("sys.stderr", closed)
        assert main(["train", "--frames", "10"]) == 2


def test_a_pipe_that_breaks_in_a_run_is_an_error(capsys, monkeypatch):
    """Such as that of an environment's process: only that of the output ends a command quietly."""

    def run(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("rlstack.programs.run.train.run", run)
    assert "Broken pipe" in one_line(capsys, "train", "cartpole-random", code=1)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("topology", "streams", "code"),
    [
        ("single_process", "2> /dev/full", 0),
        ("single_process", "2> >(true)", 0),
        ("single_process", "> >(true) 2>&1", 1),
        ("heavy_env", "2> >(true)", 0),
    ],
)
def test_a_run_ends_as_usual_if_nobody_reads_its_output(tmp_path, topology, streams, code):
    """Only its last line, which is the command's output, changes the exit code."""
    run_dir = tmp_path / "run"
    command = (
        sys.executable, "-m", "rlstack", "train", "cartpole-ppo", "--frames", "600",
        "--log-period", "100", "--topology", topology, "--run-dir", str(run_dir),
    )  # fmt: skip
    done = subprocess.run(["bash", "-c", f'"$@" {streams}', "bash", *command], timeout=100)
    assert done.returncode == code
    assert json.loads((run_dir / "result.json").read_text())["env_frames"] >= 600
    assert checkpoint.latest(run_dir / "checkpoints") is not None


def test_a_directory_can_be_given_again_after_a_mistake(capsys, tmp_path):
    args = ["train", "cartpole-ppo", "--run-dir", str(tmp_path / "run")]
    for _ in range(2):
        assert "did you mean 'CartPole-v1'?" in one_line(
            capsys, *args, "--env.name", "CartPole-v9", code=1
        )
    for several in (["--seeds", "1", "2", "--jobs", "0"], ["--vary", "env.name", "CartPole-v9"]):
        one_line(capsys, *args, *several, code=1)
        assert not (tmp_path / "run" / "set.json").exists()
    for interface in ("none0", "203.0.113.1"):
        nodes = ["--topology", "heavy_env", "--program.interface", interface]
        line = one_line(capsys, *args, *nodes, code=1)
        assert "program.interface" in line and interface in line


def test_a_report_names_its_command_once(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    line = one_line(capsys, "report", str(tmp_path), code=1)
    assert line.count("rlstack report") == 1


def test_a_wrong_kind_of_actions(tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    main(["train", "cartpole-dqn", "--env.name", "Pendulum-v1", "--run-dir", run_dir])
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.splitlines()[-1].startswith(
        "rlstack train: q_network: the action must be one discrete choice; got BoundedArray"
    )


FAULTY = """
def make(*specs):
    return {}["my key"]
"""


def test_an_exception_of_the_users_code_has_its_place(tmp_path, capsys, monkeypatch):
    (tmp_path / "faulty_net_7.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    args = ["train", "cartpole-ppo", "--network-factory", "faulty_net_7:make", "--run-dir", "run"]
    assert main(args) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    place = f"{tmp_path / 'faulty_net_7.py'}:3"
    assert (
        f"""KeyError: 'my key' (in {place}: return {{}}["my key"]); RLSTACK_TRACEBACK=1""" in line
    )
    monkeypatch.setenv("RLSTACK_TRACEBACK", "1")
    with pytest.raises(Exception, match="my key"):
        main([*args[:-1], "run2"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("12", 12), ("1e5", 100_000), ("2.5E6", 2_500_000), ("-1e+2", -100), ("1_000", 1000)),
        *(("1.000000e+05", 100_000), ("1.100000e+01", 11)),
    ],
)
def test_whole_numbers(text, number):
    assert whole_number(text) == number and type(whole_number(text)) is int
    assert whole_number("12345678901234567890") == 12345678901234567890


@pytest.mark.parametrize("text", ["1e-3", "1.5", "1.0", "1.25e1", "e5", "1e999", "", "inf", "0x10"])
def test_other_numbers_are_refused(text):
    with pytest.raises(ValueError, match="must be a whole number"):
        whole_number(text)


def test_an_option_like_nothing_has_no_suggestion():
    assert nearest("--zzzz", ["--frames", "--seed"]) == ""


def test_names_of_other_libraries_stand_for_options_that_exist_and_for_one_each():
    presets = [preset(name) for name in ("cartpole-ppo", "cartpole-dqn", "pendulum-sac")]
    known = {entry.name for experiment in presets for entry in entries(experiment)} | {"run-dir"}
    assert set(_ELSEWHERE) <= known
    others = [name for names in _ELSEWHERE.values() for name in names.split()]
    assert len(others) == len(set(others))
    assert set(others) & {name.rpartition(".")[2] for name in known} == set()
    assert nearest("agent.tau", ["agent.clip_ratio", "agent.target_rate"]) == "agent.target_rate"
    assert nearest("lr", ["data", "frames"]) == ""  # none of these is what it stands for
