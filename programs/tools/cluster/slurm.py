"""A script for sbatch: a heterogeneous job, or a simple one if one host is enough."""

from __future__ import annotations

import shlex

from rlstack.programs.tools.cluster.job import Hosts, Job
from rlstack.programs.tools.cluster.jobset import IMPLIED as IMPLIED
from rlstack.programs.tools.cluster.options import SlurmOptions

_HEAD = """\
#!/bin/bash
# sbatch FILE, where the environment of rlstack is active. The run directory and the environment are
# on a file system that all nodes share. A job that is started again continues its run.
"""
_ONCE = ("--requeue", "--open-mode=append", "--signal=B:TERM@120")


def text(job: Job, options: SlurmOptions) -> str:
    """Returns the script."""
    common = [f"--job-name={job.name}"]
    common += [f"--account={options.account}"] * bool(options.account)
    common += [f"--time={options.time}"] * bool(options.time)
    first = [*common, *_ONCE, *_part(job.learners, options.partition)]
    # A task uses all cores of its node's part; srun does not know the number of each part.
    srun = ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    lines = ["# Learners.", *(f"#SBATCH {option}" for option in first)]
    if job.actors is not None:
        partition = options.actor_partition or options.partition
        second = [*common, *_part(job.actors, partition)]
        lines += ["#SBATCH hetjob", "# Actors.", *(f"#SBATCH {option}" for option in second)]
        srun.append("--het-group=0,1")
    command = shlex.join([*srun, *job.words])
    return f"{_HEAD}{chr(10).join(lines)}\nset -euo pipefail\n\nexec {command}\n"


def _part(hosts: Hosts, partition: str) -> list[str]:
    """Returns the options for some nodes."""
    found = [f"--partition={partition}"] * bool(partition)
    found += [f"--nodes={hosts.number}", "--ntasks-per-node=1", f"--cpus-per-task={hosts.cpus}"]
    found += [f"--mem={hosts.memory_gb}G"]
    return found + [f"--gpus-per-node={hosts.gpus}"] * bool(hosts.gpus)
