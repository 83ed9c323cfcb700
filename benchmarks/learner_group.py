"""The cost of learning in several processes: `python -m benchmarks.learner_group [--quick]`.

A case is one of `CASES`, whose networks and batches are large, or a preset.

A lone learner makes updates with a batch of B/N items. Then N processes of this machine make joint
updates with B/N items each (`--learner.processes N`), of the same agent and the same sizes. What an
update takes longer is the cost of the collectives between the processes. Batches are zeros: the
time of an update does not depend on their values. The collectives cross loopback, so the cost is
that of messages and of processes that compete for cores, and not that of a link.

Each pair is measured in two ways. With *shared* cores, each process may use all cores of this
machine, so a lone learner has more cores than each of several. With cores of their *own*, each
process is limited to one core, and a lone learner is the slower of N that run at the same time and
know nothing of each other: that is what several hosts, or enough cores, give. Two busy cores of one
machine share its memory, and may share more, so one may be slower than alone.
Rounds alternate, so that both suffer alike from what else the machine does. The round with the
median ratio counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.acting.actor import transition_spec
from rlstack.configs.learner import LearnerConfig
from rlstack.devices import group
from rlstack.learning.learner import Learner
from rlstack.learning.sharded import averages
from rlstack.networks import NetworkConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import preset
from rlstack.replay import Sample
from rlstack.rpc.addresses import LOOPBACK
from rlstack.types import Batch

NAME = "learner_group"
# Two presets as they are, two with layers of 512 units and batches of 1024, and one whose network
# has convolutions, with two minibatches of 256 images.
CASES: dict[str, Callable[[], Experiment]] = {
    "cartpole-ppo": lambda: preset("cartpole-ppo"),
    "cartpole-dqn": lambda: preset("cartpole-dqn"),
    "wide-dqn": lambda: _wide("cartpole-dqn"),
    "wide-sac": lambda: _wide("halfcheetah-sac"),
    "nature-ppo": lambda: _with_batch(
        preset("pong-ppo"), {"num_epochs": 1, "num_minibatches": 2}, unroll_length=64
    ),
}
_START = 120  # seconds in which the processes must have met
_WARM_UP = 3  # updates, of which the first compiles
_COLLECTIVE = re.compile(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")


class Figures(NamedTuple):
    """Seconds, on this machine."""

    lone: float  # an update of a lone learner with B/N items
    joint: float  # an update of N processes with B/N items each, with their votes
    agreement: float  # an agreement without an update, as while one of the processes has no batch
    collectives: float = 0.0  # number in a joint update
    exchanged: float = 0.0  # bytes of the arrays in them, twice for sums
    divided: float = 1.0  # 0 if each process makes the whole update, with the joined batch
    params: float = 0.0  # number of floats

    @property
    def added(self) -> float:
        """The seconds that the collectives add to an update."""
        return max(0.0, self.joint - self.lone)

    @property
    def ratio(self) -> float:
        """The updates/s of each process, relative to the lone learner."""
        return self.lone / self.joint


def measure(name: str, processes: int, seconds: float, *, own_cores: bool = False) -> Figures:
    """Measures a case's learner alone and in a group of processes of this machine.

    Args:
      name: of one of `CASES`, or of a preset.
      processes: their number.
      seconds: length of each measurement.
      own_cores: whether each process is limited to a core of its own.
    """
    cores = sorted(os.sched_getaffinity(0)) if own_cores else []
    if own_cores and len(cores) < processes:
        raise ValueError(
            f"benchmarks.learner_group: {processes} processes need a core each; there are "
            f"{len(cores)}. Use --cores shared."
        )
    alone = _run(name, processes if own_cores else 1, processes, seconds, cores, joint=False)
    together = _run(name, processes, processes, seconds, cores, joint=True)
    return Figures(
        max(found["update"] for found in alone),
        max(found["update"] for found in together),
        max(found["agreement"] for found in together),
        together[0]["collectives"],
        together[0]["exchanged"],
        together[0]["divided"],
        alone[0]["params"],
    )


def median(rounds: list[Figures]) -> Figures:
    """Returns the round whose ratio is the median of the rounds' (of the two middle, the lower)."""
    ratio = statistics.median_low(found.ratio for found in rounds)
    return next(found for found in rounds if found.ratio == ratio)


class Collectives(NamedTuple):
    """What one call of a compiled program exchanges."""

    numbers: Counter[str]  # of collectives, by their kind
    bytes: float  # of the arrays in them; twice those of sums, which are collected and distributed


