"""PPO learns Rust games through the command line, and a checkpoint plays a Rust program."""

import json
import subprocess
import sys

import pytest

from rlstack.programs.tools.game_agent import play_program
from tests.entity.rust_crate import NEEDS_CARGO
from tests.entity.rust_crate import examples as examples  # a fixture

pytestmark = [NEEDS_CARGO, pytest.mark.slow]


def train(tmp_path, preset, program, *options, seconds):
    """Runs `rlstack train` on a Rust program; returns the run's directory."""
    command = [sys.executable, "-m", "rlstack", "train", preset, "--seed", "1"]
    command += ["--run-dir", str(tmp_path / "run"), "--env.name", f"rust:{program}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return tmp_path / "run"


def evaluated(run):
    return json.loads((run / "result.json").read_text())["eval_return_mean"]


@pytest.mark.chosen
@pytest.mark.timeout(240)
def test_count_is_learned_and_its_checkpoint_plays_the_program(tmp_path, examples):
    run = train(tmp_path, "entity-count-ppo", examples / "count_env", seconds=120)
    assert evaluated(run) >= 0.99
    (scores,) = play_program(run, f"{examples / 'count_env'} masked_choices=2", games=50, seed=3)
    assert len(scores) == 50 and sum(scores) >= 48


@pytest.mark.timeout(1800)
def test_multi_snake_is_learned(tmp_path, examples):
    run = train(
        tmp_path, "entity-multi-snake-ppo", examples / "multi_snake",
        seconds=1700,
    )  # fmt: skip
    assert evaluated(run) >= 0.8
