"""One command at a time writes to a run directory, also where the file system has no locks."""

import errno
import fcntl
import json
import os
import pickle
import subprocess
import sys

import pytest

from rlstack.programs.session import run_lock
from rlstack.programs.session.run_dir import RunDir, RunDirError
from rlstack.programs.session.run_lock import ClaimLostError, RunLock, RunLockedError

_HOLD = """
import errno, fcntl, sys
from pathlib import Path
from rlstack.programs.session import run_lock
def no_locks(*_): raise OSError(errno.ENOLCK, "no locks")
if sys.argv[2] == "lease":
    fcntl.flock = no_locks
    run_lock._SETTLE, run_lock._BEAT = 0.01, 0.05
lock = run_lock.RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that holds the lock."""

    def __init__(self, path, mode):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(path), mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout.readline() == b"held\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def kill(self):
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(params=["flock", "lease"])
def mode(request, monkeypatch):
    if request.param == "lease":

        def no_locks(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        monkeypatch.setattr(run_lock, "_SETTLE", 0.01)
        monkeypatch.setattr(run_lock, "_BEAT", 0.05)
        monkeypatch.setattr(run_lock, "_LEASE", 0.5)
    return request.param


@pytest.mark.timeout(60)
def test_the_second_command_is_refused_by_name_and_a_kill_frees_the_directory(tmp_path, mode):
    with Holder(tmp_path, mode) as holder:
        for _ in range(2):
            with pytest.raises(RunLockedError) as caught:
                RunLock(tmp_path)
        for word in (str(tmp_path), f"process {holder.process.pid} ", os.uname().nodename):
            assert word in str(caught.value)
        holder.kill()
        lock = RunLock(tmp_path)
        lock.claim.check()
        lock.release()


@pytest.mark.timeout(60)
def test_a_lock_in_the_same_process_counts_and_release_frees_it(tmp_path, mode):
    first = RunLock(tmp_path)
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        RunLock(tmp_path)
    first.release()
    first.release()
    second = RunLock(tmp_path)
    second.claim.check()
    with pytest.raises(ClaimLostError, match=str(tmp_path)):
        first.claim.check()
    second.release()


@pytest.mark.timeout(60)
def test_a_lease_of_another_host_ends_when_it_no_longer_changes(tmp_path, mode, monkeypatch):
    if mode == "flock":
        pytest.skip("a lock of the kernel ends with its holder")
    with Holder(tmp_path, mode) as holder:
        monkeypatch.setattr(run_lock, "_machine", lambda: "another")
        with pytest.raises(RunLockedError):
            RunLock(tmp_path)
        holder.kill()
        RunLock(tmp_path).release()


def test_writers_of_a_command_that_lost_the_directory_change_nothing(tmp_path):
    run = RunDir(tmp_path)
    with run.claimed() as directory:
        directory.write_result({"n": 1})
        there = pickle.loads(pickle.dumps(directory))  # as in a node's process
        there.check_claim()
    with run.claimed() as later:
        for write in (lambda: there.write_result({"n": 2}), lambda: there.write_config("{}")):
            with pytest.raises(ClaimLostError, match=f"process {os.getpid()} .*taken it over"):
                write()
        later.write_config("{}")
        (tmp_path / ".lock").unlink()
        with pytest.raises(ClaimLostError, match="gone"):
            later.check_claim()
    assert json.loads(run.result.read_text()) == {"n": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "result.json"]


def test_a_lock_that_cannot_be_written_is_named(tmp_path):
    words = r"\.lock must be a file that can be written"
    with pytest.raises(RunDirError, match=words), RunDir(tmp_path / "missing").claimed():
        pass


def test_a_directory_with_only_a_lock_is_new(tmp_path):
    with RunDir.create(tmp_path, "p", 0).claimed():
        pass
    assert RunDir.create(tmp_path, "p", 0).path == tmp_path
