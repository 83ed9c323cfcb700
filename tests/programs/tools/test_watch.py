"""`rlstack watch`: pictures, overlays, videos and the terminal."""

import dataclasses
import io
import sys

import gymnasium
import numpy as np
import pytest
from rich.console import Console

from rlstack.programs.__main__ import main
from rlstack.programs.build.policies.policy import load
from rlstack.programs.pictures.scene import bars_of
from rlstack.programs.pictures.screen import Drawer, open_screen
from rlstack.programs.pictures.stage import Stage
from rlstack.programs.pictures.watch import watch
from tests.programs import running
from tests.programs.tools.test_play import sweeper

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def balancing(tmp_path_factory):
    """A run of PPO on CartPole."""
    directory = tmp_path_factory.mktemp("watch") / "run"
    running.run(running.ppo("single_process", frames=600), directory)
    return directory


def images(path):
    image = pytest.importorskip("PIL.Image").open(path)
    for i in range(image.n_frames):
        image.seek(i)
        yield np.asarray(image.convert("RGB"))


@pytest.mark.slow
@pytest.mark.chosen
def test_a_gif_shows_the_environment_and_the_policy(balancing, tmp_path, capsys):
    path = tmp_path / "out.gif"
    args = ["--video", str(path), "--episodes", "2", "--max-steps", "6", "--seed", "3"]
    assert main(["watch", str(balancing), *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["return 6 after 6 steps"] * 2 and lines[2] == f"{path}: 14 steps"
    shown = list(images(path))
    assert len({image.shape for image in shown}) == 1
    height, width, _ = shown[0].shape
    assert height % 2 == width % 2 == 0 and width > 600  # Gymnasium's picture and the panel
    cart, panel = shown[0][:, :600], shown[0][:, 620:]
    assert (cart.min(axis=2) > 200).mean() > 0.5  # CartPole's white background
    orange = (panel[..., 0] > 180) & (panel[..., 2] < 120)
    assert orange.sum() > 200  # the bar of the chosen action
    assert not np.array_equal(shown[0], shown[3])
    assert list(tmp_path.iterdir()) == [path]


def test_an_mp4_has_every_step(balancing, tmp_path):
    av = pytest.importorskip("av")
    found = watch(balancing, video=tmp_path / "out.mp4", max_steps=6, fps=10)
    with av.open(str(tmp_path / "out.mp4")) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == 10
        frames = list(container.decode(stream))
    assert len(frames) == 6 + 10  # the last step is held for a second
    assert found.frames == 7 and found.lengths == [6]


def test_the_bars_are_the_policys_probabilities(balancing):
    policy = load(balancing)
    stage = Stage(policy.experiment, seed=0)
    timestep = stage.pool.reset()
    observation = timestep.observation[0]
    prediction = policy.predict(observation)
    ((title, bars),) = bars_of(prediction, observation, stage.labels)
    assert title == "" and [bar.label for bar in bars] == ["0", "1"]
    chances = prediction.probabilities["action"][0]
    assert [bar.share for bar in bars] == chances.tolist()
    assert [bar.text for bar in bars] == [f"{chance:.0%}" for chance in chances]
    assert [bar.chosen for bar in bars] == [i == prediction.action for i in range(2)]
    assert stage.picture(timestep).shape == (400, 600, 3) and stage.fps == 50
    stage.close()


def test_a_game_is_shown_in_the_terminal(tmp_path):
    running.run(sweeper(), tmp_path / "run")
    stream = io.StringIO()
    console = Console(file=stream, width=120, highlight=False)
    found = watch(tmp_path / "run", console=console, max_steps=3)
    shown = stream.getvalue()
    assert shown.count("│") >= 2 * found.frames and "step 0" in shown and "return 0" in shown
    assert "Move of Robot 0" in shown and "* " in shown and "value " in shown
    assert "%" in shown


def test_pixels_are_characters_in_a_terminal(balancing):
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True, color_system="truecolor")
    watch(balancing, console=console, max_steps=2, fps=1000)
    assert "▀" in stream.getvalue() and "48;2;255;255;255" in stream.getvalue()


@pytest.fixture
def pygame(monkeypatch):
    """Pygame without a display; windows are memory."""
    pytest.importorskip("PIL")
    module = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    return module


@pytest.mark.slow
@pytest.mark.chosen
def test_a_window_shows_what_a_video_shows(balancing, pygame, monkeypatch):
    seen, drawn = [], []
    flip, draw = pygame.display.flip, Drawer.__call__

    def flipped():
        flip()
        window = pygame.display.get_surface()
        seen.append(np.swapaxes(pygame.surfarray.array3d(window), 0, 1))

    def drawing(self, scene):
        drawn.append(draw(self, scene))
        return drawn[-1]

    monkeypatch.setattr(pygame.display, "flip", flipped)
    monkeypatch.setattr(Drawer, "__call__", drawing)
    found = watch(balancing, window=True, episodes=2, max_steps=3, fps=100)
    assert found.lengths == [3, 3] and found.frames == len(seen) == 8
    assert all(np.array_equal(a, b) for a, b in zip(seen, drawn, strict=True))
    assert not pygame.display.get_init()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("how", ["escape", "close"])
def test_closing_the_window_ends_the_command(balancing, pygame, monkeypatch, how, capsys):
    shown, flip = [], pygame.display.flip

    def flipped():
        flip()
        shown.append(1)
        if len(shown) == 3:
            key = pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE)
            pygame.event.post(key if how == "escape" else pygame.event.Event(pygame.QUIT))

    monkeypatch.setattr(pygame.display, "flip", flipped)
    args = ["--window", "--episodes", "3", "--max-steps", "1", "--fps", "200"]
    assert main(["watch", str(balancing), *args]) == 0
    assert len(shown) == 3 and not pygame.display.get_init()
    assert capsys.readouterr().out == "return 1 after 1 steps\n"


