"""A program on hosts that share no loopback; one host is disconnected for a while."""

import time

import numpy as np
import pytest

from tests.programs.clusters import wait_until_empty
from tests.programs.launched import FAST, Launched, placed
from tests.programs.networks import network, ray_on
from tests.programs.running import metrics, series

pytest.importorskip("launchpad")
pytest.importorskip("ray")
pytestmark = [
    pytest.mark.launchpad,
    pytest.mark.slow,
    pytest.mark.timeout(400, method="thread"),
]


def newest(run_dir):
    """The last known placement of each node."""
    return {record["node"]: record for record in placed(run_dir)}


def frames(run_dir):
    return metrics(run_dir)[-1]["env_frames"]


def wait_for_frames(program, more, timeout):
    goal = frames(program.run_dir) + more
    program.wait_for(lambda: frames(program.run_dir) >= goal, f"{more} frames", timeout)


def check_that_nobody_calls_at_loopback(run_dir, hosts):
    """Replay is the exception: its server has a client in the same process."""
    where = newest(run_dir)
    names = {record["pid"]: name for name, record in where.items()}
    ports = {port for record in where.values() for port in record["ports"]}
    called = set()
    for host in hosts:
        for peer, port, pid in host.connections():
            if port in ports and pid in names:
                called.add((names[pid], peer))
    assert {name for name, peer in called if peer.startswith(("127.", "::1"))} <= {"replay"}
    assert len({peer for _, peer in called}) >= 2


@pytest.mark.parametrize("lost_seconds", [8, 60])
def test_a_host_that_is_cut_off_for_20_s_stops_no_program(tmp_path, lost_seconds):
    """The config decides whether its nodes are placed elsewhere or waited for."""
    run_dir = tmp_path / "run"
    with network(3) as hosts, ray_on(hosts) as address:
        args = (
            "cartpole-ppo", "--topology", "distributed", "--launch", "ray", "--ray-address",
            address, *FAST, "--frames", 100_000_000, "--run-dir", run_dir,
            "--program.num-actors", 3, "--program.num-inferencers", 3,
            "--program.ray.lost-seconds", lost_seconds, "--replay.max-size", 64,
        )  # fmt: skip
        with Launched(run_dir, *args, within=hosts[0].within) as program:
            program.wait_for_update()
            before = newest(run_dir)
            assert {record["host"] for record in before.values()} == {h.address for h in hosts}
            check_that_nobody_calls_at_loopback(run_dir, hosts)
            kept = {hosts[0].address, before["learner"]["host"]}
            cut = next(host for host in hosts if host.address not in kept)
            away = [name for name, record in before.items() if record["host"] == cut.address]
            assert any(name.startswith(("actor", "inferencer")) for name in away)
            cut.connect(up=False)
            time.sleep(20.0)
            cut.connect(up=True)
            wait_for_frames(program, 30_000, 90)
            time.sleep(10.0)
            after = newest(run_dir)
            if lost_seconds < 20:
                moved = {name for name, record in after.items() if record["incarnation"] > 0}
                assert {name for name in away if name != "evaluator"} <= moved
                elsewhere = {after[name]["host"] for name in moved}
                assert elsewhere - {cut.address}
                assert series(run_dir, "program/restarts")[-1] >= 1
            wait_for_frames(program, 30_000, 90)
            program.process.send_signal(2)
            code, left = program.end(40)
            assert (code, left) == (130, []), program.stderr
        assert wait_until_empty() == []
    assert not [f for f in program.failures() if not f["restarts"]]
    assert np.isfinite(series(run_dir, "learner/loss")).all()
