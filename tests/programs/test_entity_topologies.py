"""Entity games train unchanged in every topology."""

import dataclasses

import numpy as np
import pytest

from rlstack.networks import NetworkConfig
from rlstack.programs.config.presets import preset
from tests.programs.running import (
    TOPOLOGIES,
    failures,
    nothing_left,
    params,
    run,
    same,
    series,
    small,
)

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")

GAMES = {
    "entity-count-ppo": {},
    "entity-floor-is-lava-ppo": {},
    "entity-minesweeper-ppo": {"orbital_cannon": True, "max_steps": 30},
}


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def updates(name, topology, **program):
    """A preset with a few updates of 64 rows each, and a network that compiles fast."""
    found = preset(name)
    entities = dataclasses.replace(found.network.entities, d_model=8, num_layers=0)
    agent = dataclasses.replace(found.agent, num_epochs=1, num_minibatches=1)
    return small(
        dataclasses.replace(found, network=NetworkConfig(entities=entities), agent=agent),
        topology,
        300,
        env={"num_envs": 8, "options": {**found.env.options, **GAMES[name]}},
        replay={"batch_size": 8, "unroll_length": 8, "max_size": 16},
        program=program,
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["single_process", *TOPOLOGIES])
@pytest.mark.parametrize("name", GAMES)
def test_entity_games_train(tmp_path, name, topology):
    result = run(updates(name, topology), tmp_path / "run")
    assert result.topology == topology
    assert result.env_frames >= 300 and result.learner_steps >= 4
    assert result.eval_episodes == 2
    assert failures(tmp_path / "run") == []
    assert np.isfinite(series(tmp_path / "run", "learner/loss")).all()
    assert series(tmp_path / "run", "actor/episode_return")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_entities_in_lock_step_equal_a_single_process_bit_for_bit(tmp_path, topology):
    """Equality shows that no part of an observation or action is lost between nodes."""
    name = "entity-minesweeper-ppo"
    expected = run(updates(name, "single_process"), tmp_path / "single")
    result = run(updates(name, topology, pacing="lock_step"), tmp_path / "several")
    assert result.learner_steps == expected.learner_steps
    assert result.eval_return_mean == expected.eval_return_mean
    assert same(params(tmp_path / "several"), params(tmp_path / "single"))
