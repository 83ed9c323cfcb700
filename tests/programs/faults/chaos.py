"""Disturbs a program at random: ``python -m tests.programs.faults.chaos --topology light_env``.

Nodes, supervisors and the launcher are killed, told to end, or stopped for 15 s and continued. The
program must go on, or end within ten seconds and name the right node; then it is resumed. In the
end it must reach a result. Prints what happened as JSON; the exit code is 1 if anything was wrong.
"""

import argparse
import collections
import contextlib
import json
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil

from tests.programs.launched import FAST, Launched
from tests.programs.running import TOPOLOGIES, blocks

STOP_SECONDS = 15.0
FAULTS = ("SIGKILL", "SIGTERM", "SIGSTOP")
START_SECONDS = 240.0  # on a busy machine
END_SECONDS = 10.0  # from the fault to the end of the command

_ENDLESS = 100_000_000


def arguments(topology, run_dir, *more):
    """The command line of PPO with two actors and frequent checkpoints."""
    return (
        "cartpole-ppo", "--topology", topology, "--run-dir", run_dir, "--program.num-actors", 2,
        "--program.num-inferencers", 2, "--program.max-restarts", 100, *FAST,
        "--frames", _ENDLESS, "--checkpoint-period", 2000, *more,
    )  # fmt: skip


def blamed(target):
    """The node to be named when this process fails for good."""
    return target.removeprefix("supervisor of ")


def is_fatal(target, fault):
    """Whether the fault ends the program."""
    restartable = target.startswith(("actor", "inferencer", "evaluator"))
    return fault != "SIGSTOP" and not restartable


def disturb(program, target, fault):
    """Does something bad to a process of the program; returns when."""
    process = program.targets()[target]
    began = time.monotonic()
    if fault == "SIGSTOP":
        process.suspend()
        time.sleep(STOP_SECONDS)
        with contextlib.suppress(psutil.NoSuchProcess):  # the program did not need it any more
            process.resume()
    else:
        process.send_signal(getattr(signal, fault))
    return began


class Chaos:
    """Runs, disturbs and resumes one program."""

    def __init__(self, topology, minutes, seed, directory, transport="auto"):
        self._topology, self._seconds = topology, 60.0 * minutes
        self._transport = transport
        self._run_dir = Path(directory) / "run"
        self._draw = random.Random(seed)
        self._saved = 0
        self._blocks = blocks()
        self.wrong = []
        self.faults = collections.Counter()
        self.ends = []  # seconds from a fault to the end of the command
        self.legs = self.restarts = 0

    def run(self):
        """Disturbs for the given time, then lets the program end; returns a report."""
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            self._leg(until)
        self._finish()
        return {
            "topology": self._topology,
            "transport": self._transport,
            "minutes": self._seconds / 60,
            "faults": dict(sorted(self.faults.items())),
            "commands": self.legs,
            "restarts": self.restarts,
            "ended_by_faults": len(self.ends),
            "longest_end_seconds": round(max(self.ends, default=0.0), 1),
            "saved_frames": self._saved,
            "wrong": self.wrong,
        }

    def _start(self, *more):
        self.legs += 1
        if self._saved:
            return Launched(self._run_dir, "--resume", self._run_dir, *more)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        more = ("--program.transport", self._transport, *more)
        return Launched(self._run_dir, *arguments(self._topology, self._run_dir, *more))

    def _leg(self, until):
        """Starts or resumes the program, and disturbs it until it ends or the time is over."""
        with self._start() as program:
            heard = len(program.stderr)
            started = time.monotonic()
            while not program.targets() and time.monotonic() < started + START_SECONDS:
                time.sleep(0.1)
            while time.monotonic() < until:
                time.sleep(self._draw.uniform(1.0, 12.0))
                target, fault = self._choose(program)
                if target is None:
                    break
                self.faults[f"{fault} {blamed(target).split('/')[0]}"] += 1
                try:
                    began = disturb(program, target, fault)
                except (KeyError, psutil.NoSuchProcess):
                    continue
                if is_fatal(target, fault):
                    self._check_end(program, target, fault, began, heard)
                    break
                time.sleep(1.0)
                if program.process.poll() is not None:
                    said = program.stderr[heard:][-600:]
                    self.wrong.append(f"{fault} of {target} ended the program: {said}")
                    break
            else:
                program.process.send_signal(signal.SIGINT)
                code, left = program.end(60)
                if (code, left) != (130, []):
                    self.wrong.append(f"Ctrl-C: exit code {code}, left behind {left}")
            self._check_saved(program)
            self.restarts += sum(bool(f["restarts"]) for f in program.failures())

    def _choose(self, program):
        """Returns a process and a fault at random, each kind of process with equal chance."""
        if program.process.poll() is not None:
            self.wrong.append(f"the program ended by itself: {program.stderr[-600:]}")
            return None, None
        kinds = collections.defaultdict(list)
        for name in program.targets():
            kinds[name.split("/")[0]].append(name)
        if not kinds:
            return None, None
        # Most faults should not end the program, or it would do nothing but start.
        lasting = [kind for kind in kinds if not is_fatal(kind, "SIGKILL")]
        fault = self._draw.choice(FAULTS)
        some = sorted(lasting if lasting and self._draw.random() < 0.7 else kinds)
        return self._draw.choice(sorted(kinds[self._draw.choice(some)])), fault

    def _check_end(self, program, target, fault, began, heard):
        try:
            code = program.process.wait(60.0)
        except Exception as error:
            self.wrong.append(f"{fault} of {target}: no end: {error}")
            return
        took = time.monotonic() - began
        self.ends.append(took)
        _, left = program.end(10)
        said = program.stderr[heard:]
        if took > END_SECONDS:
            self.wrong.append(f"{fault} of {target}: ended only after {took:.1f} s")
        if code in (0, 130, 143) or f"node {blamed(target)} failed" not in said[-6000:]:
            self.wrong.append(f"{fault} of {target}: exit code {code}, and said: {said[-900:]}")
        if left:
            self.wrong.append(f"{fault} of {target} left behind {left}")

    def _check_saved(self, program):
        """No checkpoint may be lost, and no shared memory left."""
        saved = program.saved_frames()
        if saved < self._saved:
            self.wrong.append(f"a checkpoint of {self._saved} frames was lost; {saved} are saved")
        self._saved = max(self._saved, saved)
        if more := blocks() - self._blocks:
            self.wrong.append(f"shared memory left behind: {sorted(more)}")

    def _finish(self):
        """Lets the program reach its target."""
        with self._start("--frames", self._saved + 20_000) as program:
            code, left = program.end(START_SECONDS + 120.0)
            if (code, left) != (0, []) or not (self._run_dir / "result.json").exists():
                said = program.stderr[-900:]
                self.wrong.append(f"the last command: {code}, left {left}: {said}")
            self._check_saved(program)


def main():
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--topology", choices=TOPOLOGIES, default="heavy_env")
    parser.add_argument("--transport", choices=("auto", "zmq", "courier"), default="auto")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlstack-chaos-") as directory:
        report = Chaos(
            chosen.topology, chosen.minutes, chosen.seed, directory, chosen.transport
        ).run()
    print(json.dumps(report, indent=2))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
