"""`rlstack sweep`: grids, searches, the lines of the documentation, and Slurm arrays."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from rlstack.programs.cli.commands import main
from rlstack.programs.study import study, train
from rlstack.programs.study.space import Range
from rlstack.programs.study.study import SearchConfig
from tests.docs.pages import ROOT, blocks
from tests.programs.running import nothing_left

RATE = "agent.optimizer.learning_rate"
SPACE = ("--search", "optuna", "--space", RATE, "1e-5", "1e-2", "log")
SMALL = (
    *("--frames", "600", "--log-period", "200", "--loggers", "jsonl"),
    *("--evaluator.episodes", "2", "--evaluator.num-envs", "2"),
)


@pytest.fixture
def asked(monkeypatch):
    """What the command would run, with its options."""
    found = []
    for name in ("run", "resume"):
        monkeypatch.setattr(train, name, lambda *args, **options: found.append((*args, options)))
    return found


def test_a_grid_has_each_value_and_seed(asked, tmp_path):
    words = ["--vary", RATE, "1e-3", "3e-3", "--seeds", "3", "--jobs", "2"]
    assert main("sweep", ["cartpole-ppo", *words, "--run-dir", str(tmp_path)]) == 0
    ((made, path, options),) = asked
    assert (made.seeds, dict(made.values)) == ((1, 2, 3), {RATE: (1e-3, 3e-3)})
    assert (path, options) == (tmp_path, {"jobs": 2})
    assert main("sweep", ["cartpole-ppo", "--seeds", "7", "9"]) == 0
    assert asked[1][0].seeds == (7, 9)


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_single_number_of_seeds_means_the_same_in_train_and_sweep(command, asked, capsys):
    assert main(command, ["cartpole-ppo", "--seeds", "5"]) == 0
    assert asked[0][0].seeds == (1, 2, 3, 4, 5)
    assert capsys.readouterr().err == "--seeds 5: seeds 1 to 5; --seed 5 is seed 5 alone\n"
    for words, seeds in ((["3", "8"], (3, 8)), (["1"], (1,)), (["8", "3", "1"], (8, 3, 1))):
        assert main(command, ["cartpole-ppo", "--seeds", *words]) == 0
        assert asked[-1][0].seeds == seeds
        assert not capsys.readouterr().err
    for number in ("0", "-2", "20261129"):
        assert main(command, ["cartpole-ppo", "--seeds", number]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--seed {number} trains seed {number} alone" in line
    assert len(asked) == 4


def test_a_search_has_ranges_and_choices(asked):
    words = ["--space", "network.torso", "mlp", "nature", "--trials", "20", "--prune", "False"]
    assert main("sweep", ["cartpole-ppo", *SPACE, *words, "--seed", "4", "--frames", "1e4"]) == 0
    ((made, path, options),) = asked
    assert made.values == {
        RATE: Range(1e-5, 1e-2, log=True),
        "network.torso": ("mlp", "nature"),
    }
    assert made.scheduler == SearchConfig(20, prunes=False)
    assert (made.seeds, made.base.frames) == ((4,), 10_000)
    assert (path, options) == (None, {"jobs": 1})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["cartpole-ppo"], "a sweep needs --vary"),
        (["cartpole-ppo", "--space", RATE, "1", "2"], "--space needs --search optuna"),
        (["cartpole-ppo", "--search", "optuna"], "--search optuna needs --space"),
        (["cartpole-ppo", *SPACE, "--vary", RATE, "1"], "takes no --vary"),
        (["cartpole-ppo", "--seeds", "2", "--submit"], "--submit needs --launch slurm"),
        (
            ["cartpole-ppo", "--seeds", "2", "--launch", "slurm", "--jobs", "-1"],
            "--jobs must be at",
        ),
        (
            ["cartpole-ppo", *SPACE, "--launch", "slurm", "--jobs", "-1"],
            "--jobs must be at least 1",
        ),
        (["cartpole-ppo", "--seeds", "2", "--jobs", "0"], "--jobs must be at least 1; got 0"),
        (["cartpole-ppo", "--seeds", "2", "--trials", "3"], "--trials needs --search optuna"),
        (["cartpole-ppo", "--seeds", "2", "--trials=50"], "--trials needs --search optuna"),
        (["cartpole-ppo", "--seeds", "2", "--prune", "False"], "--prune needs --search optuna"),
        (["cartpole-ppo", "--seeds", "2", "--storage", "x"], "--storage needs --search optuna"),
        (["cartpole-ppo", "--seeds", "2", "--trails", "3"], "did you mean --trials"),
        (
            ["cartpole-ppo", "--seeds", "2", "--launch", "ray", "--run-dir", "s3://bucket/x"],
            "--launch ray needs a --run-dir on a file system that all hosts see; got s3://bucket/x",
        ),
        (["--jobs", "2"], "a preset must come first"),
        (["--resume", "x", "--task", "3"], "--task must be K/N"),
    ],
)
def test_mistakes_are_one_line(words, text, asked, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / study.FILE).write_text("{}")
    assert main("sweep", words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line and not asked


def test_a_directory_without_a_sweep_is_one_line(tmp_path, capsys):
    assert main("sweep", ["--resume", str(tmp_path)]) == 1
    assert "rlstack sweep PRESET makes one" in capsys.readouterr().err


def test_help_has_the_options_of_sweeps(capsys):
    assert main("sweep", []) == 0
    assert "--search optuna --space" in capsys.readouterr().out
    assert main("sweep", ["cartpole-ppo", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--frames", "--trials 50", "--search grid", "--launch local", "--storage"):
        assert f"\n  {option}" in text


def script_of(capsys, *words):
    """The script that the command prints, which bash can read."""
    assert main("sweep", ["cartpole-ppo", "--launch", "slurm", *words]) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
    return text


def test_an_array_has_a_task_for_each_run_of_a_grid(tmp_path, capsys):
    root = tmp_path / "a sweep"
    words = ("--vary", RATE, "1e-3", "3e-3", "--seeds", "2", "--jobs", "3", "--run-dir", str(root))
    text = script_of(capsys, *words)
    assert "#SBATCH --array=1-4%3\n" in text
    assert f"sweep --resume {shlex.quote(str(root))} --task" in text
    assert study.is_study(root)
    assert (root / "slurm.sh").read_text() == text.partition("# sbatch")[0]


def test_the_tasks_of_a_search_share_its_trials(tmp_path, capsys):
    pytest.importorskip("optuna")
    root = tmp_path / "sweep"
    text = script_of(capsys, *SPACE, "--trials", "20", "--run-dir", str(root))
    assert "#SBATCH --array=1-4\n" in text and "--task" not in text
    assert (root / study.FILE).exists() and (root / "study.db").exists()


def test_submit_gives_the_script_to_sbatch(tmp_path, capsys, monkeypatch):
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\ngrep -c SBATCH "$1" >/dev/null && echo "Submitted batch job 7"\n')
    tool.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{path}")
    words = ["cartpole-ppo", "--seeds", "2", "--launch", "slurm", "--submit"]
    assert main("sweep", [*words, "--run-dir", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out.endswith("Submitted batch job 7\n")
    tool.write_text("#!/bin/bash\necho 'no such partition' >&2; exit 1\n")
    assert main("sweep", [*words, "--run-dir", str(tmp_path / "two")]) == 1
    assert "sbatch refused" in capsys.readouterr().err
    tool.unlink()
    monkeypatch.setenv("PATH", str(tool.parent))
    assert main("sweep", [*words, "--run-dir", str(tmp_path / "three")]) == 1
    assert "sbatch, which --submit needs, is not on PATH" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
def test_the_tasks_of_an_array_train_the_grid_and_its_report(tmp_path, capsys):
    root = tmp_path / "sweep"
    words = ("--vary", RATE, "1e-3", "3e-3", "--run-dir", str(root), *SMALL)
    script_of(capsys, *words)
    for task in (2, 1):
        environment = {
            **os.environ,
            "SLURM_ARRAY_TASK_ID": str(task),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        with nothing_left():
            subprocess.run(["bash", root / "slurm.sh"], env=environment, check=True, timeout=90)
        assert len(list(root.glob("*/result.json"))) == 3 - task
    assert (root / "learning_rate=0.003,seed=1" / "result.json").exists()
    assert (root / "report.md").read_text().count("| cartpole-ppo learning_rate=") >= 2
    assert "<svg" in (root / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(250)
def test_the_lines_of_the_page_tune_the_learning_rate(tmp_path):
    pytest.importorskip("optuna")
    (block,) = [b for b in blocks("docs/sweeps.md") if "--trials 20" in b.text]
    lines = block.text.replace("\\\n", " ").strip().splitlines()
    assert len(lines) <= 3
    small = " ".join(SMALL)
    text = re.sub(r"^(rlstack (?:sweep|train) \S+)", rf"\1 {small}", "\n".join(lines), flags=re.M)
    text = text.replace("--trials 20", "--trials 3").replace("pip install", ": pip install")
    text = text.replace("rlstack ", f"{shlex.quote(sys.executable)} -m rlstack ")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with nothing_left():
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=230,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    root = tmp_path / "runs" / "rates"
    assert len(re.findall(r"^trial \d: return", done.stderr, re.M)) == 3
    assert (
        "| trial | learning_rate | return | state | seconds |" in (root / "report.md").read_text()
    )
    rates = set()
    for path in root.glob("trials/*/*/config.json"):
        rates.add(json.loads(path.read_text())["agent"]["optimizer"]["learning_rate"])
    assert len(rates) == 3 and all(1e-5 <= rate <= 1e-2 for rate in rates)
    best = json.loads((root / "best.json").read_text())["agent"]["optimizer"]["learning_rate"]
    assert best in rates
    trained = list((tmp_path / "runs").glob("best/*/config.json"))
    assert len(trained) == 3
    for path in trained:
        assert json.loads(path.read_text())["agent"]["optimizer"]["learning_rate"] == best
