"""The hooks of docs/hooks.md in each topology, and what is refused before a start."""

import dataclasses
import importlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.build.hooks import check_hooks
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.run import train
from rlstack.storage import checkpoint
from tests.docs.pages import blocks
from tests.programs import running

pytestmark = [pytest.mark.timeout(180)]
OWN = "tests.programs.hooks.own"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The modules that the page shows, where nodes can import them."""
    names = []
    for block in blocks("docs/hooks.md"):
        if block.language == "python":
            name = block.text.split("\n", 1)[0][2:]
            (tmp_path / name).write_text(block.text)
            names.append(name.removesuffix(".py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    yield names
    for name in names:
        sys.modules.pop(name, None)


def test_a_hook_in_python_is_recorded_by_its_name(modules):
    module = importlib.import_module("my_sampler")
    features = importlib.import_module("my_features")
    dqn = preset("cartpole-dqn")
    replay = dataclasses.replace(dqn.replay, sampler_factory=module.Recent)
    experiment = dataclasses.replace(
        dqn, replay=replay, observation_processor=features.without_velocities
    )
    text = to_json(experiment)
    assert json.loads(text)["replay"]["sampler_factory"] == "my_sampler:Recent"
    assert json.loads(text)["observation_processor"] == "my_features:without_velocities"
    check_hooks(from_json(text))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"step_processor": "my_steps:share"}, "step_processor my_steps:share must be a function"),
        ({"step_processor": "my_steps:nothing"}, "has no 'nothing'"),
        ({"observation_processor": "my_features:nothing"}, "has no 'nothing'"),
        ({"observation_processor": "my_steps:share"}, "does not take these arguments"),
        ({"sampler": "my_steps:RewardAtTheEnd"}, "sampler_factory my_steps:RewardAtTheEnd must be"),
    ],
)
def test_a_wrong_hook_is_refused_before_anything_starts(modules, tmp_path, changes, text):
    changes = dict(changes)
    dqn = preset("cartpole-dqn")
    sampler = changes.pop("sampler", "")
    with pytest.raises(ValueError, match=text) as caught:
        replay = dataclasses.replace(dqn.replay, sampler_factory=sampler)
        train.run(dataclasses.replace(dqn, replay=replay, **changes), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


TOPOLOGIES = ["single_process", "heavy_env", "distributed"]


def with_hooks(topology, *, sampler, steps, **changes):
    """An experiment with hooks of the page."""
    experiment = running.dqn(
        topology, program={"launch": "processes"}, step_processor=steps, **changes
    )
    replay = dataclasses.replace(experiment.replay, sampler_factory=sampler)
    return dataclasses.replace(experiment, replay=replay)


def width_of_input(directory):
    """How many numbers of the observation the network takes."""
    return min(np.shape(leaf)[0] for leaf in running.params(directory) if np.ndim(leaf) == 2)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_hooks_of_the_page_run_together(modules, tmp_path, topology):
    experiment = with_hooks(
        topology,
        sampler="my_sampler:Recent",
        steps="my_steps:RewardAtTheEnd",
        observation_processor="my_features:without_velocities",
        policy_factory="my_policy:mostly_best",
        loggers=("jsonl", "tensorboard", "terminal", "my_logger:Lines", f"{OWN}:Failing"),
        stop=StopConfig(factory="my_rule:AfterUpdates"),
        frames=10**6,
    )
    evaluator = EvaluatorConfig(episodes=2, num_envs=2, factory="my_evaluator:Worst")
    with running.nothing_left():
        result = running.run(dataclasses.replace(experiment, evaluator=evaluator), tmp_path / "run")
    assert result.ended_by == "my_rule:AfterUpdates: three updates"
    assert result.eval_episodes == 1
    assert not running.failures(tmp_path / "run")
    written = [json.loads(line) for line in (tmp_path / "run" / "my.jsonl").open()]
    steps = [line["env_frames"] for line in running.metrics(tmp_path / "run")]
    assert [line["step"] for line in written] == steps
    # The evaluation at the end is among the logs.
    assert written[-1]["evaluator/episode_return"] == result.eval_return_mean
    (best,) = checkpoint.paths(tmp_path / "run" / "checkpoints" / "best")
    assert checkpoint.read_metadata(best)["eval_return_mean"] == result.eval_return_mean
    assert width_of_input(tmp_path / "run") == 2


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_other_hooks_of_the_page_run(modules, tmp_path, topology):
    experiment = with_hooks(
        topology,
        sampler="my_sampler:BestEpisodes",
        steps="my_steps:shared_returns",
        env={"name": "my_wrapper:without_velocities"},
        frames=1000,
    )
    with running.nothing_left():
        result = running.run(experiment, tmp_path / "run")
    assert result.env_frames >= 1000
    assert running.series(tmp_path / "run", "learner/loss")
    assert not running.failures(tmp_path / "run")
    assert width_of_input(tmp_path / "run") == 2


@pytest.mark.slow
@pytest.mark.chosen
def test_the_callbacks_of_the_page_are_called(modules, tmp_path, capsys):
    watcher = importlib.import_module("my_callbacks").Watcher()
    experiment = dataclasses.replace(running.ppo("single_process"), frames=3000)
    result = train.run(experiment, tmp_path / "run", callbacks=[watcher], stream=io.StringIO())
    assert 9 < watcher.best <= 500
    shown = capsys.readouterr().out
    assert "update 10: loss" in shown  # an update is 256 frames
    assert f"saved {checkpoint.latest(tmp_path / 'run' / 'checkpoints').name}" in shown
    assert result.env_frames >= 3000


def test_the_tests_above_run_every_example(modules):
    text = Path(__file__).read_text()
    examples = [name for name in modules if not name.endswith("in_python")]
    assert len(examples) >= 8
    used = [name for name in examples if f'"{name}:' in text or f'("{name}")' in text]
    assert used == examples
