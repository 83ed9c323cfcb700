"""`rlstack cluster`: what the files hold, that they fit their schemas, and what is refused."""

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from rlstack.programs.cli import cluster, completion, train
from rlstack.programs.config.presets import preset
from rlstack.programs.tools.cluster import kuberay
from rlstack.programs.tools.cluster.options import KINDS
from tests.programs.cluster.files import (
    command_of_script,
    directives,
    documents,
    made,
    refused,
)

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = json.loads(Path(__file__).with_name("used_parts_of_schemas.json").read_text())
# A folder with the published files rayjobs.yaml and jobsets.yaml, to check against them as well.
PUBLISHED = os.environ.get("RLSTACK_SCHEMAS", "")
TWELVE = ("--program.num-actors", 12, "--program.num-inferencers", 2)
GPU = ("--program.ray.gpus", "learner", 1)
ALL = ("--volume", "runs", "--image", "registry.example/rlstack:1", "--namespace", "rl", *GPU)
ALL = (*ALL, "--secret", "keys", "--spot", "gke", "--queue", "team", *TWELVE)
ALL = (*ALL, "--program.metrics", "0.0.0.0:9100")


def strict(schema):
    """A published schema under which unknown fields are errors, as Kubernetes drops them."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(value) for name, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False) is True:
        found = {"type": ["integer", "string"]}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def check(document):
    kind = document.get("kind", "SkyPilot")
    schema = {**SCHEMAS[kind], "definitions": SCHEMAS["definitions"]}
    jsonschema.Draft7Validator(schema).validate(document)
    if PUBLISHED and kind in ("RayJob", "JobSet"):
        crd = yaml.safe_load((Path(PUBLISHED) / f"{kind.lower()}s.yaml").read_text())
        version = document["apiVersion"].partition("/")[2]
        (found,) = (v for v in crd["spec"]["versions"] if v["name"] == version)
        published = strict(found["schema"]["openAPIV3Schema"])
        published["properties"]["metadata"] = {"type": "object"}
        jsonschema.Draft7Validator(published).validate(document)


def test_the_schemas_refuse_what_they_do_not_know(capsys):
    (job, _) = documents(made(capsys, "kuberay", "--volume", "runs")).values()
    check(job)
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        check(job)


@pytest.mark.parametrize("words", [("--volume", "runs"), (*ALL, "--learner.processes", 2)])
@pytest.mark.parametrize("kind", ["kuberay", "jobset"])
def test_manifests_fit_their_schemas_and_are_stable(capsys, kind, words):
    more = ("--redis", "redis:6379") if kind == "kuberay" and len(words) > 2 else ()
    text = made(capsys, kind, *words, *more)
    assert text == made(capsys, kind, *words, *more)
    assert "&id" not in text and "\t" not in text and text.startswith("# kubectl apply")
    found = documents(text)
    assert set(found) == {"NetworkPolicy", {"kuberay": "RayJob", "jobset": "JobSet"}[kind]}
    for document in found.values():
        check(document)


def test_a_ray_job_has_a_head_without_nodes_learners_and_actors_that_scale(capsys):
    spec = documents(made(capsys, "kuberay", "--volume", "runs", *GPU, *TWELVE))["RayJob"]["spec"]
    ray = spec["rayClusterSpec"]
    assert ray["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert ray["enableInTreeAutoscaling"] is True
    learner, actor = ray["workerGroupSpecs"]
    # 12 actors, 2 services and half a core of the evaluator: on two hosts 6 + 1 + 0.5 cores.
    assert [learner["replicas"], actor["replicas"], actor["minReplicas"]] == [1, 2, 0]
    pods = [group["template"]["spec"]["containers"][0] for group in (learner, actor)]
    assert pods[0]["resources"]["limits"] == {"cpu": "3", "memory": "5Gi", "nvidia.com/gpu": 1}
    assert pods[1]["resources"]["limits"] == {"cpu": "8", "memory": "15Gi"}
    assert shlex.split(spec["entrypoint"]) == [
        "rlstack", "train", "cartpole-ppo", *map(str, GPU), *map(str, TWELVE),
        "--topology", "distributed", "--program.launch", "ray", "--replay.service", "table",
        "--program.ray.address", "auto", "--program.ray.place-seconds", "1800",
        "--run-dir", "/runs/cartpole-ppo", "--auto-resume", "True",
    ]  # fmt: skip
    mounts = {mount["mountPath"]: mount["name"] for mount in pods[0]["volumeMounts"]}
    assert mounts["/runs"] == "runs"


def test_runs_in_a_store_need_no_volume_and_have_the_secret_of_all_pods(capsys):
    store = ("--run-dir", "s3://bucket/one", "--secret", "keys")
    job = documents(made(capsys, "kuberay", *store))["RayJob"]
    check(job)
    ray = job["spec"]["rayClusterSpec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    for pod in (*(one["template"] for one in groups), job["spec"]["submitterPodTemplate"]):
        (container,) = pod["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        assert [mount["name"] for mount in container["volumeMounts"]] == ["memory"]
    assert "--run-dir s3://bucket/one" in job["spec"]["entrypoint"]
    for kind in ("jobset", "slurm", "skypilot"):
        told = refused(capsys, kind, "cartpole-ppo", "--run-dir", "s3://bucket/one")
        assert "directory that all hosts see; got s3://bucket/one. kuberay needs none" in told


def test_spot_machines_and_queues_are_those_of_the_actors_and_of_the_job(capsys):
    job = documents(made(capsys, "kuberay", *ALL))["RayJob"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["metadata"]["namespace"] == "rl"
    ray = job["spec"]["rayClusterSpec"]
    assert ray["enableInTreeAutoscaling"] is False  # Kueue admits whole jobs
    learner, actor = (group["template"]["spec"] for group in ray["workerGroupSpecs"])
    assert "nodeSelector" not in learner and "tolerations" not in learner
    assert actor["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    assert actor["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert learner["containers"][0]["ports"] == [{"name": "metrics", "containerPort": 9100}]


def test_a_job_set_names_all_its_pods_as_the_headless_service_does(capsys):
    text = made(capsys, "jobset", *ALL, "--learner.processes", 2, "--name", "one")
    spec = documents(text)["JobSet"]["spec"]
    assert spec["network"]["subdomain"] == "one"
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert [jobs["learner"]["completions"], jobs["actor"]["completions"]] == [2, 2]
    assert [jobs["learner"]["backoffLimit"], spec["failurePolicy"]["maxRestarts"]] == [0, 2]
    command = jobs["learner"]["template"]["spec"]["containers"][0]["command"]
    assert command == jobs["actor"]["template"]["spec"]["containers"][0]["command"]
    at = command.index("--program.hosts")
    assert command[at + 1 :] == ["one-learner-0-[0-1].one", "one-actor-0-[0-1].one"]
    assert command[command.index("--program.launch") + 1] == "hosts"


def test_the_policy_of_the_network_opens_the_ports_of_nodes_only(capsys):
    def rules(*words):
        text = made(capsys, "jobset", "--volume", "runs", *words)
        return documents(text)["NetworkPolicy"]["spec"]["ingress"]

    (rule,) = rules()
    assert rule["ports"] == [{"protocol": "TCP", "port": 20000, "endPort": 20999}]
    (rule,) = rules("--program.ports", "30000-30020")
    assert rule["ports"] == [{"protocol": "TCP", "port": 30000, "endPort": 30020}]
    first, second = rules("--program.metrics", "[::]:9100", "--learner.processes", 2)
    assert "ports" not in first  # gloo and NCCL choose theirs
    assert second == {"ports": [{"protocol": "TCP", "port": 9100}]}


def test_a_slurm_job_has_a_part_for_learners_and_one_for_actors(capsys):
    text = made(
        capsys, "slurm", "--run-dir", "/shared/one", "--partition", "gpu", "--actor-partition",
        "cpu", "--time", "04:00:00", "--account", "lab", *GPU, *TWELVE,
    )  # fmt: skip
    learner, actor = directives(text)
    for part in (learner, actor):
        assert (part["time"], part["account"]) == ("04:00:00", "lab")
        assert part["ntasks-per-node"] == "1"
    assert (learner["partition"], learner["nodes"], learner["gpus-per-node"]) == ("gpu", "1", "1")
    assert (actor["partition"], actor["nodes"], actor["cpus-per-task"]) == ("cpu", "2", "8")
    assert "gpus-per-node" not in actor and learner["signal"] == "B:TERM@120"
    command = command_of_script(text)
    options = ["--kill-on-bad-exit=1", "--cpu-bind=none", "--het-group=0,1"]
    assert command[:6] == ["srun", *options, "rlstack", "train"]
    assert "--program.hosts" not in command  # Slurm names them


def test_one_host_is_enough_for_a_run_in_one_process(capsys):
    text = made(capsys, "slurm", "--run-dir", "/shared/one", "--topology", "single_process")
    assert [part["nodes"] for part in directives(text)] == ["1"]
    command = command_of_script(text)
    assert "--het-group=0,1" not in command and "--program.launch" not in command
    task = yaml.safe_load(made(capsys, "skypilot", "--run-dir", "x", "--topology", "light_env"))
    check(task)
    assert task["num_nodes"] == 1


def test_a_task_of_skypilot_has_the_largest_of_both_kinds_of_hosts(capsys):
    words = ("--volume", "runs", "--spot", "--accelerator", "H100", *GPU, *TWELVE)
    text = made(capsys, "skypilot", *words)
    task = yaml.safe_load(text)
    check(task)
    assert (task["num_nodes"], task["resources"]["use_spot"]) == (3, True)
    assert task["resources"] == {
        "cpus": "8+",
        "memory": "15+",
        "accelerators": {"H100": 1},
        "use_spot": True,
    }
    assert task["volumes"] == {"/runs": "runs"}
    assert "exec rlstack train cartpole-ppo" in task["run"] and "sky jobs launch" in text
    image = made(capsys, "skypilot", "--run-dir", "x", "--image", "registry.example/rlstack:1")
    task = yaml.safe_load(image)
    check(task)
    assert task["resources"]["image_id"] == "docker:registry.example/rlstack:1"
    assert "setup" not in task


def test_a_run_directory_may_be_the_url_of_an_object_store(capsys):
    job = documents(made(capsys, "kuberay", "--run-dir", "s3://bucket/one"))["RayJob"]
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[words.index("--run-dir") + 1] == "s3://bucket/one"
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["memory"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kuberai", "cartpole-ppo"], "there is no kind 'kuberai'; did you mean 'kuberay'"),
        (["kuberay"], "a preset must come first"),
        (["kuberay", "cartpole-ppo"], r"--run-dir must name .* or --volume a volume for it"),
        (["slurm", "cartpole-ppo"], r"--run-dir must name a directory that all hosts see$"),
        (["slurm", "cartpole-ppo", "--run-dir", "x", "--framess", 1], "did you mean --frames"),
        (["slurm", "cartpole-ppo", "--run-dir", "x", "--frames", "many"], "frames"),
        (["slurm", "cartpole-pppo", "--run-dir", "x"], "cartpole-ppo"),
        (["slurm", "cartpole-ppo", "--run-dir", "x", "--seeds", 3], "--seeds is not for a file"),
        (["kuberay", "cartpole-ppo", "--volume", "v", "--launch", "threads"], "--launch must be"),
        (["kuberay", "cartpole-ppo", "--volume", "v", "--spot", "gke"], "needs a GPU"),
        (["kuberay", "cartpole-ppo", "--volume", "v", "--spot", "moon"], "spot"),
        (["kuberay", "cartpole-ppo", "--volume", "v", "--name", "No!"], "--name must be"),
        (["jobset", "cartpole-ppo", "--volume", "v", "--retries", "-1"], "--retries must be"),
        (["slurm", "cartpole-ppo", "--run-dir", "x", "--worker-cpus", 0], "--worker-cpus must"),
        (["skypilot", "cartpole-ppo", "--volume", "v", *GPU], "--accelerator must name"),
        (
            ["jobset", "cartpole-ppo", "--volume", "v", "--program.ray.cpus", "actor", 9],
            "--worker-cpus must be at least 9",
        ),
        (
            ["jobset", "cartpole-ppo", "--volume", "v", "--learner.processes", 2,
             "--program.num-actors", 3],
            "num_actors must be a multiple of 2",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(capsys, words, said):
    assert re.search(said, refused(capsys, *words))


def test_modules_of_the_user_are_named_in_the_command(capsys, tmp_path, monkeypatch):
    (tmp_path / "an_own_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    text = made(capsys, "slurm", "--run-dir", "x", "--module", "an_own_module")
    words = command_of_script(text)
    assert words[4:9] == ["rlstack", "train", "--module", "an_own_module", "cartpole-ppo"]


def test_own_options_are_explained_and_are_none_of_training():
    known = {*train.option_names(), *completion.option_names(preset("cartpole-ppo"))}
    for options in KINDS.values():
        names = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options)}
        assert len(names) <= 10
        assert not names & known


def test_the_help_of_a_kind_explains_its_options(capsys):
    with pytest.raises(SystemExit):
        cluster.main(["slurm", "--help"])
    shown = capsys.readouterr().out
    for word in ("--partition", "--actor-partition", "--time", "--account", "heterogeneous"):
        assert word in shown
    assert cluster.main([]) == 0
    assert set(re.findall(r"rlstack cluster (\w+) PRESET", capsys.readouterr().out)) == set(KINDS)


def test_the_image_has_the_ray_of_the_job():
    lock = (ROOT / "requirements.lock").read_text()
    assert f"\nray=={kuberay.RAY} ; python_full_version >= '3.11'" in lock
