"""`--evaluator.video`: videos during training, in every topology."""

import dataclasses
import io

import gymnasium
import numpy as np
import pytest

from rlstack.programs.config.presets import preset
from rlstack.programs.pictures import video
from rlstack.programs.run import train
from rlstack.programs.run.plan import plan
from tests.fused.test_fused_run import ppo as fused_ppo
from tests.programs import running
from tests.programs.tools.test_watch import images

pytestmark = pytest.mark.timeout(120)
DRAWN = {"name": f"{__name__}:Drawn", "type": "auto"}


@pytest.fixture
def gif(monkeypatch):
    """Videos are GIFs, as where PyAV is missing."""
    found = video.importlib.util.find_spec
    without = lambda name: None if name == "av" else found(name)  # noqa: E731
    monkeypatch.setattr("rlstack.programs.pictures.video.importlib.util.find_spec", without)


def filmed(topology, every=1, **changes):
    experiment = running.ppo(topology, frames=512, **changes)
    evaluator = dataclasses.replace(experiment.evaluator, video=every, period=256, max_steps=300)
    return dataclasses.replace(experiment, evaluator=evaluator)


class Drawn(gymnasium.Env):
    """Episodes of nine steps, with a small picture of the time."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(4, np.float32), 1.0, self.time == 9, False, {}

    def render(self):
        return np.full((20, 30, 3), 20 * self.time, np.uint8)


def names(directory):
    return sorted(path.name for path in (directory / "videos").iterdir())


class Films:
    """A logger that keeps what it gets of videos."""

    found = []  # noqa: RUF012

    def __init__(self, run_dir):
        self.found.clear()

    def write(self, step, logs):
        pass

    def write_video(self, step, path):
        self.found.append((step, path.name, path.stat().st_size > 0))

    def close(self):
        pass


@pytest.mark.slow
@pytest.mark.chosen
def test_every_second_evaluation_leaves_a_video_and_training_learns_the_same(tmp_path, gif):
    experiment = filmed("single_process", every=2, env=DRAWN, loggers=("jsonl", Films))
    running.run(experiment, tmp_path / "filmed")
    assert names(tmp_path / "filmed") == ["512.gif"]
    assert Films.found == [(512, "512.gif", True)]
    shown = list(images(tmp_path / "filmed" / "videos" / "512.gif"))
    assert len(shown) == 10  # nine steps, and the last observation, held for a second
    assert shown[0][15, 15].max() < 10 and shown[3][15, 15].min() > 50
    without = dataclasses.replace(experiment.evaluator, video=0)
    running.run(dataclasses.replace(experiment, evaluator=without), tmp_path / "plain")
    assert not (tmp_path / "plain" / "videos").exists()
    left, right = (running.params(tmp_path / name) for name in ("filmed", "plain"))
    assert running.same(left, right)


def test_all_videos_show_the_same_episode(tmp_path):
    av = pytest.importorskip("av")
    running.run(filmed("single_process"), tmp_path / "run")
    assert len(names(tmp_path / "run")) == 2
    starts = []
    for name in names(tmp_path / "run"):
        with av.open(str(tmp_path / "run" / "videos" / name)) as container:
            starts.append(next(container.decode(video=0)).to_ndarray(format="rgb24")[:, :600])
    assert np.abs(starts[0].astype(int) - starts[1]).max() < 40  # compression


@pytest.mark.slow
@pytest.mark.chosen
def test_the_evaluators_node_makes_them(tmp_path, gif):
    experiment = filmed("heavy_env", env=DRAWN, loggers=("jsonl", Films))
    evaluator = dataclasses.replace(experiment.evaluator, period=0)
    running.run(dataclasses.replace(experiment, evaluator=evaluator), tmp_path / "run")
    (name,) = names(tmp_path / "run")
    assert int(name.removesuffix(".gif")) >= 512
    assert [found[1] for found in Films.found] == [name]


@pytest.mark.slow
@pytest.mark.chosen
def test_the_compiled_loop_makes_them_between_its_calls(tmp_path, gif):
    experiment = fused_ppo(updates=4)
    evaluator = dataclasses.replace(experiment.evaluator, video=1, period=128)
    running.run(dataclasses.replace(experiment, evaluator=evaluator), tmp_path / "run")
    assert len(names(tmp_path / "run")) == 2


class Torn(Drawn):
    """An environment that can be drawn once."""

    drawn = 0

    def render(self):
        Torn.drawn += 1
        if Torn.drawn > 1:
            raise RuntimeError("no more paper")
        return super().render()


def test_a_video_that_cannot_be_made_ends_nothing(tmp_path, gif):
    env = {"name": f"{__name__}:Torn", "type": "auto"}
    Torn.drawn, stream = 0, io.StringIO()
    result = train.run(filmed("single_process", env=env), tmp_path / "run", stream=stream)
    assert result.env_frames == 512 and names(tmp_path / "run") == []
    told = [line for line in stream.getvalue().splitlines() if "no video" in line]
    assert len(told) == 2 and all("RuntimeError: no more paper; training" in line for line in told)
    with pytest.raises(ValueError, match=r"can be drawn; .*Torn raised RuntimeError: no more"):
        train.run(filmed("single_process", env=env), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_filmed_is_refused_before_the_run(tmp_path, monkeypatch):
    several = preset("supply-chain-policies")
    evaluator = dataclasses.replace(several.evaluator, video=1)
    with pytest.raises(ValueError, match=r"evaluator\.video must be 0 with policies"):
        plan(dataclasses.replace(several, evaluator=evaluator))
    monkeypatch.setattr(
        "rlstack.programs.pictures.video.importlib.util.find_spec", lambda name: None
    )
    with pytest.raises(ValueError, match="needs Pillow and PyAV, which the extra `video`"):
        train.run(filmed("single_process"), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
