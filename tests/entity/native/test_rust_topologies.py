"""Rust games in programs of several nodes: PPO learns, and no game outlives its actor."""

import contextlib
import json
import subprocess
import sys
import time

import psutil
import pytest

from rlstack.programs.tools.game_agent import play_program
from tests.entity.rust_crate import NEEDS_CARGO
from tests.entity.rust_crate import examples as examples  # a fixture
from tests.programs.launched import FAST, Launched
from tests.programs.running import TOPOLOGIES, failures, nothing_left, series

pytestmark = [
    NEEDS_CARGO,
    pytest.mark.slow,
    pytest.mark.timeout(400, method="thread"),
]
LATER = 240.0  # seconds that a busy machine may take to start a program


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def arguments(examples, topology, run_dir, frames):
    """`rlstack train` on Count in two actors, with the environments of the preset in all."""
    return [
        "entity-count-ppo", "--topology", topology, "--run-dir", str(run_dir), "--seed", "1",
        "--env.name", f"rust:{examples / 'count_env'}", "--env.num-envs", "8",
        "--frames", str(frames),
    ]  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_count_is_learned_and_the_checkpoint_plays(tmp_path, examples, topology):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "rlstack", "train"]
    command += arguments(examples, topology, run_dir, 6000)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LATER)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["topology"] == topology
    assert result["eval_return_mean"] >= 0.95
    assert failures(run_dir) == []
    assert set(series(run_dir, "env/restarts")) == {0}
    (scores,) = play_program(run_dir, f"{examples / 'count_env'} masked_choices=2", games=50)
    assert len(scores) == 50 and sum(scores) >= 47


def games(process):
    """The Rust games below a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [p for p in process.children(recursive=True) if p.name() == "count_env"]
    return []


def end_of(processes):
    """Waits until processes have ended; returns those that have not."""
    _, alive = psutil.wait_procs(processes, timeout=10.0)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_games_end_with_a_killed_actor_or_launcher(tmp_path, examples, topology):
    run_dir = tmp_path / "run"
    endless = arguments(examples, topology, run_dir, 100_000_000)
    with Launched(run_dir, *endless, *FAST) as program:
        program.wait_for_log("learner/loss", timeout=LATER)
        killed = program.nodes()["actor/0"]
        (game,) = games(killed)
        killed.kill()
        assert end_of([game]) == []

        def is_back():
            actor = program.nodes().get("actor/0")
            return actor not in (None, killed) and len(games(actor)) == 1

        program.wait_for(is_back, "the game of a new actor/0", LATER)
        steps = series(run_dir, "learner/steps")[-1]
        program.wait_for_log("learner/steps", at_least=steps + 3, timeout=LATER)
        running = games(psutil.Process(program.process.pid))
        assert len(running) >= 2
        program.targets()["launcher"].kill()
        killed_at = time.monotonic()
        code, left = program.end(60)
        assert code == 1, program.stderr
        assert left == [] and end_of(running) == []
        assert time.monotonic() - killed_at < 30.0
