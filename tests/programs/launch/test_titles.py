"""`ps` shows which process is which node of which run."""

import os
import re
import subprocess
import sys

import psutil
import pytest

from rlstack.envs.process.backend import _title
from tests.programs.launched import FAST, Launched
from tests.programs.running import nothing_left

WORKERS = ("--env.type", "process", "--env.num-envs", 2, "--env.num-workers", 2)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120, method="thread")
def test_every_process_of_a_program_has_a_title(tmp_path):
    run_dir = tmp_path / "run"
    args = ("cartpole-ppo", "--topology", "heavy_env", *WORKERS, "--replay.batch-size", 2)
    args += ("--program.num-actors", 1, *FAST)
    with nothing_left(), Launched(run_dir, *args, "--run-dir", run_dir) as program:
        nodes = ("coordinator", "learner", "actor/0", "evaluator")
        expected = {"launcher", *nodes, *(f"supervisor:{node}" for node in nodes)}
        workers = {"actor/0:env/0", "actor/0:env/1"}
        program.wait_for(lambda: set(program.titles()) >= expected | workers, "all titles")
        assert set(program.titles()) == expected | workers
        titles = {title(p) for p in program.processes() if p.is_running()}
        assert [t for t in titles if not t.startswith("rlstack: ")] == []
        assert title(psutil.Process(program.process.pid)) == f"rlstack: train {run_dir}"


def test_a_worker_of_another_program_names_its_parent():
    assert _title([3]) == f"rlstack: env/3 of process {os.getpid()}"
    assert _title([3, 4, 5]) == f"rlstack: env/3-5 of process {os.getpid()}"


def test_a_worker_of_a_node_has_the_title_of_the_node_and_its_environments():
    code = (
        "from setproctitle import setproctitle\nsetproctitle('rlstack: actor/0 /runs/a b')\n"
        "from rlstack.envs.process.backend import _title\nprint(_title([0, 1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "rlstack: actor/0:env/0-1 /runs/a b\n", done.stderr


def title(process):
    return re.sub(r"\s+$", "", " ".join(process.cmdline()))
