"""A training job: its command, and the hosts that it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from rlstack.programs.config.experiment import Experiment
from rlstack.programs.tools.cluster.options import JobOptions

_GB_PER_CORE = 2  # of a node for which nothing is reserved
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


class Hosts(NamedTuple):
    """Several equal hosts."""

    number: int
    cpus: int
    gpus: int
    memory_gb: int


class Job(NamedTuple):
    """What a file runs."""

    name: str
    words: tuple[str, ...]  # the command, without what depends on the hosts
    run_dir: str
    experiment: Experiment
    learners: Hosts
    actors: Hosts | None  # None if the run has one host

    @property
    def num_hosts(self) -> int:
        """The number of all hosts."""
        return self.learners.number + (self.actors.number if self.actors else 0)

    @property
    def metrics_port(self) -> int:
        """The port at which other hosts ask for metrics; 0 for none."""
        address, _, port = self.experiment.program.metrics.rpartition(":")
        return int(port) if address else 0


def job_of(experiment: Experiment, words: Sequence[str], run_dir: str, options: JobOptions) -> Job:
    """Returns the job of an experiment.

    Args:
      experiment: what the command trains.
      words: the command.
      run_dir: its run directory.
      options: the options of the file.

    Raises:
      ValueError: the name is no name, a number is too small, or a node needs more cores than a host
        may have.
    """
    if options.worker_cpus < 1:
        raise ValueError(f"--worker-cpus must be at least 1; got {options.worker_cpus}")
    if (retries := getattr(options, "retries", 0)) < 0:
        raise ValueError(f"--retries must be at least 0; got {retries}")
    name = options.name or _cleaned(experiment.preset)
    if not _NAME.fullmatch(name):
        raise ValueError(
            "--name must be lowercase letters, digits and dashes, begin with a letter, and be at "
            f"most 40 long; got {name!r}"
        )
    learners, actors = _learners(experiment), None
    if experiment.layout.has_replay_node:
        actors = _actors(experiment, options.worker_cpus)
    else:
        learners = _alone(experiment)
    return Job(name, tuple(words), run_dir, experiment, learners, actors)


def _cleaned(preset: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", preset.lower()).strip("-")[:40].rstrip("-") or "rlstack"


def _learners(experiment: Experiment) -> Hosts:
    """Returns the hosts of the learner processes; each fits what the first one has."""
    count = experiment.learner.processes
    each = {"learner": 1.0, "replay": 1.0, "coordinator": 1.0}
    return _hosts(experiment, count, each)


def _actors(experiment: Experiment, most_cpus: int) -> Hosts:
    """Returns the hosts of actors, inference services and the evaluator."""
    program, policies = experiment.program, max(1, len(experiment.policies))
    numbers = {
        "actor": program.num_actors,
        "inferencer": program.num_inferencers * policies,
        "evaluator": 1,
    }
    largest = max(program.ray.cpus_of(group) for group in ("actor", "inferencer"))
    if largest > most_cpus:
        raise ValueError(
            f"--worker-cpus must be at least {largest:g}, which --program.ray.cpus reserves for "
            f"one node; got {most_cpus}"
        )
    for count in range(1, program.num_actors + 1):
        share = {group: math.ceil(number / count) for group, number in numbers.items()}
        found = _hosts(experiment, count, share)
        if found.cpus <= most_cpus:
            break
    return found


def _alone(experiment: Experiment) -> Hosts:
    """Returns the single host of a run whose nodes share memory."""
    program = experiment.program
    if experiment.in_one_process:
        return _hosts(experiment, 1, {"learner": 1.0})
    numbers = {"coordinator": 1.0, "evaluator": 1.0, "actor": float(program.num_actors)}
    numbers["learner"] = float(experiment.learner.processes)
    if experiment.layout.has_services:
        numbers["inferencer"] = float(program.num_inferencers)
    return _hosts(experiment, 1, numbers)


def _hosts(experiment: Experiment, count: int, nodes: dict[str, float] | dict[str, int]) -> Hosts:
    """Returns hosts with room for these numbers of nodes each, by group."""
    ray = experiment.program.ray
    cpus = sum(number * ray.cpus_of(group) for group, number in nodes.items())
    gpus = sum(number * ray.gpus.get(group, 0.0) for group, number in nodes.items())
    memory = sum(
        number * ray.memory_gb.get(group, _GB_PER_CORE * ray.cpus_of(group))
        for group, number in nodes.items()
    )
    return Hosts(count, max(1, math.ceil(cpus)), math.ceil(gpus), max(1, math.ceil(memory)))
