"""Datasets of Minari: written by its library, read back, and learned from."""

import dataclasses
import io
import json
import sys

import numpy as np
import pytest
from dm_env import specs

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.cli.commands import main
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.storage.datasets import Dataset, DatasetError, DatasetWriter
from rlstack.storage.datasets.minari import export, located
from rlstack.types import EnvSpec, StepType, TimeStep, Transition
from tests.programs.running import Acted

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
SPEC = EnvSpec(
    {
        "camera": specs.BoundedArray((2, 2), np.uint8, 0, 255),
        "place": specs.Array((3,), np.float32),
    },
    specs.BoundedArray((2,), np.float32, -1.0, 2.0),
)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def steps(writer_spec, kinds, ends, seed):
    """One episode of these step types; the last has this discount."""
    rng = np.random.default_rng(seed)
    for i, kind in enumerate(kinds):
        observation = {
            "camera": rng.integers(0, 256, (1, 2, 2), dtype=np.uint8),
            "place": rng.normal(size=(1, 3)).astype(np.float32),
        }
        reward = np.array([0 if i == 0 else rng.normal()], np.float32)
        discount = np.array([ends if kind == LAST else 1], np.float32)
        action = rng.uniform(-1, 2, (1, 2)).astype(np.float32)
        timestep = TimeStep(np.array([kind], np.int32), reward, discount, observation)
        yield Transition(timestep, Acted(action), (), np.zeros(1, np.int32))


def written(path, name="my_envs:Thing"):
    env = {"name": name, "type": "auto", "options": {}}
    with DatasetWriter(path, SPEC, 1, 5, env=env, source={"agent": "SACConfig"}) as writer:
        for step in steps(SPEC, [FIRST, MID, MID, LAST], 0, 1):
            writer.add(None, step)
        for step in steps(SPEC, [FIRST, MID, LAST], 1, 2):
            writer.add(None, step)
        writer.finish()
    return Dataset(path)


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(DatasetError, match=r"pip install \"rlstack\[minari\]\""):
        located("minari:hopper/mine-v0")


def test_a_path_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert located("data") == tmp_path / "data"


