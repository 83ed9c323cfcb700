"""Programs that learn from a dataset, and whose actors act after that."""

import dataclasses

import numpy as np
import pytest

from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.run.offline import resolve_dataset
from tests.programs.running import (
    TOPOLOGIES,
    failures,
    metrics,
    nothing_left,
    params,
    run,
    same,
    series,
    small,
    with_recorded,
)

in_programs = pytest.mark.timeout(180, method="thread")
later = [in_programs, pytest.mark.slow]
UPDATES, SIZE, ACTED = 30, 16, 400


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set"
    with_recorded(preset("pendulum-sqil"), path)
    return path


def experiment(data, topology, *, frames=ACTED, **changes):
    """SAC on Pendulum with 30 updates from data, and then one for every four steps acted."""
    base = preset("pendulum-sac")
    network = dataclasses.replace(base.network, hidden_sizes=(16,))
    replay = {"batch_size": SIZE, "min_size": 100, "max_size": 400, "samples_per_insert": 4.0}
    made = small(base, "single_process", frames, replay=replay, network=network)
    program = dataclasses.replace(made.program, **changes.pop("program", {}))
    options = {"topology": topology, "data": str(data), "offline_updates": UPDATES}
    return dataclasses.replace(
        made, env=EnvConfig("Pendulum-v1", num_envs=2), log_period=160, program=program,
        **{**options, **changes},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.chosen
@in_programs
@pytest.mark.parametrize(
    "topology", ["heavy_env", *(pytest.param(t, marks=pytest.mark.slow) for t in TOPOLOGIES[1:])]
)
def test_actors_wait_for_the_updates_from_data(data, tmp_path, topology):
    with nothing_left():
        result = run(experiment(data, topology), tmp_path / "run")
    assert failures(tmp_path / "run") == []
    before = UPDATES * SIZE * preset("pendulum-sac").replay.unroll_length
    assert before + ACTED <= result.env_frames < before + ACTED + 100
    assert result.learner_steps > UPDATES
    found = metrics(tmp_path / "run")
    early = [line for line in found if line["env_frames"] < before]
    assert not any("actor/episode_return" in line for line in early)
    assert series(tmp_path / "run", "dataset/windows")
    # No actor acted with params from before the last of these updates.
    versions = [x for x in series(tmp_path / "run", "params/version") if np.isfinite(x)]
    assert versions and min(versions) >= UPDATES


@in_programs
def test_lock_step_equals_a_single_process_bit_for_bit(data, tmp_path):
    alone = run(experiment(data, "single_process"), tmp_path / "single")
    lock_step = {"pacing": "lock_step"}
    result = run(experiment(data, "heavy_env", program=lock_step), tmp_path / "run")
    assert (result.env_frames, result.learner_steps) == (alone.env_frames, alone.learner_steps)
    assert same(params(tmp_path / "run"), params(tmp_path / "single"))


@in_programs
@pytest.mark.slow
@pytest.mark.chosen
def test_a_program_that_ended_in_the_data_goes_on_there(data, tmp_path):
    lock_step = {"pacing": "lock_step"}
    run(experiment(data, "heavy_env", program=lock_step), tmp_path / "whole")
    run(experiment(data, "heavy_env", program=lock_step, updates=10), tmp_path / "run")
    result = train.resume(tmp_path / "run", updates=UPDATES)
    assert result.learner_steps == UPDATES
    run(experiment(data, "single_process", updates=UPDATES), tmp_path / "alone")
    assert same(params(tmp_path / "run"), params(tmp_path / "alone"))


def test_topologies_that_cannot_are_refused(data):
    with pytest.raises(ValueError, match="topology must be single_process with data, or of nodes"):
        experiment(data, "heavy_env", offline_updates=0)
    made = experiment(data, "heavy_env", program={"num_actors": 2, "launch": "processes"})
    with pytest.raises(ValueError, match=r"learner\.processes must be 1 with offline_updates"):
        resolve_dataset(
            dataclasses.replace(made, learner=dataclasses.replace(made.learner, processes=2))
        )
