"""The cluster model: throughput limits from costs per frame."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import coordinator, learner_group
from benchmarks.cluster_model import Cluster, Costs, asked_load, coordinator_load, limits, table

ROOT = Path(__file__).resolve().parents[2]
COSTS = Costs(
    cpu={"actor": 1e-4, "inferencer": 2e-5, "replay": 1e-6, "learner": 5e-5},
    sent={
        "actor->inferencer": 100.0,
        "inferencer->actor": 50.0,
        "actor->replay": 200.0,
        "replay->learner": 200.0,
        "learner->replay": 1.0,
    },
    params_bytes=1e6,
    versions=1e-3,
)


def test_limits_by_hand():
    found = limits(COSTS, Cluster(actors=20, learner_speedup=10.0, gbit=1.0))
    assert found["actors' cores"] == pytest.approx(20 / 1e-4)
    assert found["services' cores"] == pytest.approx(2 * 4 / 2e-5)
    assert found["replay's cores"] == pytest.approx(8 / 1e-6)
    assert found["learner"] == pytest.approx(10 / 5e-5)
    assert found["link actors->"] == pytest.approx(2 * 125e6 / 300)
    assert found["link ->replay"] == pytest.approx(125e6 / 200)
    # Two services fetch every version of 1 MB, one per 1,000 frames: 2,000 bytes per frame. That is
    # 62.5 versions/s at 62,500 frames/s. But they ask 50 times/s: 100 MB/s, which leaves 25 MB/s.
    assert found["link learner->"] == float("inf")
    assert found["link ->services"] == pytest.approx((250e6 - 100e6) / 100)
    slow = limits(COSTS, Cluster(actors=20, gbit=0.1, params_interval=0.001))
    assert slow["link learner->"] == pytest.approx(12.5e6 / 2000)
    assert "environments" not in found
    assert limits(COSTS, Cluster(actors=20, actor_frames=60))["environments"] == 1200


def test_several_learners_by_hand():
    one = Cluster(actors=64, actors_per_service=1, learner_speedup=10.0, gbit=1.0)
    four = one._replace(learners=4)
    costs = COSTS._replace(collectives=5.0, exchanged=2e6)
    alone, found = limits(costs, one), limits(costs, four)
    assert found["replay's cores"] == pytest.approx(4 * alone["replay's cores"])
    assert found["link ->replay"] == pytest.approx(4 * alone["link ->replay"])
    # A frame is 5 us of one learner, 1.25 us of each of four, and a thousandth of an update. Its
    # five collectives take twice (log2 of four) 0.24 ms, and the time of three quarters of 2 MB.
    assert alone["learner"] == pytest.approx(1 / 5e-6)
    assert found["learner"] == pytest.approx(1 / (1.25e-6 + 2.4e-6 + 1.5e3 / 125e6))
    chosen = limits(costs, four._replace(collective_ms=0.1))["learner"]
    assert chosen == pytest.approx(1 / (1.25e-6 + 1e-6 + 1.5e3 / 125e6))
    # With a small network each of them makes the whole update.
    whole = limits(costs._replace(divided=False), four)["learner"]
    assert whole == pytest.approx(1 / (5e-6 + 2.4e-6 + 1.5e3 / 125e6))
    # 64 hosts fetch 1,000 bytes a frame, 33 of them from the learner (1 MB in 32 MiB) and 31 from
    # other hosts, which also answer 50 bytes a frame; a quarter of them from each of four, which
    # also send 1.5 MB of an update to one another.
    slow = {"params_interval": 1e-6}
    alone = limits(costs, one._replace(**slow))
    assert alone["link learner->"] == pytest.approx(125e6 / 33e3)
    assert alone["link services->"] == pytest.approx(64 * 125e6 / (50 + 31e3))
    reached = limits(costs, four._replace(**slow))["link learner->"]
    assert reached == pytest.approx(125e6 / (16e3 + 1.5e3))
    # Services of one host share what it fetches.
    together = limits(costs, one._replace(services_per_host=8, **slow))
    assert together["link learner->"] == pytest.approx(125e6 / 8e3)


def test_the_coordinator_limits_the_number_of_nodes():
    costs = COSTS._replace(report=1e-4)
    few, many = Cluster(actors=1000, actors_per_service=10), Cluster(actors=10_000, learners=64)
    # 1,000 actors, 100 services, a learner, its replay and the evaluator, five times a second.
    assert coordinator_load(costs, few) == pytest.approx(1103 * 5 * 1e-4)
    assert coordinator_load(costs, many) == pytest.approx((11_000 + 129) * 5 * 1e-4)
    shown = table(costs, [few, many])
    assert "10000 actors, 64 learners" in shown
    assert "and the coordinator (556%), whose nodes report late" in shown
    assert "coordinator 55%" in shown


def test_the_reports_of_a_host_cost_a_call_and_something_for_each():
    costs = COSTS._replace(report=1e-4, call=8e-5, together=1e-5)
    # 63 hosts of 16 actors and 100 of a service; the learner, its replay and the evaluator alone.
    many = Cluster(actors=1000, actors_per_service=10)
    assert coordinator_load(costs, many) == pytest.approx(5 * (3e-4 + 163 * 8e-5 + 1100e-5))
    assert coordinator_load(costs, Cluster(actors=31)) == pytest.approx(5 * (31 + 4 + 3) * 1e-4)
    assert asked_load(costs, many) == pytest.approx(100 / 0.02 * 8e-5)
    assert "learner asked for params 40%" in table(costs, [many])


def test_the_first_saturated_resource_is_named():
    shown = table(COSTS, [Cluster(10), Cluster(1000), Cluster(1000, actor_frames=10)])
    assert "   10 actors:       20,000 frames/s; full: learner" in shown
    assert " 1000 actors:       10,000 frames/s; full: environments" in shown


def test_other_costs_can_be_given():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster_model", "--costs", json.dumps(COSTS._asdict())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["limits"]) == {"10", "100", "1000", "10000"}


@pytest.mark.slow
@pytest.mark.launchpad
@pytest.mark.timeout(200)
def test_costs_are_measured():
    pytest.importorskip("launchpad")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster_model", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout.splitlines()[-1])["costs"]
    assert all(1e-7 < costs["cpu"][name] < 1e-2 for name in ("actor", "inferencer", "learner"))
    # CartPole's four floats, which hardly compress, and the other fields of a transition.
    assert 16 < costs["sent"]["actor->inferencer"] < 2000
    assert 16 < costs["sent"]["actor->replay"] < 2000
    assert 0.5 < costs["sent"]["replay->learner"] / costs["sent"]["actor->replay"] < 2
    assert costs["params_bytes"] > 10_000
    assert 1e-6 < costs["report"] < 1e-1
    assert costs["versions"] == pytest.approx(1 / 256, rel=0.3)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_report_and_the_exchange_of_two_learners_are_measured():
    found = coordinator.measure("auto", reports=400)
    assert 1e-6 < found.report < 1e-2 and 1e-6 < found.call < 1e-2
    assert 1e-6 < found.together < found.report / 2
    found = learner_group.measure("cartpole-ppo", 2, 0.5)
    assert 0 < found.agreement < 1 and found.lone > 0 and found.joint > 0
    assert found.added == pytest.approx(max(0.0, found.joint - found.lone))
    assert found.collectives == 1 and not found.divided  # a small network
    assert 1e3 < found.exchanged < 1e5  # the batch
