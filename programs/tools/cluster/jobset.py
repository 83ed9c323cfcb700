"""Writes a JobSet of learners and actors, one indexed Job each, and their network policy."""

from __future__ import annotations

from typing import Any

from rlstack.programs.tools.cluster.job import Hosts, Job
from rlstack.programs.tools.cluster.kubernetes import Tree, as_yaml, metadata, network_policy, pod
from rlstack.programs.tools.cluster.options import JobSetOptions

IMPLIED = {
    "--topology": "distributed",
    "--program.launch": "hosts",
    "--replay.service": "table",
}
_ACTOR_FAILURES = 20  # of all pods with actors together, without those of lost machines
_GRACE = 60  # seconds from the request to end until a pod is killed: the run saves


def text(job: Job, options: JobSetOptions) -> str:
    """Returns the file."""
    groups, command = {"learner": job.learners}, [*job.words]
    if job.actors is not None:
        groups["actor"] = job.actors
        command += ["--program.hosts", *(_names(job, *group) for group in groups.items())]
    jobs = [_job(job, options, name, hosts, command) for name, hosts in groups.items()]
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, options, queued=True),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": job.name,
                "publishNotReadyAddresses": True,
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["learner"]},
            "failurePolicy": {"maxRestarts": options.retries},
            "replicatedJobs": jobs,
        },
    }
    about = (
        f"kubectl apply -f FILE; kubectl logs -f job/{job.name}-learner-0 shows the run, and",
        f"kubectl delete jobset {job.name} ends it.",
    )
    # Between learners, gloo and NCCL choose ports themselves.
    free = job.experiment.learner.processes > 1
    ports = None if free or job.actors is None else job.experiment.program.port_range
    return as_yaml(about, job_set, network_policy(job, options, ports))


def _names(job: Job, group: str, hosts: Hosts) -> str:
    """Returns the names that the headless service gives to the pods of a group, as a list."""
    return f"{job.name}-{group}-0-[0-{hosts.number - 1}].{job.name}"


def _job(job: Job, options: JobSetOptions, group: str, hosts: Hosts, command: list[str]) -> Tree:
    is_actor = group == "actor"
    rest: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE,
    }
    spec: Tree = {
        "completionMode": "Indexed",
        "completions": hosts.number,
        "parallelism": hosts.number,
        "backoffLimit": _ACTOR_FAILURES if is_actor else 0,
    }
    if is_actor:  # a machine that is taken away is no failure: its pod comes back
        condition = [{"type": "DisruptionTarget", "status": "True"}]
        spec["podFailurePolicy"] = {"rules": [{"action": "Ignore", "onPodConditions": condition}]}
    spec["template"] = pod(job, options, group, hosts, command=command, spot=is_actor, more=rest)
    return {"name": group, "replicas": 1, "template": {"spec": spec}}
