"""The commands in docs/cluster.md and its examples are valid, as far as this machine can test."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rlstack.programs.cli import commands as cli
from rlstack.programs.session.metrics.figures import _OF_LOGS, as_text
from tests.programs.session.metrics.test_metrics import FIGURES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "cluster"
pytestmark = pytest.mark.timeout(60)


def commands(path):
    """The Ray and rlstack commands of a file, without optional parts."""
    text = path.read_text().replace("\\\n", " ")
    for found in re.findall(r"\b(?:ray start|rlstack train) [^\n`;&']*", text):
        words = shlex.split(found, comments=True)
        if len(words) > 2 and not words[2].startswith(("…", "PRESET", "$")):
            yield words


def test_every_command_of_the_page_is_one(monkeypatch):
    scripts = pytest.importorskip("ray.scripts.scripts")
    seen = []
    monkeypatch.setattr(
        "rlstack.programs.run.train.run", lambda experiment, *_, **__: seen.append(experiment)
    )
    monkeypatch.setattr("rlstack.programs.cli.train._print_result", lambda result: 0)
    counts = {"ray": 0, "rlstack": 0}
    for name in ("cluster.md", "security.md", "cluster/ray_up.yaml"):
        for program, command, *words in commands(DOCS / name):
            counts[program] += 1
            if program == "ray":
                scripts.start.make_context(command, words)
            else:
                own = ["--program.host", "0"] if "hosts" in words else []
                assert cli.main(command, [*words, *own]) == 0, words
    assert counts["ray"] >= 4
    assert counts["rlstack"] >= 2
    assert {experiment.topology for experiment in seen} == {"distributed", "heavy_env"}
    assert "10.0.0.1:6379" in {experiment.program.ray.address for experiment in seen}


def test_every_option_of_the_table_is_in_the_config():
    from rlstack.programs.config.program_config import RayConfig

    page = (DOCS / "cluster.md").read_text()
    table = page[page.index("Who gets what") : page.index("When something is lost")]
    options = re.findall(r"^\| `([a-z][a-z-]*)", table, re.MULTILINE)
    fields = {name.replace("_", "-") for name in RayConfig.__dataclass_fields__}
    assert set(options) | {"address", "ship-code"} == fields


def test_ray_takes_the_description_of_machines():
    pytest.importorskip("ray")
    yaml = pytest.importorskip("yaml")
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((EXAMPLES / "ray_up.yaml").read_text()))
    validate_config(config)
    assert config["provider"]["head_ip"] == "10.0.0.1"
    assert config["max_workers"] == len(config["provider"]["worker_ips"]) == 3


def test_the_table_of_metrics_has_those_of_a_program():
    page = (DOCS / "cluster.md").read_text()
    table = page[page.index("after `rlstack_`") : page.index("## How large")]
    named = set(re.findall(r"`(\w+)(?:\{\w+\})?`", table)) - {"rlstack_", "policy", "node"}
    text = as_text(FIGURES._replace(logs={**FIGURES.logs, **dict.fromkeys(_OF_LOGS, 1.0)}))
    assert named == set(re.findall(r"^# TYPE rlstack_(\w+)", text, re.MULTILINE))


STAND_INS = {
    "scontrol": 'printf "one\\ntwo\\nthree\\n"',
    # Runs the command itself, and records where srun would have run it.
    "srun": 'for w in "$@"; do case $w in --nodelist=*) on=${w#*=};; esac; done\n'
    'while [[ $1 == --* ]]; do shift; done\necho "$on: $*" >> "$NOTES"\nexec "$@"',
    "hostname": "echo 10.0.0.1 fe80::1",
    "ray": "[ $1 = health-check ] && exit 0\nexec sleep 60",
    "rlstack": 'trap "echo saved >> $NOTES; exit 143" TERM\nfor i in $(seq ${STEPS:-1}); do '
    "sleep 0.1; done",
}


def submit(tmp_path, steps):
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "STEPS": str(steps),
        "SLURM_JOB_ID": "120001",
        "SLURM_JOB_NODELIST": "[one,two,three]",
        "SLURM_CPUS_PER_TASK": "16",
    }
    command = ["bash", EXAMPLES / "slurm.sbatch", "/runs/one", "cartpole-ppo", "--seed", "3"]
    return subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)


def noted(tmp_path):
    notes = tmp_path / "notes"
    return notes.read_text().splitlines() if notes.exists() else []


def wait_for(condition, timeout=20.0):
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def alone(process):
    """Whether no process is left in the job's session."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_job_script_starts_ray_on_each_node_and_trains_on_the_first(tmp_path):
    job = submit(tmp_path, steps=5)
    assert job.wait(30) == 0
    wait_for(lambda: alone(job))
    lines = noted(tmp_path)
    ray = [line for line in lines if "ray start" in line]
    assert {line.split(":")[0] for line in ray} == {"one", "two", "three"}
    (head,) = [line for line in ray if "--head" in line]
    assert head.startswith("one: ") and "--node-ip-address=10.0.0.1 --port=20001" in head
    assert sum("--address=10.0.0.1:20001" in line for line in ray) == 2
    (train,) = [line for line in lines if "rlstack train" in line]
    assert train == (
        "one: rlstack train cartpole-ppo --topology distributed --launch ray --ray-address "
        "10.0.0.1:20001 --run-dir /runs/one --seed 3"
    )


def test_the_end_of_its_time_lets_the_run_save(tmp_path):
    job = submit(tmp_path, steps=300)
    wait_for(lambda: any("rlstack train" in line for line in noted(tmp_path)))
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 143
    assert "saved" in noted(tmp_path)
    wait_for(lambda: alone(job))
