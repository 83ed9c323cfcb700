"""The hooks of docs/hooks.md in programs of several nodes, and what is refused before a start."""

import dataclasses
import importlib
import json
import sys

import pytest

from programs.components.hooks import check_hooks
from programs.experiment import from_json, to_json
from programs.presets import preset
from programs.run import train
from tests.docs.pages import blocks
from tests.programs import running

pytestmark = [pytest.mark.one_lane, pytest.mark.timeout(180)]


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
    yield
    for name in names:
        sys.modules.pop(name, None)


def test_a_hook_in_python_is_recorded_by_its_name(modules):
    module = importlib.import_module("my_sampler")
    dqn = preset("cartpole-dqn")
    replay = dataclasses.replace(dqn.replay, sampler_factory=module.Recent)
    experiment = dataclasses.replace(dqn, replay=replay)
    text = to_json(experiment)
    assert json.loads(text)["replay"]["sampler_factory"] == "my_sampler:Recent"
    check_hooks(from_json(text))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"step_processor": "my_steps:share"}, "step_processor my_steps:share must be a function"),
        ({"step_processor": "my_steps:nothing"}, "has no 'nothing'"),
        ({"sampler": "my_steps:RewardAtTheEnd"}, "sampler_factory my_steps:RewardAtTheEnd must be"),
        ({"sampler": "my_sampler:Recent", "topology": "distributed"}, "C\\+\\+"),
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


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.reference
@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_the_hooks_of_the_page_run_in_processes(modules, tmp_path, topology):
    changes = {} if topology == "distributed" else {"sampler_factory": "my_sampler:BestEpisodes"}
    experiment = running.dqn(
        topology,
        frames=1500,
        program={"launch": "processes"},
        step_processor="my_steps:RewardAtTheEnd",
    )
    replay = dataclasses.replace(experiment.replay, **changes)
    experiment = dataclasses.replace(experiment, replay=replay)
    result = running.run(experiment, tmp_path / "run")
    assert result.env_frames >= 1500
    assert running.series(tmp_path / "run", "learner/loss")
    assert not running.failures(tmp_path / "run")
