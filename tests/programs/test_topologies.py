"""The three multi-node programs run, equal a single process, and leave nothing behind."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from rlstack.learning.learner import Learner
from rlstack.programs.config.encoding import from_json
from rlstack.programs.program.actor import ActorNode
from rlstack.programs.session.result import Result
from rlstack.storage import checkpoint
from tests.programs.running import (
    SHARED_MEMORY,
    TOPOLOGIES,
    dqn,
    failures,
    metrics,
    nothing_left,
    params,
    ppo,
    r2d2,
    recurrent,
    run,
    same,
    series,
)

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")

LOCK_STEP = {"pacing": "lock_step"}
TWO_ACTORS = {"num_actors": 2, "num_inferencers": 2}
# For tests where one topology is enough in the quick suite.
_LATER = [pytest.mark.slow, pytest.mark.chosen]
HEAVY_FIRST = ["heavy_env", *(pytest.param(name, marks=_LATER) for name in TOPOLOGIES[1:])]
SHARED_FIRST = [*SHARED_MEMORY, pytest.param("distributed", marks=_LATER)]
DISTRIBUTED_FIRST = [
    *(pytest.param(name, marks=_LATER) for name in TOPOLOGIES[:2]),
    "distributed",
]
LIGHT_FIRST = ["light_env", *(pytest.param(name, marks=_LATER) for name in TOPOLOGIES[::2])]


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def check_files(directory, experiment, result):
    """Checks the files that every run writes."""
    assert json.loads((directory / "result.json").read_text()) == result._asdict()
    assert from_json((directory / "config.json").read_text()) == experiment
    assert checkpoint.latest(directory / "checkpoints") is not None
    assert failures(directory) == []
    frames = [line["env_frames"] for line in metrics(directory)]
    assert frames == sorted(frames)
    assert np.isfinite(series(directory, "learner/loss")).all()
    assert series(directory, "actor/episode_return")
    assert set(series(directory, "program/restarts")) == {0}


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_it_trains_in_threads_again_and_again(tmp_path, topology):
    for make in (ppo, dqn):
        experiment = make(topology, program=TWO_ACTORS)
        directory = tmp_path / make.__name__
        result = run(experiment, directory)
        assert isinstance(result, Result)
        assert result.topology == topology
        assert result.env_frames >= experiment.frames
        assert result.eval_episodes == 2
        assert result.learner_steps >= 5
        check_files(directory, experiment, result)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Runs each single process once; returns its final params."""
    known = {}

    def params_of(make, frames):
        if make not in known:
            directory = tmp_path_factory.mktemp("single") / make.__name__
            result = run(make("single_process", frames=frames), directory)
            known[make] = result, params(directory)
        return known[make]

    return params_of


def check_parity(single, make, frames, topology, directory, program=LOCK_STEP, **changes):
    expected, its_params = single(make, frames)
    experiment = make(topology, frames=frames, program=program, **changes)
    result = run(experiment, directory)
    assert (result.env_frames, result.learner_steps) == (
        expected.env_frames,
        expected.learner_steps,
    )
    assert result.eval_return_mean == expected.eval_return_mean
    assert same(params(directory), its_params)
    if experiment.replay.sampler == "fifo":
        assert set(series(directory, "replay/lag_max")) == {0}
    return result


@pytest.mark.parametrize("topology", DISTRIBUTED_FIRST)
def test_ppo_in_lock_step_equals_a_single_process_bit_for_bit(tmp_path, single, topology):
    result = check_parity(single, ppo, 5200, topology, tmp_path / "run")
    assert result.learner_steps >= 20


@pytest.mark.parametrize("topology", LIGHT_FIRST[:2])  # a Reverb server makes its own random draws
def test_dqn_in_lock_step_equals_a_single_process_bit_for_bit(tmp_path, single, topology):
    program = {**LOCK_STEP, "transport": "zmq"}  # the other tests have the default of threads
    result = check_parity(single, dqn, 1000, topology, tmp_path / "run", program)
    assert result.learner_steps >= 100


@pytest.mark.slow
@pytest.mark.chosen
def test_the_last_round_of_lock_step_is_learned_however_soon_its_frames_are_reported(
    tmp_path, single, monkeypatch
):
    monkeypatch.setattr(
        "rlstack.programs.session.timing.REPORT_PERIOD", 0.0
    )  # every node reports and gets an answer at every step
    check_parity(single, dqn, 1000, "heavy_env", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("topology", SHARED_MEMORY)
def test_r2d2_in_lock_step_equals_a_single_process_bit_for_bit(tmp_path, single, topology):
    result = check_parity(single, r2d2, 1000, topology, tmp_path / "run")
    assert result.learner_steps >= 30


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["light_env"])
def test_recurrent_states_held_by_a_service_change_nothing(tmp_path, single, topology):
    check_parity(single, recurrent, 1500, topology, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", LIGHT_FIRST)
def test_two_actors_in_lock_step_give_the_same_twice(tmp_path, topology, monkeypatch):
    program = {**LOCK_STEP, **TWO_ACTORS, "num_inferencers": 1 if topology == "light_env" else 2}
    experiment = ppo(topology, frames=4000, program=program)
    replay = dataclasses.replace(experiment.replay, batch_size=16, max_size=32)
    experiment = dataclasses.replace(experiment, replay=replay)
    results = [run(experiment, tmp_path / "one")]
    # Reading the replay after only one of the two actors has written changes nothing.
    monkeypatch.setattr("rlstack.programs.session.timing.REPORT_PERIOD", 0.0)
    monkeypatch.setattr("rlstack.programs.session.timing.LEARNER_SAMPLE", 0.001)
    results.append(run(experiment, tmp_path / "two"))
    assert results[0].learner_steps == results[1].learner_steps >= 7
    assert results[0].env_frames == results[1].env_frames
    one, two = params(tmp_path / "one"), params(tmp_path / "two")
    if topology == "distributed":  # the order in which Reverb gets items varies
        assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(one, two, strict=True))
    else:
        assert same(one, two)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("make", [ppo, recurrent])
