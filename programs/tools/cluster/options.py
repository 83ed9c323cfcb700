"""The options of each kind of file, beside those of the run."""

from __future__ import annotations

import dataclasses
from typing import Literal

Cloud = Literal["", "gke", "eks", "karpenter", "aks"]


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of every kind."""

    name: str = ""
    """Name of the job: lowercase letters, digits and dashes. By default the preset."""
    worker_cpus: int = 8
    """Cores of one host with actors and inference services, at most. So many hosts are asked for as
    the nodes need, with what --program.ray.cpus, gpus and memory-gb reserve for each."""


@dataclasses.dataclass(frozen=True)
class KubernetesOptions(JobOptions):
    """The options of what runs on Kubernetes."""

    image: str = "rlstack:latest"
    """Container image with rlstack, such as the one of the Dockerfile."""
    namespace: str = ""
    """Namespace of the job. By default that of kubectl."""
    queue: str = ""
    """Name of a local queue of Kueue, which then decides when the job starts."""
    volume: str = ""
    """Name of a volume claim that all pods mount at /runs (ReadWriteMany), for run directories."""
    secret: str = ""
    """Name of a secret whose keys are environment variables of all pods, such as the credentials of
    an object store for --run-dir s3://BUCKET/PATH."""
    spot: Cloud = ""
    """Whose spot machines the actors take: GKE's, those of EKS, of Karpenter, or of AKS. Learners
    stay on other machines."""


@dataclasses.dataclass(frozen=True)
class KubeRayOptions(KubernetesOptions):
    """Print a RayJob (ray.io/v1) for the KubeRay operator, which trains with --launch ray.

    Every option of `rlstack train` can follow the preset.
    """

    redis: str = ""
    """HOST:PORT of a Redis in which Ray's head keeps its state, so that it may restart."""
    retries: int = 2
    """How often the job starts again after a failure; it continues from its last checkpoint."""


@dataclasses.dataclass(frozen=True)
class JobSetOptions(KubernetesOptions):
    """Print a JobSet (jobset.x-k8s.io/v1alpha2), which trains with --launch hosts, without Ray.

    Every option of `rlstack train` can follow the preset. Each learner process has a pod.
    """

    retries: int = 2
    """How often all pods start again after a learner has failed; the run continues from its last
    checkpoint."""


@dataclasses.dataclass(frozen=True)
class SlurmOptions(JobOptions):
    """Print a script for sbatch, which trains with --launch hosts, without Ray.

    Every option of `rlstack train` can follow the preset. The job is heterogeneous: nodes with GPUs
    for learners, and nodes without for actors.
    """

    partition: str = ""
    """Partition of the learners. By default that of the cluster."""
    actor_partition: str = ""
    """Partition of the actors. By default that of the learners."""
    account: str = ""
    """Account that pays for the job."""
    time: str = ""
    """Time limit, such as 04:00:00. Two minutes before it the run saves and ends."""


@dataclasses.dataclass(frozen=True)
class SkyPilotOptions(JobOptions):
    """Print a task for SkyPilot, which trains with --launch hosts, without Ray.

    Every option of `rlstack train` can follow the preset. All hosts are alike, so each has GPUs if
    learners have.
    """

    image: str = ""
    """Container image with rlstack. By default the task installs rlstack from the folder in which
    it is launched."""
    accelerator: str = ""
    """Kind of GPU, such as H100, if --program.ray.gpus reserves some."""
    volume: str = ""
    """Name of a volume of SkyPilot that all hosts mount at /runs, for run directories."""
    spot: bool = False
    """Whether to take spot machines: `sky jobs launch` starts the job again when it has lost
    them."""


KINDS: dict[str, type[JobOptions]] = {
    "kuberay": KubeRayOptions,
    "jobset": JobSetOptions,
    "slurm": SlurmOptions,
    "skypilot": SkyPilotOptions,
}
