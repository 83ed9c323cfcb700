"""Recording entity games, and policies that learn from the recordings."""

import dataclasses
import io

import numpy as np
import pytest

from rlstack.agents.fixed import RandomConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig, RaggedTransformerConfig
from rlstack.programs.build.environments import make_evaluation_env
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets import preset
from rlstack.programs.config.presets.registry import on_policy_replay
from rlstack.programs.run import train
from rlstack.programs.run.record import record
from rlstack.storage.datasets import Dataset
from rlstack.types import StepType


def quiet(experiment, directory):
    return train.run(experiment, directory, stream=io.StringIO())


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
def test_a_transformer_learns_the_rule_of_a_recording(tmp_path):
    rule = preset("entity-floor-is-lava-scripted")
    assert quiet(dataclasses.replace(rule, frames=100), tmp_path / "rule").eval_return_mean == 1.0
    path, header = record(tmp_path / "rule", frames=2_000)
    assert header.return_mean == 1.0
    clone = dataclasses.replace(preset("entity-floor-is-lava-bc"), data=str(path), frames=12_800)
    assert quiet(clone, tmp_path / "clone").eval_return_mean >= 0.9


@pytest.fixture(scope="module")
def sweeping(tmp_path_factory):
    """A recording of MineSweeper with its cannon, with random actions."""
    directory = tmp_path_factory.mktemp("sweeping")
    experiment = Experiment(
        preset="sweeping",
        agent=RandomConfig(),
        env=EnvConfig(
            "rlstack.entity.games:MineSweeper", 4, options={"orbital_cannon": True, "max_steps": 20}
        ),
        replay=on_policy_replay(4, 8),
        evaluator=EvaluatorConfig(episodes=4, num_envs=4),
        frames=64,
    )
    quiet(experiment, directory / "run")
    path, _ = record(directory / "run", frames=300)
    return experiment, Dataset(path)


def test_a_recording_holds_the_entities_that_were_observed(sweeping):
    experiment, dataset = sweeping
    with make_evaluation_env(experiment) as env:
        spec = env.spec
    timestep, action = dataset.read(np.arange(dataset.header.steps), spec)
    assert set(timestep.observation) == set(spec.observation)
    assert set(timestep.observation["features"]) == {"Mine", "Robot", "Orbital Cannon"}
    assert set(action) == {"Move", "Fire Orbital Cannon"}
    counts = timestep.observation["count"]
    assert (counts["Orbital Cannon"] == 1).all() and (counts["Mine"][timestep.first()] == 5).all()
    for kind, rows in timestep.observation["features"].items():
        absent = np.arange(rows.shape[1]) >= counts[kind][:, None]
        assert not rows[absent].any()
    # Every choice was legal where it was made.
    decided = timestep.step_type != StepType.LAST
    for name, chosen in action.items():
        legal = timestep.observation["action_mask"][name].reshape(*chosen.shape, -1)
        assert np.take_along_axis(legal, chosen[..., None], -1)[decided].all()
    # Besides shapes, a network needs only the names in the specs.
    names = {name: leaf.name for name, leaf in dataset.header.spec.observation["features"].items()}
    assert names == {name: leaf.name for name, leaf in spec.observation["features"].items()}
    assert dataset.header.spec.action["Move"].name == spec.action["Move"].name


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_generic_preset_clones_a_game_of_several_actors(sweeping, tmp_path):
    _, dataset = sweeping
    experiment = dataclasses.replace(
        preset("bc"),
        data=str(dataset.path),
        frames=1_024,
        network=NetworkConfig(entities=RaggedTransformerConfig(d_model=8, num_layers=1)),
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
    )
    result = quiet(experiment, tmp_path / "run")
    assert result.learner_steps == 4 and result.eval_episodes == 2