def test_without_a_display_there_is_an_error(balancing, pygame, monkeypatch, capsys):
    monkeypatch.setenv("SDL_VIDEODRIVER", "none-such")
    assert main(["watch", str(balancing), "--window"]) == 1
    assert "--window needs a display: none-such not available" in capsys.readouterr().err
    assert main(["watch", str(balancing), "--window", "--video", "x.gif"]) == 2
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert main(["watch", str(balancing), "--window"]) == 1
    assert "needs the extra `window`" in capsys.readouterr().err


class Pixels(gymnasium.Env):
    """An environment without a renderer, whose observations are stacks of grey images."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 36, 36), np.uint8)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        image = np.zeros((4, 36, 36), np.uint8)
        image[-1, 3, 5] = 200
        return image, {}

    def step(self, action):
        return self.reset()[0], 1.0, True, False, {}


def test_without_a_renderer_the_picture_is_what_the_agent_sees():
    experiment = running.ppo("single_process")
    env = dataclasses.replace(experiment.env, name=f"{__name__}:Pixels", type="auto")
    stage = Stage(dataclasses.replace(experiment, env=env), seed=0)
    picture = stage.picture(stage.pool.reset())
    assert picture.shape == (36, 36, 3) and picture[3, 5].tolist() == [200] * 3
    assert picture.sum() == 600
    stage.close()
    env = dataclasses.replace(env, name="rlstack.envs.toy:MemoryCue")
    stage = Stage(dataclasses.replace(experiment, env=env), seed=0)
    assert isinstance(stage.picture(stage.pool.reset()), str)
    stage.close()


@pytest.mark.parametrize(
    ("video", "text"),
    [("out.avi", "must end with .gif, .mp4, .webm"), ("none/out.gif", "folder that exists")],
)
def test_a_video_that_cannot_be_written_is_refused_first(balancing, tmp_path, video, text):
    with pytest.raises(ValueError, match=text):
        watch(balancing, video=tmp_path / video)
    with pytest.raises(ValueError, match="no such directory"):
        watch(tmp_path / "nothing", video=tmp_path / "out.gif")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_the_pace_must_be_positive_and_finite(fps):
    with pytest.raises(ValueError, match=r"^fps \(--fps\) must be positive and finite; got "):
        open_screen(None, fps)