def test_a_dataset_comes_back_as_it_was_written(tmp_path):
    minari = pytest.importorskip("minari")
    dataset = written(tmp_path / "set")
    export(dataset, "thing/mine-v0")
    theirs = minari.load_dataset("thing/mine-v0")
    assert (theirs.total_episodes, theirs.total_steps) == (2, 5)
    first, second = theirs.iterate_episodes()
    assert first.terminations.tolist() == [False, False, True] and not first.truncations.any()
    assert second.truncations.tolist() == [False, True] and not second.terminations.any()

    path = located("minari:thing/mine-v0")
    again = Dataset(path)
    assert located("minari:thing/mine-v0") == path  # the copy is made once
    assert again.header.env == {"name": "", "type": "auto", "options": {}}
    every = np.arange(dataset.header.steps)
    (before, actions), (after, others) = dataset.read(every), again.read(every)
    for name in ("step_type", "reward", "discount"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    for name in ("camera", "place"):
        np.testing.assert_array_equal(before.observation[name], after.observation[name])
    acts = before.step_type != LAST  # the action at the end had no effect
    np.testing.assert_array_equal(actions[acts], others[acts])
    with pytest.raises(DatasetError, match="already exists"):
        export(dataset, "thing/mine-v0")


def test_another_dataset_of_a_name_is_copied_anew(tmp_path):
    minari = pytest.importorskip("minari")
    export(written(tmp_path / "set"), "thing/mine-v0")
    before = located("minari:thing/mine-v0")
    minari.delete_dataset("thing/mine-v0")
    export(written(tmp_path / "again"), "thing/mine-v0")  # with the same metadata
    assert located("minari:thing/mine-v0") != before


def test_a_value_that_no_space_has_is_named(tmp_path):
    minari = pytest.importorskip("minari")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    buffer = EpisodeBuffer(
        observations=np.zeros((3, 2), np.float32),
        actions=np.array([1, 2]),  # of two, from 0
        rewards=[0.0, 1.0],
        terminations=[False, True],
        truncations=[False, False],
    )
    minari.create_dataset_from_buffers(
        "thing/odd-v0",
        [buffer],
        observation_space=spaces.Box(-1, 1, (2,)),
        action_space=spaces.Discrete(2),
    )
    with pytest.raises(DatasetError, match="action"):
        located("minari:thing/odd-v0")


@pytest.mark.parametrize(
    ("name", "why"), [("no name", "Malformed"), ("thing/mine-v0", "there is one")]
)
def test_the_command_checks_the_name_before_it_plays(tmp_path, monkeypatch, capsys, name, why):
    pytest.importorskip("minari")
    export(written(tmp_path / "set"), "thing/mine-v0")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("rlstack.programs.run.record.record", None)
    assert main("record", [str(tmp_path), "--format", "minari", "--out", name]) == 1
    assert f"it refuses: {why}" in capsys.readouterr().err


def test_extras_are_infos_and_come_back(tmp_path):
    minari = pytest.importorskip("minari")
    extras = {"cost": specs.Array((2,), np.float32), "level": specs.DiscreteArray(4)}
    rng = np.random.default_rng(3)
    env = {"name": "my_envs:Thing", "type": "auto", "options": {}}
    with DatasetWriter(
        tmp_path / "set", SPEC._replace(extras=extras), 1, 5, env=env, source={}
    ) as writer:
        for kinds, ends in (([FIRST, MID, LAST], 0), ([FIRST, MID, MID, LAST], 1)):
            for step in steps(SPEC, kinds, ends, 1):
                shown = {
                    "cost": rng.normal(size=(1, 2)).astype(np.float32),
                    "level": rng.integers(0, 4, 1, dtype=np.int32),
                }
                timestep = step.timestep._replace(extras=shown)
                writer.add(None, step._replace(timestep=timestep))
        writer.finish()
    dataset = Dataset(tmp_path / "set")
    export(dataset, "thing/extras-v0")
    first = next(minari.load_dataset("thing/extras-v0").iterate_episodes())
    assert {name: x.shape for name, x in first.infos.items()} == {"cost": (3, 2), "level": (3,)}
    again = Dataset(located("minari:thing/extras-v0"))
    assert again.header.spec.extras["level"].num_values == 4
    (before, _), (after, _) = (
        one.read(np.arange(dataset.header.steps)) for one in (dataset, again)
    )
    for name in extras:
        np.testing.assert_array_equal(before.extras[name], after.extras[name])
        assert before.extras[name].dtype == after.extras[name].dtype


def test_a_missing_dataset_names_the_command_that_downloads_it():
    pytest.importorskip("minari")
    with pytest.raises(DatasetError, match=r"minari download hopper/none-v0"):
        located("minari:hopper/none-v0")


def test_a_run_learns_from_a_dataset_of_minari(tmp_path):
    minari = pytest.importorskip("minari")
    import gymnasium
    from minari.data_collector import EpisodeBuffer

    rng = np.random.default_rng(0)
    buffers = [
        EpisodeBuffer(
            observations=rng.normal(size=(9, 4)).astype(np.float32),
            actions=rng.integers(0, 2, 8),
            rewards=np.ones(8),
            terminations=np.arange(8) == 7,
            truncations=np.zeros(8, bool),
        )
        for _ in range(10)
    ]
    minari.create_dataset_from_buffers(
        "cartpole/mine-v0", buffers, env=gymnasium.make("CartPole-v1")
    )
    experiment = dataclasses.replace(
        preset("cartpole-cql"),
        data="minari:cartpole/mine-v0",
        frames=128 * 5,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
    )
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert result.learner_steps == 5
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"] == "minari:cartpole/mine-v0"
    again = train.resume(tmp_path / "run", frames=128 * 8, stream=io.StringIO())
    assert again.learner_steps == 8
