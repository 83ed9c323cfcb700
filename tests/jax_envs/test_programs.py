"""Nodes in processes step environments in JAX: these are forked from a launcher without JAX."""

import dataclasses

import pytest

from rlstack.programs.config.stop_config import StopConfig
from tests.programs.running import (
    TOPOLOGIES,
    failures,
    metrics,
    nothing_left,
    ppo,
    run,
    series,
)

_CHOSEN = [pytest.param(name, marks=pytest.mark.chosen) for name in TOPOLOGIES[:1]]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("topology", [*_CHOSEN, *TOPOLOGIES[1:]])
def test_forked_nodes_step_environments_in_jax(tmp_path, topology):
    experiment = ppo(
        topology,
        frames=1500,
        program={"launch": "processes", "num_actors": 2},
        env={"name": "rlstack.jax_envs.toy:Catch", "type": "jax"},
    )
    with nothing_left():
        result = run(experiment, tmp_path / "run")
    assert result.env_frames >= 1500
    assert failures(tmp_path / "run") == []
    assert set(series(tmp_path / "run", "actor/episode_length")) == {9.0}


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
@pytest.mark.parametrize("topology", ["fused", "single_process"])
def test_numbers_of_episodes_are_logged_and_end_a_run(tmp_path, topology):
    experiment = ppo(
        topology,
        frames=5_000,
        env={"name": "rlstack.jax_envs.bsuite:Catch", "type": "jax"},
    )
    experiment = dataclasses.replace(experiment, stop=StopConfig(episodes=100), log_period=100)
    result = run(experiment, tmp_path / "run")
    assert result.ended_by.endswith(">= 100") and result.env_frames < 5_000
    lines = [line for line in metrics(tmp_path / "run") if "actor/episode_return" in line]
    for line in lines:
        assert line["episode/regret"] == pytest.approx(1 - line["actor/episode_return"])
    ended = [line["actor/episodes"] for line in lines]
    assert ended == sorted(ended) and ended[-1] * 9 == pytest.approx(result.env_frames, abs=9 * 8)