def collectives(program: str) -> Collectives:
    """Counts the collectives that one call of a compiled program makes, and their bytes.

    Args:
      program: the HLO of the compiled program. Each loop states how often its body runs.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", program, re.M | re.S))
    entry = re.search(r"^ENTRY %?([\w.-]+)", program, re.M)
    assert entry is not None

    def count(name: str) -> Collectives:
        found: Counter[str] = Counter()
        size = 0.0
        for line in bodies[name].splitlines():
            if collective := _COLLECTIVE.search(line):
                found[collective[1]] += 1
                size += _bytes_of(line[: collective.start()]) * (
                    2 if collective[1] == "all-reduce" else 1
                )
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            times = int(trips[1]) if trips else 1
            called = (
                r"(?:body|to_apply|calls|branch_computations|true_computation|false_computation)"
            )
            for inner in re.findall(rf"{called}=\{{?%?([\w.-]+)", line):
                if inner in bodies:
                    within = count(inner)
                    size += within.bytes * times
                    for kind, number in within.numbers.items():
                        found[kind] += number * times
        return Collectives(found, size)

    return count(entry[1])


def _bytes_of(text: str) -> int:
    """Returns the total size, in bytes, of the arrays in a line of HLO."""
    found = re.findall(r"\b(pred|[a-z]+(\d+))\[([\d,]*)\]", text)
    return sum(
        int(bits or 8) // 8 * math.prod(int(size) for size in shape.split(",") if size)
        for _, bits, shape in found
    )


def _wide(name: str) -> Experiment:
    chosen = _with_batch(preset(name), {}, batch_size=1024)
    return dataclasses.replace(chosen, network=NetworkConfig(hidden_sizes=(512, 512)))


def _with_batch(chosen: Experiment, agent: dict[str, int], **replay: Any) -> Experiment:
    """Returns the experiment with other constants of its agent and of its batches."""
    changed: Any = chosen.agent
    return dataclasses.replace(
        chosen,
        agent=dataclasses.replace(changed, **agent),
        replay=dataclasses.replace(chosen.replay, **replay),
    )


def _run(
    name: str, count: int, parts: int, seconds: float, cores: list[int], *, joint: bool
) -> list[dict[str, float]]:
    """Runs learners with 1/parts of the case's batch each; returns what each has measured.

    Args:
      name: of the case.
      count: number of learners, each in a process.
      parts: of the batch.
      seconds: length of the measurement.
      cores: of the processes; empty for all.
      joint: whether they are one group.
    """
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        meeting = f"{LOOPBACK}:{probe.getsockname()[1]}"
    started = []
    for index in range(count):
        core = cores[index] if cores else -1
        member = (index, count) if joint else (0, 1)
        words = map(str, (*member, parts, meeting, name, seconds, core))
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
    experiment = CASES[name]() if name in CASES else preset(name)
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
    learner = Learner(LearnerConfig(processes=processes), agent, None, jax.random.PRNGKey(1))
    found = {"params": sum(x.size for x in jax.tree.leaves(learner.params))}
    if joined is None:
        found["update"] = _seconds_of(lambda: learner.step(sample), seconds, joined)
    else:
        learner.step(sample)
        update = _with_votes(learner, sample, joined)
        found["update"] = _seconds_of(update, seconds, joined)
        found["agreement"] = _seconds_of(lambda: joined.agree(1, 1, 1), seconds / 2, joined)
        programs = [(collectives(x), n) for x, n in learner.compiled_update(sample).items()]
        number = sum(made.numbers.total() * calls for made, calls in programs)
        found["collectives"] = number + (0 if learner.carries_votes else 1)
        found["exchanged"] = sum(made.bytes * calls for made, calls in programs)
        found["divided"] = averages(agent) or found["collectives"] > 1
    print(json.dumps(found), flush=True)


def _with_votes(learner: Learner, sample: Sample, joined: group.Group) -> Callable[[], Any]:
    """Returns an update with votes as `rlstack.programs.program.data_parallel` makes it."""
    if learner.carries_votes:
        return lambda: learner.step_if_all(sample, (1, 1, 0, 0))
    return lambda: (joined.agree(1, 1, 0), learner.step(sample))


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
    parser.add_argument("--case", nargs="+", default=tuple(CASES), help="of CASES, or presets")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of alternating measurements")
    parser.add_argument("--cores", choices=("shared", "own", "both"), default="both")
    parser.add_argument("--quick", action="store_true", help="one round of one second each")
    parser.add_argument("--child", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        index, processes, parts, meeting, name, seconds, core = args.child
        if int(core) >= 0:  # before JAX starts its threads, one for each core that it may use
            os.sched_setaffinity(0, {int(core)})
        return _child(int(index), int(processes), int(parts), meeting, name, float(seconds))
    seconds, rounds = (1.0, 1) if args.quick else (args.seconds, args.rounds)
    kinds = ("shared", "own") if args.cores == "both" else (args.cores,)
    if args.cores == "both" and len(os.sched_getaffinity(0)) < args.processes:
        kinds = ("shared",)
    result: dict[str, Any] = {"name": NAME, "processes": args.processes, "cases": {}}
    for name in args.case:
        measured: dict[str, list[Figures]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, several in measured.items():
                own = kind == "own"
                several.append(measure(name, args.processes, seconds, own_cores=own))
        result["cases"][name] = {kind: _shown(name, kind, x) for kind, x in measured.items()}
    print(json.dumps(result))
    return None


def _shown(name: str, kind: str, rounds: list[Figures]) -> dict[str, float]:
    """Prints the figures of a case, and returns those of its median round."""
    found = median(rounds)
    cores = "shared cores" if kind == "shared" else "a core of its own for each process"
    print(f"{name}, {found.params:,.0f} params, {cores}:")
    print(f"  an update of a lone learner     {1e3 * found.lone:8.2f} ms")
    print(f"  of the processes together       {1e3 * found.joint:8.2f} ms")
    print(f"  collectives in it               {found.collectives:8.0f}")
    print(f"  their arrays                    {found.exchanged / 1e6:8.2f} MB")
    print(f"  an agreement without an update  {1e3 * found.agreement:8.2f} ms")
    ratios = ", ".join(f"{other.ratio:.2f}" for other in rounds)
    print(f"  updates/s of each process, relative to the lone learner: {ratios}", flush=True)
    return {**found._asdict(), "added": found.added, "ratio": found.ratio}


if __name__ == "__main__":
    main()
