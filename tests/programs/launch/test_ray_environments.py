"""A Ray of this environment starts and runs actors; a cluster of another environment is refused."""

import contextlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.program.launch.ray import cluster
from rlstack.programs.program.launch.ray.runner import NodeRunner
from rlstack.rpc import versions
from tests.programs.clusters import VARIABLES, wait_until_empty

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.chosen, pytest.mark.timeout(120, method="thread")]
ROOT = Path(__file__).resolve().parents[3]

HEAD = """
import sys, ray
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
print("head", ray.get_runtime_context().gcs_address, ray.__version__, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_ray(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def other_environment():
    """Yields the Python of each other environment with another version of Ray."""
    here = Path(sys.prefix).resolve()
    own = f"ray-{metadata.version('ray')}.dist-info"
    for python in sorted(here.parent.glob(".venv*/bin/python")):
        where = python.parents[1]
        has_same = any(where.glob(f"lib/python*/site-packages/{own}"))
        if (where / ".ready").exists() and not has_same:
            yield python


@contextlib.contextmanager
def head_of(python):
    """A cluster of its own that another Python runs; yields its address and its version of Ray."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [python, "-c", HEAD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            line = next(line for line in process.stdout if line.startswith("head "))
            yield line.split()[1:]
            process.stdin.close()
            process.wait(30)
        finally:
            process.kill()


def test_a_process_is_placed_and_says_what_it_has(tmp_path):
    token = tmp_path / "token"
    token.write_text("seen")
    cfg = RayConfig(env_vars={"NAME": "value"})
    with cluster.joined(ProgramConfig(launch="ray", ray=cfg)) as ray:
        (host,) = ray.nodes()
        options = cluster.reserved(cfg, "actor")
        where = cluster.on_host(ray, host["NodeID"], soft=False)
        runner = ray.remote(NodeRunner).options(**options, scheduling_strategy=where).remote()
        prepared = runner.prepare.remote(str(token), 1, "", {"OF_THE_PROGRAM": "1"})
        placement = ray.get(prepared, timeout=60)
        assert (placement.host, placement.token) == ("127.0.0.1", "seen")
        assert placement.node_id == host["NodeID"] and placement.pid != os.getpid()
        assert versions.differences(placement.versions, placement.host) == ""
        assert placement.versions == versions.own()
        ray.kill(runner)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(runner.watch.remote(10.0), timeout=60)
    assert wait_until_empty() == []


def test_a_cluster_of_another_environment_is_refused():
    python = next(other_environment(), None)
    if python is None:
        pytest.skip("the other environment has not been made (make venv, make venv LANE=launchpad)")
    with head_of(python) as (address, theirs):
        cfg = ProgramConfig(launch="ray", ray=RayConfig(address=address))
        with pytest.raises(ValueError, match="launch ray") as caught, cluster.joined(cfg):
            pass
    import ray

    assert theirs != ray.__version__
    # Ray compares versions itself where it can; other protocols get no answer.
    told = str(caught.value)
    assert (
        address in told and f"Ray {ray.__version__} on CPython {platform.python_version()}" in told
    )
    assert f"the cluster at {address} has Ray {theirs}" in told or "with Ray" in told


def test_the_versions_that_ray_compares_are_named():
    ray_says = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.1\n"
        "This process on node 10.0.0.2 was started with:\n    Ray: 2.48.0\n    Python: 3.10.13\n"
    )
    hidden = ConnectionError()
    hidden.__context__ = RuntimeError(ray_says)
    told = cluster._refusal("10.0.0.1:6379", cluster._told(hidden), "2.48.0")
    assert "the cluster at 10.0.0.1:6379 has Ray 2.60.0 on CPython 3.12.1" in told
    assert "this process has Ray 2.48.0 on CPython 3.10.13" in told


def test_a_ray_of_a_run_that_others_reach_is_refused():
    ray = SimpleNamespace(nodes=lambda: [{"NodeManagerAddress": "10.0.0.2"}], __version__="9.9")
    with pytest.raises(ValueError, match=r"must listen on 127\.0\.0\.1 only; Ray 9\.9 took 10"):
        cluster._check_loopback(ray)
