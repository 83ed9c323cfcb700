"""Programs of `distributed` whose replay is the table of a node, beside Reverb."""

import dataclasses
import time

import numpy as np
import pytest

from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.program.topologies import graph_of
from rlstack.replay.served import ReplayService, checkpoints
from tests.programs.launched import FAST, Launched
from tests.programs.running import dqn, failures, nothing_left, params, ppo, r2d2, run, same, series

# Launchpad's threads use SIGALRM, so the time limit must not need it.
in_programs = pytest.mark.timeout(180, method="thread")
later = [in_programs, pytest.mark.slow]
LOCK_STEP = {"pacing": "lock_step"}
TWO_ACTORS = {"num_actors": 2, "num_inferencers": 2}


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def with_table(make, **changes):
    """An experiment in `distributed` with the table."""
    experiment = make("distributed", **changes)
    replay = dataclasses.replace(experiment.replay, service="table")
    return dataclasses.replace(experiment, replay=replay)


def rainbow(topology, *, frames=1000, **changes):
    """Prioritized replay with importance weights."""
    experiment = dqn(topology, frames=frames, **changes)
    replay = dataclasses.replace(
        experiment.replay, sampler="prioritized", importance_anneal_samples=5000
    )
    return dataclasses.replace(experiment, replay=replay)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("make", "frames"),
    [
        pytest.param(dqn, 1000, marks=in_programs, id="dqn"),
        pytest.param(ppo, 5200, marks=later, id="ppo"),
        pytest.param(rainbow, 1000, marks=later, id="rainbow"),
        pytest.param(r2d2, 1000, marks=later, id="r2d2"),
    ],
)
def test_lock_step_equals_a_single_process_bit_for_bit(tmp_path, make, frames):
    expected = run(make("single_process", frames=frames), tmp_path / "single")
    result = run(with_table(make, frames=frames, program=LOCK_STEP), tmp_path / "run")
    assert (result.env_frames, result.learner_steps) == (
        expected.env_frames,
        expected.learner_steps,
    )
    assert result.learner_steps >= 20
    assert result.eval_return_mean == expected.eval_return_mean
    assert same(params(tmp_path / "run"), params(tmp_path / "single"))
    if make is ppo:
        assert set(series(tmp_path / "run", "replay/lag_max")) == {0}


@pytest.mark.parametrize("make", [pytest.param(m, marks=later) for m in (ppo, dqn)])
def test_two_actors_in_lock_step_give_the_same_twice(tmp_path, make):
    experiment = with_table(make, program={**LOCK_STEP, **TWO_ACTORS})
    for name in ("one", "two"):
        run(experiment, tmp_path / name)
    assert same(params(tmp_path / "one"), params(tmp_path / "two"))


@pytest.mark.parametrize(
    ("make", "replay"),
    [
        pytest.param(ppo, {}, marks=later, id="fifo"),
        pytest.param(ppo, {"min_actors": 2, "max_size": 64}, marks=later, id="rounds"),
        pytest.param(dqn, {}, marks=later, id="uniform"),
    ],
)
def test_it_trains_with_two_actors(tmp_path, make, replay):
    experiment = with_table(make, frames=4000, program=TWO_ACTORS)
    replay = dataclasses.replace(experiment.replay, **replay)
    result = run(dataclasses.replace(experiment, replay=replay), tmp_path)
    assert result.env_frames >= 4000 and result.learner_steps >= 5
    assert failures(tmp_path) == []
    assert np.isfinite(series(tmp_path, "learner/loss")).all()
    for name in ("inserts", "samples", "dropped", "size", "lag_mean", "add_wait_seconds"):
        assert series(tmp_path, f"replay/{name}"), name
    if replay.min_actors:
        assert series(tmp_path, "replay/round_actors")[-1] == 2


ARGUMENTS = (
    "cartpole-dqn", "--topology", "distributed", "--replay.service", "table", *FAST,
    "--replay.batch-size", 32, "--replay.samples-per-insert", 4,
)  # fmt: skip


