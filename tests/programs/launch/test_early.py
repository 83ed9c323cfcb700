"""A launcher that starts before its command has imported anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlstack.programs.program import supervisor
from rlstack.programs.program.launch import launcher, processes
from rlstack.programs.session import module_path
from rlstack.programs.session.run_dir import RunDir
from tests.programs.running import nothing_left

pytestmark = pytest.mark.timeout(90, method="thread")


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ("--topology distributed", True),
        ("--seed 3 --topology=light_env", True),
        ("--topology heavy_env --launch processes", True),
        ("--topology heavy_env --launch=threads", False),
        ("--topology distributed --program.launch ray", False),
        ("--topology distributed --seeds 1 2 --jobs 2", False),
        ("--topology distributed --dry-run", False),
        ("--topology distributed --help", False),
        ("--topology single_process", False),
        ("--topology", False),
        ("", False),
    ],
)
def test_arguments_say_whether_there_will_be_nodes(options, needed):
    assert launcher.is_needed(["cartpole-ppo", *options.split()]) is needed


def test_a_run_takes_the_launcher_that_is_there(tmp_path):
    directory = RunDir.create(tmp_path / "run", "test", 1)
    with nothing_left(), launcher.early():
        (early,) = psutil.Process().children()
        with processes.started(launcher.LOCAL, directory) as process:
            assert process.pid == early.pid
            title = f"rlstack: launcher {directory.path}"
            until = time.monotonic() + 60.0
            while " ".join(early.cmdline()).strip() != title:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            for output in (1, 2):
                where = os.readlink(f"/proc/{early.pid}/fd/{output}")
                assert where == str(directory.node_logs / "launcher")
        assert not early.is_running()
        with processes.started(launcher.LOCAL, directory) as second:
            assert second.pid != early.pid


def test_what_it_prints_before_it_has_a_run_is_in_its_log(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise ImportError('JAX is broken')")
    path = module_path.for_children()
    monkeypatch.setattr(module_path, "for_children", lambda: f"{tmp_path}{os.pathsep}{path}")
    directory = RunDir.create(tmp_path / "run", "test", 1)
    with nothing_left(), launcher.early(), processes.started(launcher.LOCAL, directory) as process:
        assert process.wait(60.0) == 1
    assert "JAX is broken" in (directory.node_logs / "launcher").read_text()


@pytest.mark.parametrize("told", [True, False])
def test_files_of_a_run_are_removed_even_if_the_launcher_still_imports(tmp_path, told):
    """Its parent is killed after it has told the launcher of files that it cannot remove."""
    keys = tmp_path / "rlstack-keys-x"
    keys.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", launcher.LOCAL, ""],
        stdin=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": module_path.for_children(),
            supervisor.PARENT: str(os.getpid()),
        },
    )
    try:
        if told:
            line = {
                "run_dir": str(tmp_path),
                "log": str(tmp_path / "log"),
                "variables": {"RLSTACK_KEYS": str(keys / "keys")},
            }
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
        while "rlstack: launcher" not in " ".join(psutil.Process(process.pid).cmdline()):
            time.sleep(0.005)
        process.terminate()  # as the kernel does when the parent ends
        assert process.wait(20.0) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
    assert keys.exists() is not told


def test_a_command_that_fails_leaves_no_launcher(tmp_path):
    command = [sys.executable, "-m", "rlstack", "train", "cartpole-ppo"]
    command += ["--topology", "distributed", "--no-such-option", "1"]
    (tmp_path / "temporary").mkdir()
    with nothing_left():
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary"), launcher.compiled.OWN: ""},
        )
    assert done.returncode == 2 and "no-such-option" in done.stderr
    assert not list((tmp_path / "temporary").iterdir())
