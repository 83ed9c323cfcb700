"""Disks that are full or read-only: training ends soon, names the file and loses no checkpoint."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlstack.programs.config.presets import preset
from rlstack.storage import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240, method="thread")]

_COMMON = (
    "--frames", "100000000", "--log-period", "500", "--checkpoint-period", "2000",
    "--evaluator.episodes", "2", "--evaluator.num-envs", "2",
)  # fmt: skip
ROOT = os.geteuid() == 0  # others need a namespace of users, in which nodes cannot filter ports
_SIZE = 48 << 20  # bytes of the disk


class Disk:
    """A small disk that only the commands started here see, in a mount namespace of their own."""

    def __init__(self, folder):
        self.folder = folder
        self._holder = subprocess.Popen(
            ["unshare", "-m", *(() if ROOT else ("-r",)), "sh", "-c",
             f"mount -t tmpfs -o size={_SIZE} tmpfs {folder} && echo mounted && exec sleep 600"],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        if self._holder.stdout.readline() != b"mounted\n":
            self.close()
            pytest.skip("this user may not mount a disk")
        self.seen = Path(f"/proc/{self._holder.pid}/root{folder}")  # the disk from outside

    def close(self):
        self._holder.kill()
        self._holder.wait()
        self._holder.stdout.close()

    def start(self, *command):
        """Starts a command that sees the disk."""
        enter = ("nsenter", "-t", str(self._holder.pid), "-m")
        if not ROOT:
            enter = (*enter, "-U", "--preserve-credentials")
        return subprocess.Popen(
            [*enter, "env", f"--chdir={os.getcwd()}", *map(str, command)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def fill(self):
        """Leaves not one free byte."""
        with open(self.seen / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with open(self.seen / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(64))

    def protect(self, path):
        """Makes a directory read-only, as a kernel does after errors of a disk."""
        for how in (("--bind", path, path), ("-o", "remount,ro,bind", path)):
            assert self.start("mount", *how).wait(10) == 0


@pytest.fixture
def disk(tmp_path):
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("needs unshare and nsenter")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = Disk(folder)
    yield made
    made.close()


def train(disk, *args):
    return disk.start(sys.executable, "-m", "rlstack", "train", *args)


def wait_for_checkpoints(process, run, number):
    until = time.monotonic() + 120
    while len(checkpoint.paths(run / "checkpoints")) < number:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until, "no checkpoint"
        time.sleep(0.05)


def check_end(process, disk, run):
    """The command ends within ten seconds with one message; returns the message."""
    since = time.monotonic()
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    assert time.monotonic() - since < 10.0, said
    assert process.returncode == 1, said
    last = said[said.rindex("rlstack train: ") :]
    assert "disk/run" in last
    whole = checkpoint.newest_intact(run / "checkpoints")
    assert checkpoint.read_metadata(whole)["env_frames"] > 0
    assert not list((run / "checkpoints").glob(".partial-*"))
    return last


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("single_process", marks=pytest.mark.chosen),
        "heavy_env",
        pytest.param("distributed", marks=pytest.mark.chosen),
    ],
)
@pytest.mark.parametrize("fault", ["full", "read-only checkpoints"])
def test_a_disk_that_cannot_be_written_ends_training(disk, topology, fault):
    if topology != "single_process" and not ROOT:
        pytest.skip("only root can mount a disk and filter ports")
    run = disk.seen / "run"
    assert preset("cartpole-ppo").topology == "single_process"
    options = (*_COMMON, "--topology", topology, "--run-dir", disk.folder / "run")
    process = train(disk, "cartpole-ppo", *options)
    wait_for_checkpoints(process, run, 2)
    before = checkpoint.paths(run / "checkpoints")[-1]
    if fault == "full":
        disk.fill()
    else:
        disk.protect(disk.folder / "run" / "checkpoints")
    last = check_end(process, disk, run)
    assert ("No space left" if fault == "full" else "Read-only") in last, last
    assert before.exists() or checkpoint.paths(run / "checkpoints")[0] > before
    if fault == "full":  # and the run goes on when there is room
        (disk.seen / "filler").unlink()
        frames = checkpoint.read_metadata(checkpoint.latest(run / "checkpoints"))["env_frames"]
        command = ("--resume", disk.folder / "run", "--frames", frames + 1000)
        process = train(disk, *command)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert (run / "result.json").exists()


def test_a_read_only_run_directory_cannot_be_resumed_but_evaluated(disk):
    run = disk.folder / "run"
    process = train(disk, "cartpole-ppo", *_COMMON, "--frames", 1000, "--run-dir", run)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    disk.protect(disk.folder)
    process = train(disk, "--resume", run, "--frames", 3000)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{run}/.lock must be a file that can be written; Read-only" in said
    command = (sys.executable, "-m", "rlstack", "eval", run, "--episodes", 1)
    process = disk.start(*command)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
