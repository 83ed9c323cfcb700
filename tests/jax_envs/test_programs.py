"""Nodes in processes step environments in JAX: these are forked from a launcher without JAX."""

import pytest

from tests.programs.running import TOPOLOGIES, failures, nothing_left, ppo, run, series

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
