"""The cost of learning in several processes: `python -m benchmarks.learner_group [--quick]`.

A lone learner makes updates with a batch of B/N items. Then N processes of this machine make joint
updates with B/N items each (`--learner.processes N`), of the same agent and the same sizes. What an
update takes longer is the cost of the sums between the processes. Batches are zeros: the time of an
update does not depend on their values. Params cross loopback, so the cost is that of messages and
of processes that compete for cores, and not that of a link.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from programs.components.agent import make_agent
from programs.components.environments import environment_spec
from programs.presets import preset
from rlstack.acting.actor import transition_spec
from rlstack.devices import group
from rlstack.learning.learner import Learner, LearnerConfig
from rlstack.replay import Sample
from rlstack.rpc.socket_filter import LOOPBACK
from rlstack.types import Batch

NAME = "learner_group"
_START = 120  # seconds in which the processes must have met
_WARM_UP = 3  # updates, of which the first compiles


class Figures(NamedTuple):
    """Seconds, on this machine."""

    lone: float  # an update of a lone learner with B/N items
    joint: float  # an update of N processes with B/N items each
    agreement: float  # an agreement of the processes on what comes next

    @property
    def added(self) -> float:
        """The seconds that the sums and the agreement add to an update."""
        return max(0.0, self.joint + self.agreement - self.lone)


def measure(name: str, processes: int, seconds: float) -> Figures:
    """Measures a preset's learner alone and in a group of processes of this machine."""
    (alone,) = _run(name, 1, processes, seconds)
    together = _run(name, processes, processes, seconds)
    joint = max(found["update"] for found in together)
    return Figures(alone["update"], joint, max(found["agreement"] for found in together))


def _run(name: str, processes: int, parts: int, seconds: float) -> list[dict[str, float]]:
    """Runs learners with 1/parts of the preset's batch each; returns what each has measured."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        meeting = f"{LOOPBACK}:{probe.getsockname()[1]}"
    started = []
    for index in range(processes):
        words = map(str, (index, processes, parts, meeting, name, seconds))
        command = [sys.executable, "-m", "benchmarks.learner_group", "--child", *words]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
    try:
        said = [process.communicate(timeout=_START + 4 * seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(text.splitlines()[-1]) for text in said]


def _child(index: int, processes: int, parts: int, meeting: str, name: str, seconds: float) -> None:
    experiment = preset(name)
    joined = None
    if processes > 1:
        joined = group.join(meeting, index, processes, host=LOOPBACK, visible=None, timeout=_START)
    spec = environment_spec(experiment)
    agent, cfg = make_agent(experiment, spec), experiment.replay
    shape = cfg.unroll_length + 1, cfg.batch_size // parts
    steps = jax.tree.map(
        lambda x: np.zeros((*shape, *x.shape), x.dtype), transition_spec(agent, spec)
    )
    sample = Sample(
        Batch(steps, np.ones(shape[1], np.float32)), np.arange(shape[1], dtype=np.uint64)
    )
    config = LearnerConfig(processes=processes, check_finite=False, minibatches="scan")
    learner = Learner(config, agent, None, jax.random.PRNGKey(1))
    found = {"update": _seconds_of(lambda: learner.step(sample), seconds, joined)}
    if joined is not None:
        found["agreement"] = _seconds_of(lambda: joined.agree(1, 1, 1), seconds / 2, joined)
    print(json.dumps(found), flush=True)


def _seconds_of(call: Callable[[], Any], seconds: float, joined: group.Group | None) -> float:
    """Returns the mean time of a call; all processes of a group make the same number of calls."""
    for _ in range(_WARM_UP):
        call()
    begun = time.perf_counter()
    call()
    once = time.perf_counter() - begun
    count = max(3, round(seconds / once))
    if joined is not None:
        count = int(joined.agree(count)[0, 0])
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def main(arguments: list[str] | None = None) -> None:
    """Measures; prints the figures and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner_group")
    parser.add_argument("--preset", default="cartpole-ppo")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--quick", action="store_true", help="one second each")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        index, processes, parts, meeting, name, seconds = args.child
        return _child(int(index), int(processes), int(parts), meeting, name, float(seconds))
    seconds = 1.0 if args.quick else args.seconds
    found = measure(args.preset, args.processes, seconds)
    print(f"an update of a lone learner    {1e3 * found.lone:8.2f} ms")
    print(f"of {args.processes} processes together        {1e3 * found.joint:8.2f} ms")
    print(f"an agreement before an update  {1e3 * found.agreement:8.2f} ms")
    ratio = found.lone / (found.joint + found.agreement)
    print(f"updates/s of each process, relative to the lone learner: {ratio:.2f}")
    print(json.dumps({"name": NAME, **found._asdict(), "added": found.added, "ratio": ratio}))
    return None


if __name__ == "__main__":
    main()
