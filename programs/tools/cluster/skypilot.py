"""A task for SkyPilot."""

from __future__ import annotations

import shlex

from rlstack.programs.tools.cluster.job import Job
from rlstack.programs.tools.cluster.jobset import IMPLIED as IMPLIED
from rlstack.programs.tools.cluster.kubernetes import RUNS, Tree, as_yaml
from rlstack.programs.tools.cluster.options import SkyPilotOptions


def text(job: Job, options: SkyPilotOptions) -> str:
    """Returns the file.

    Raises:
      ValueError: the kind of GPU is not given.
    """
    parts = [job.learners, *([job.actors] if job.actors else [])]
    gpus = max(part.gpus for part in parts)
    if bool(gpus) != bool(options.accelerator):
        raise ValueError(
            "--accelerator must name the kind of GPU if --program.ray.gpus reserves some, and only "
            f"then; got {options.accelerator!r} and {gpus} GPUs"
        )
    resources: Tree = {
        "cpus": f"{max(part.cpus for part in parts)}+",
        "memory": f"{max(part.memory_gb for part in parts)}+",
    }
    if gpus:
        resources["accelerators"] = {options.accelerator: gpus}
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    if options.spot:
        resources["use_spot"] = True
    task: Tree = {"name": job.name, "num_nodes": job.num_hosts, "resources": resources}
    if options.volume:
        task["volumes"] = {RUNS: options.volume}
    if not options.image:
        task |= {"workdir": ".", "setup": "pip install .\n"}
    task["run"] = f"exec {shlex.join(job.words)}\n"
    command = "sky jobs launch" if options.spot else "sky launch"
    return as_yaml([f"{command} FILE"], task)
