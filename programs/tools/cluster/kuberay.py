"""Writes a RayJob for the KubeRay operator, and the network policy of its pods."""

from __future__ import annotations

import shlex

from rlstack.programs.tools.cluster.job import Hosts, Job
from rlstack.programs.tools.cluster.kubernetes import Tree, as_yaml, metadata, network_policy, pod
from rlstack.programs.tools.cluster.options import KubeRayOptions

RAY = "2.60.0"  # of the image, by requirements.lock
IMPLIED = {
    "--topology": "distributed",
    "--program.launch": "ray",
    "--replay.service": "table",  # all that the image has
    "--program.ray.address": "auto",
    "--program.ray.place-seconds": "1800",  # machines may have to start first
}
_HEAD = Hosts(1, 2, 0, 8)
_SUBMITTER = Hosts(1, 1, 0, 1)
# The program puts almost nothing into Ray's object store.
_START = {"disable-usage-stats": "true", "object-store-memory": "100000000"}
_TTL = 300  # seconds for which the pods, with Ray's logs, stay after the end
_OPERATOR = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
}


def text(job: Job, options: KubeRayOptions) -> str:
    """Returns the file.

    Raises:
      ValueError: nothing keeps the learner off spot machines.
    """
    assert job.actors is not None
    if options.spot and not job.learners.gpus:
        raise ValueError(
            "--spot needs a GPU for the learner, which keeps it off the spot machines: add "
            "--program.ray.gpus learner 1"
        )
    scales = not options.queue  # Kueue admits whole jobs
    learners = _group("learner", job.learners, pod(job, options, "learner", job.learners))
    actors = _group("actor", job.actors, pod(job, options, "actor", job.actors, spot=True))
    if scales:
        actors["minReplicas"] = 0
    head = {
        # No node of the program runs beside the command.
        "rayStartParams": {"num-cpus": "0", **_START},
        "template": pod(job, options, "head", _HEAD),
    }
    cluster: Tree = {"rayVersion": RAY, "enableInTreeAutoscaling": scales}
    if options.redis:
        cluster["gcsFaultToleranceOptions"] = {"redisAddress": options.redis}
    cluster |= {"headGroupSpec": head, "workerGroupSpecs": [learners, actors]}
    submitter = pod(job, options, "submitter", _SUBMITTER, more={"restartPolicy": "Never"})
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(job, options, queued=True),
        "spec": {
            "entrypoint": shlex.join(job.words),
            "backoffLimit": options.retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _TTL,
            "submitterPodTemplate": submitter,
            "rayClusterSpec": cluster,
        },
    }
    about = (
        f"kubectl apply -f FILE; kubectl logs -f job/{job.name} shows the run, and",
        f"kubectl delete rayjob {job.name} ends it.",
    )
    return as_yaml(about, ray_job, network_policy(job, options, None, [_OPERATOR]))


def _group(name: str, hosts: Hosts, template: Tree) -> Tree:
    return {
        "groupName": name,
        "replicas": hosts.number,
        "minReplicas": hosts.number,
        "maxReplicas": hosts.number,
        "rayStartParams": _START,
        "template": template,
    }
