"""Runs programs of several nodes while a test finds, kills and moves their nodes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

from rlstack.storage import checkpoint
from tests.programs.running import failures, metrics

FAST = ("--log-period", "1000", "--evaluator.episodes", "2", "--evaluator.num-envs", "2")


def placed(directory):
    """The placements of nodes, in order of time."""
    return [json.loads(line) for line in (directory / "logs" / "hosts.jsonl").open()]


class Launched:
    """`rlstack train` on a program of several nodes."""

    def __init__(self, run_dir, *args, within=()):
        """`within` precedes the command, for example to run it in a separate network namespace."""
        self.run_dir = run_dir
        self._stderr = open(run_dir.with_suffix(".stderr"), "ab+")  # noqa: SIM115
        self._temporary = run_dir.with_suffix(".temporary")
        self._temporary.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "rlstack", "train", *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self._temporary)},
        )
        self._seen = {}  # descendant processes, by pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.processes()
        self.process.kill()
        self.process.wait()
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        psutil.wait_procs(list(self._seen.values()), timeout=5.0)
        self._stderr.close()

    @property
    def stderr(self):
        return self.run_dir.with_suffix(".stderr").read_text(errors="replace")

    def processes(self):
        """All descendant processes that were ever seen."""
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            self._seen.update({p.pid: p for p in below})
        return list(self._seen.values())

    def titles(self):
        """The processes of the run whose titles say what they are, by that name."""
        found, run_dir = {}, f" {self.run_dir}"
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()).strip()
                if title.startswith("rlstack: ") and title.endswith(run_dir):
                    found[title[len("rlstack: ") : -len(run_dir)]] = process
        return found

    def supervisors(self):
        """The processes that supervise a node, by the node's name."""
        kind = "supervisor:"
        return {n.removeprefix(kind): p for n, p in self.titles().items() if n.startswith(kind)}

    def nodes(self):
        """The processes of nodes that run now, by node name."""
        return {n: p for n, p in self.titles().items() if ":" not in n and n != "launcher"}

    def targets(self):
        """All processes of the program but the command's: nodes, supervisors and the launcher."""
        supervisors = self.supervisors()
        found = {f"supervisor of {name}": process for name, process in supervisors.items()}
        with contextlib.suppress(psutil.NoSuchProcess, StopIteration):
            found["launcher"] = next(iter(supervisors.values())).parents()[0]
        return found | self.nodes()

    def kill(self, name):
        """Sends SIGKILL to a node."""
        self.nodes()[name].kill()

    def wait_for(self, condition, what, timeout=90.0):
        """Waits until the condition is true; the program must keep running."""
        until = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < until, f"{what} did not come in {timeout:g} s: {self.stderr}"
            time.sleep(0.1)
        self.processes()

    def wait_for_log(self, name, at_least=-float("inf"), timeout=90.0):
        """Waits until a log has a value of at least ``at_least``."""

        def is_there():
            if not (self.run_dir / "metrics.jsonl").exists():
                return False
            values = [line[name] for line in metrics(self.run_dir) if name in line]
            return bool(values) and values[-1] >= at_least

        self.wait_for(is_there, f"{name} >= {at_least}", timeout)

    def wait_for_update(self):
        """Waits until the program has made a learner step."""
        self.wait_for_log("learner/loss")

    def wait_for_checkpoint(self):
        """Waits for the first checkpoint."""
        self.wait_for(lambda: self.saved_frames() > 0, "a checkpoint")

    def saved_frames(self):
        """The frames of the newest checkpoint, 0 without one."""
        path = checkpoint.latest(self.run_dir / "checkpoints")
        return 0 if path is None else checkpoint.read_metadata(path)["env_frames"]

    def end(self, timeout):
        """Waits for the end; returns the exit code and the leftovers after at most 10 s.

        Leftovers are processes and temporary files.
        """
        self.processes()
        code = self.process.wait(timeout)
        _, alive = psutil.wait_procs(self.processes(), timeout=10.0)
        left = [" ".join(p.cmdline()[-6:]) for p in alive if p.is_running()]
        return code, left + [path.name for path in self._temporary.rglob("*")]

    def failures(self):
        """The records of failed nodes."""
        return failures(self.run_dir)


class Meanwhile(threading.Thread):
    """Acts on a program that runs in the main thread, and reports errors raised in this thread."""

    def __init__(self, directory, does):
        super().__init__(daemon=True)
        self.directory, self._does = directory, does
        self._ended, self._error = threading.Event(), None

    def run(self):
        try:
            self._does(self)
        except BaseException as error:
            if not self._ended.is_set():  # else the program has ended first
                self._error = error
                os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.join()
        if self._error is not None:
            raise self._error

    def wait_for(self, condition, timeout=90.0):
        """Waits until the condition is true."""
        until = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < until
            assert not self._ended.wait(0.05)

    def wait_for_update(self):
        """Waits until the program has made a learner step."""
        self.wait_for(lambda: self.newest("learner/loss") is not None)

    def newest(self, name):
        """The newest value of a log, None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            values = [line[name] for line in metrics(self.directory) if name in line]
            return values[-1] if values else None

    def where(self, name):
        """The last known placement of a node."""
        return [record for record in placed(self.directory) if record["node"] == name][-1]