def test_actors_that_share_acting_in_lock_step_act_as_each_does_alone(tmp_path, make):
    results = []
    for acting in ("own", "shared"):
        program = {**LOCK_STEP, "num_actors": 2, "acting": acting}
        experiment = make("heavy_env", frames=2500, program=program, replay={"min_actors": 2})
        results.append((run(experiment, tmp_path / acting), params(tmp_path / acting)))
        assert set(series(tmp_path / acting, "replay/lag_max")) == {0}
    (own, its), (shared, ours) = results
    assert own.env_frames == shared.env_frames
    assert own.learner_steps == shared.learner_steps >= 3
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(its, ours, strict=True))


@pytest.mark.slow
@pytest.mark.chosen
def test_actors_that_share_acting_go_on_when_one_dies(tmp_path, monkeypatch):
    step, seen = ActorNode._step, {}

    def dies_once(self):
        name = threading.current_thread().name
        seen[name] = seen.get(name, 0) + 1
        if name == "actor/1" and seen[name] == 50:
            raise OSError("the actor dies")
        return step(self)

    monkeypatch.setattr(ActorNode, "_step", dies_once)
    monkeypatch.setattr("rlstack.programs.session.timing.RESTARTS", (2.0, 10.0, 60.0, 10.0))
    result = run(ppo("heavy_env", program={"num_actors": 3, "acting": "shared"}), tmp_path / "run")
    (failure,) = failures(tmp_path / "run")
    assert failure["node"] == "actor/1" and result.env_frames >= 3000
    assert seen["actor/0"] + seen["actor/2"] > 100  # of 375 steps of all three


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_environments_know_their_number_among_all(tmp_path, topology, monkeypatch):
    """So each environment explores in its own way, whichever node acts for it."""
    seen = []
    step = Learner.step

    def spy(self, sample):
        seen.append((sample.keys, np.array(sample.batch.trajectory.agent_state.env_ids)))
        return step(self, sample)

    monkeypatch.setattr(Learner, "step", spy)
    # The second service has one actor; the first has two without consecutive ranks.
    program = {"num_actors": 3, "num_inferencers": 2}
    run(dqn(topology, program=program, env={"num_envs": 2}), tmp_path / "run")
    ids = np.concatenate([ids for _, ids in seen], axis=1)  # [T+1, items]
    assert set(ids[0].tolist()) == set(range(6))
    assert (ids == ids[0]).all()
    if topology in SHARED_MEMORY:  # where an item's key gives its environment
        keys = np.concatenate([keys for keys, _ in seen])
        np.testing.assert_array_equal(ids[0], keys % np.uint64(6))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", SHARED_FIRST)
def test_rounds_take_from_both_actors(tmp_path, topology):
    rounds = {"min_actors": 2, "grace_seconds": 5.0, "max_size": 64}
    experiment = ppo(topology, frames=6000, program=TWO_ACTORS, replay=rounds)
    assert run(experiment, tmp_path / "run").learner_steps >= 1
    assert series(tmp_path / "run", "replay/round_actors")[-1] == 2


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", HEAVY_FIRST)
def test_asynchronous_pools_work(tmp_path, topology):
    env = {"wait_num": 4, "num_workers": 2}
    result = run(ppo(topology, program=TWO_ACTORS, env=env), tmp_path / "run")
    assert result.env_frames >= 3000
    assert np.isfinite(series(tmp_path / "run", "learner/loss")).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "topology"),
    [
        *(pytest.param("processes", name, marks=pytest.mark.chosen) for name in TOPOLOGIES),
        *(pytest.param("launchpad", name) for name in SHARED_MEMORY),
        pytest.param("launchpad", "distributed", marks=pytest.mark.chosen),
    ],
)
def test_it_trains_in_processes(tmp_path, launch, topology):
    experiment = ppo(topology, program={"launch": launch, **TWO_ACTORS})
    result = run(experiment, tmp_path / "run")
    check_files(tmp_path / "run", experiment, result)
    logs = tmp_path / "run" / "logs"
    assert {"actor", "learner", "evaluator", "coordinator"} <= {p.name for p in logs.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_processes_in_lock_step_equal_a_single_process_bit_for_bit(tmp_path, single, topology):
    expected, its_params = single(ppo, 5200)
    program = {"launch": "processes", **LOCK_STEP}
    result = run(ppo(topology, frames=5200, program=program), tmp_path / "run")
    assert result.learner_steps == expected.learner_steps
    assert same(params(tmp_path / "run"), its_params)


@pytest.mark.parametrize("make", [ppo, dqn])
def test_a_config_that_an_environment_refuses_starts_nothing(tmp_path, make):
    experiment = make("heavy_env", env={"name": "NoSuchEnvironment-v0"})
    with pytest.raises(ValueError, match="NoSuchEnvironment"):
        run(experiment, tmp_path / "run")
    assert not (tmp_path / "run" / "logs").exists()