@in_programs
@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", ["replay", "learner"])
def test_a_killed_node_ends_the_program_which_resumes_with_its_replay(tmp_path, name):
    run_dir = tmp_path / "run"
    more = ("--frames", 100_000_000, "--checkpoint-period", 4000, "--run-dir", run_dir)
    with Launched(run_dir, *ARGUMENTS, *more) as program:
        program.wait_for_checkpoint()
        program.wait_for_log("learner/loss")
        program.kill(name)
        killed = time.monotonic()
        code, left = program.end(20)
        assert time.monotonic() - killed < 10.0
        assert code not in (0, 130, 143)
        assert left == []
        assert f"node {name} failed: killed by SIGKILL" in program.stderr[-1500:]
        saved = program.saved_frames()
    assert all(map(checkpoints.is_table, checkpoints.numbered(run_dir / "replay")))
    before = len(series(run_dir, "replay/inserts"))
    with Launched(run_dir, "--resume", run_dir, "--frames", saved + 4000) as program:
        code, left = program.end(120)
        assert (code, left) == (0, []), program.stderr
    assert series(run_dir, "replay/inserts")[before:][0] >= 0.9 * (saved - 1000)
    steps = series(run_dir, "learner/steps")
    assert steps[-1] > steps[before] > 0


@pytest.mark.parametrize("name", [pytest.param(n, marks=later) for n in ("actor/0", "actor/1")])
def test_a_killed_actor_is_replaced_and_its_unroll_dropped(tmp_path, name):
    run_dir = tmp_path / "run"
    more = ("--program.num-actors", 2, "--frames", 100_000_000, "--run-dir", run_dir)
    with Launched(run_dir, *ARGUMENTS, *more) as program:
        program.wait_for_update()
        for _ in range(2):
            program.kill(name)
            program.wait_for(lambda: name in program.nodes(), f"a new {name}", 60)
            steps = series(run_dir, "learner/steps")[-1]
            program.wait_for_log("learner/steps", at_least=steps + 100, timeout=60)
        nodes = {failure["node"] for failure in program.failures()}
        assert nodes == {name}
        program.process.send_signal(2)
        code, left = program.end(60)
        assert (code, left) == (130, []), program.stderr


@pytest.mark.parametrize(
    ("service", "installed", "factory", "expected"),
    [
        ("auto", True, "", "reverb"),
        ("auto", False, "", "table"),
        ("auto", True, "json:loads", "table"),
        ("reverb", False, "", "reverb"),
        ("table", True, "", "table"),
    ],
)
def test_the_service_is_chosen_by_what_is_installed(
    monkeypatch, service, installed, factory, expected
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    experiment = preset("cartpole-dqn")
    replay = dataclasses.replace(experiment.replay, service=service, sampler_factory=factory)
    experiment = dataclasses.replace(experiment, replay=replay, topology="distributed")
    assert experiment.replay.chosen_service == expected
    assert from_json(to_json(experiment)) == experiment


def test_a_sampler_of_ones_own_needs_the_table():
    experiment = dqn("distributed")
    replay = dataclasses.replace(experiment.replay, service="reverb", sampler_factory="json:loads")
    with pytest.raises(ValueError, match=r"C\+\+.*--replay.service table"):
        dataclasses.replace(experiment, replay=replay)


def test_the_table_is_a_service_that_is_not_restarted(tmp_path):
    from rlstack.programs.program.base import Setup
    from rlstack.programs.session.run_dir import RunDir
    from rlstack.types import EnvSpec

    setup = Setup(with_table(ppo), RunDir(tmp_path), EnvSpec((), ()))
    setup.__dict__["step"] = None  # so that no agent is built
    (node,) = (node for node in graph_of(setup).nodes if node.name == "replay")
    assert (node.kind, node.restartable, node.client) == ("service", False, None)
    assert issubclass(node.cls, ReplayService)
