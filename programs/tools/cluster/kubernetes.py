"""What manifests for Kubernetes share: YAML, pods, spot machines, and policies of networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rlstack.programs.tools.cluster.job import Hosts, Job
from rlstack.programs.tools.cluster.options import KubernetesOptions

RUNS = "/runs"  # where pods have the volume
LABEL = "app.kubernetes.io/instance"
_QUEUE = "kueue.x-k8s.io/queue-name"
_SPOT = {
    "gke": ("cloud.google.com/gke-spot", "true"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
}
_GPU = "nvidia.com/gpu"

Tree = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Writes lists below their names with an indentation, and nothing by reference."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(about: Sequence[str], *documents: Tree) -> str:
    """Returns documents as YAML, below lines of comment."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in about)
    parts = [yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=1_000_000) for one in documents]
    return head + "---\n".join(parts)


def metadata(job: Job, options: KubernetesOptions, *, queued: bool = False) -> Tree:
    """Returns the metadata of an object of the job."""
    labels = {LABEL: job.name}
    if queued and options.queue:
        labels[_QUEUE] = options.queue
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": job.name, **place, "labels": labels}


def pod(
    job: Job,
    options: KubernetesOptions,
    container: str,
    hosts: Hosts,
    *,
    command: Sequence[str] = (),
    spot: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Tree:
    """Returns the template of a pod.

    Args:
      job: the job.
      options: the options of the file.
      container: the name of the container.
      hosts: what one pod has.
      command: what the container runs; by default what its image or operator says.
      spot: whether the pod may run on a spot machine.
      more: further fields of the pod.
    """
    amounts: Tree = {"cpu": str(hosts.cpus), "memory": f"{hosts.memory_gb}Gi"}
    if hosts.gpus:
        amounts[_GPU] = hosts.gpus
    one: Tree = {"name": container, "image": options.image}
    if command:
        one["command"] = list(command)
    if job.metrics_port and container != "actor":
        one["ports"] = [{"name": "metrics", "containerPort": job.metrics_port}]
    if options.secret:
        one["envFrom"] = [{"secretRef": {"name": options.secret}}]
    one["resources"] = {"requests": amounts, "limits": amounts}
    spec: Tree = dict(more or {})
    if spot and options.spot:
        key, value = _SPOT[options.spot]
        spec["nodeSelector"] = {key: value}
        spec["tolerations"] = [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        ]
    mounts, volumes = (
        [{"name": "memory", "mountPath": "/dev/shm"}],
        [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
    )
    if options.volume:
        mounts.append({"name": "runs", "mountPath": RUNS})
        claim = {"claimName": options.volume}
        volumes.append({"name": "runs", "persistentVolumeClaim": claim})
    one["volumeMounts"] = mounts
    spec |= {"containers": [one], "volumes": volumes}
    return {"metadata": {"labels": {LABEL: job.name}}, "spec": spec}


def network_policy(
    job: Job, options: KubernetesOptions, ports: range | None, others: Sequence[Tree] = ()
) -> Tree:
    """Returns a policy by which only the pods of the job reach one another.

    Args:
      job: the job.
      options: the options of the file.
      ports: the ports at which they do; None for all.
      others: further peers that reach all ports.
    """
    chosen = {"podSelector": {"matchLabels": {LABEL: job.name}}}
    rule: Tree = {"from": [chosen, *others]}
    if ports is not None:
        rule["ports"] = [{"protocol": "TCP", "port": ports[0], "endPort": ports[-1]}]
    rules = [rule]
    if job.metrics_port:
        rules.append({"ports": [{"protocol": "TCP", "port": job.metrics_port}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, options),
        "spec": {**chosen, "policyTypes": ["Ingress"], "ingress": rules},
    }
