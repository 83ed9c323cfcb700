"""Plays episodes with the policy of a run, and shows them in the terminal or as a video."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from programs.components.restored import Which, chosen_checkpoint, read_config
from programs.components.seeds import role_seed
from programs.policies.policy import Policy, Prediction, load
from programs.policies.scene import Bar, Scene, bars_of, numbers_of
from programs.policies.stage import Stage
from programs.policies.video import check_video, open_video
from programs.tracking.run_dir import RunDir
from programs.tracking.signals import Interrupted, StopSignals
from rlstack.types import TimeStep

_HOLD = 1.0  # seconds for which a video shows the last step of an episode
_MAX_STEPS = 2000  # of an episode that is shown
_COLUMNS = 72  # of a picture in the terminal

Show = Callable[[Scene], None]


class Watched(NamedTuple):
    """What was seen."""

    returns: list[float]  # of the episodes, in their order
    lengths: list[int]  # in steps
    frames: int  # pictures that were shown


def watch(
    run_dir: str | os.PathLike[str],
    *,
    video: str | os.PathLike[str] | None = None,
    episodes: int = 1,
    params: Which = "last",
    greedy: bool = True,
    seed: int | None = None,
    max_steps: int = _MAX_STEPS,
    fps: float | None = None,
    console: Console | None = None,
) -> Watched:
    """Plays episodes in the environments of the run's evaluation, and shows each step.

    Args:
      run_dir: the directory of a run with a checkpoint.
      video: the file to write, .mp4, .webm or .gif; by default the terminal shows the run.
      episodes: number of episodes.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      greedy: whether to take the best action; otherwise as at the end of training.
      seed: of the environment and of random actions; by default that of the run.
      max_steps: an episode that is longer is cut.
      fps: steps in a second; by default what the environment says, or 10.
      console: shows the run; standard output by default.

    Raises:
      ValueError: there is no run or no checkpoint, the environment cannot be made, or the video
        cannot be written.
      programs.tracking.signals.Interrupted: SIGINT or SIGTERM was received; no video is left.
    """
    directory = RunDir.open(run_dir)
    experiment = read_config(directory)
    chosen_checkpoint(directory, experiment, params)  # before anything is made
    if video is not None:
        check_video(Path(video))
    seed = experiment.seed if seed is None else seed
    with contextlib.closing(Stage(experiment, role_seed(seed, "watch"))) as stage:
        policy = load(run_dir, params=params, greedy=greedy, seed=seed, spec=stage.spec)
        fps = fps or stage.fps
        if video is None:
            shown = _in_terminal(console or Console(highlight=False), fps)
        else:
            shown = _in_video(Path(video), fps)
        with shown as show, StopSignals() as stop:

            def check() -> None:
                if stop.received is not None:
                    raise Interrupted(stop.received, saved=False)

            titles = [f"episode {i + 1} of {episodes}" for i in range(episodes)]
            return _play(stage, policy, show, titles, max_steps, check)


def film(stage: Stage, policy: Policy, path: Path, title: str) -> Watched:
    """Writes a video of one episode, at most as long as those of `watch`.

    Args:
      stage: a new environment; the caller closes it.
      policy: plays, from its initial state.
      path: the file to write.
      title: what the video says above the step.

    Raises:
      ValueError: as `check_video`.
    """
    with _in_video(path, stage.fps) as show:
        return _play(stage, policy, show, [title], _MAX_STEPS)


def _play(
    stage: Stage,
    policy: Policy,
    show: Show,
    titles: Sequence[str],
    max_steps: int,
    check: Callable[[], None] = lambda: None,
) -> Watched:
    """Plays an episode for each title; ``check`` is called after each step and may raise."""
    found, frames = Watched([], [], 0), 0
    timestep = stage.pool.reset()
    action = None
    for episode, title in enumerate(titles):
        if episode:
            timestep = stage.pool.step(action)  # the pool starts the next episode
            if not timestep.first()[0]:  # the last one was cut
                timestep = stage.pool.reset()
        policy.reset()
        total, length = 0.0, 0
        while True:
            prediction = policy.predict(timestep.observation, timestep.reward)
            action, over = prediction.action, timestep.last()[0] or length >= max_steps
            numbers = (title, f"step {length}", f"return {total:.6g}")
            show(_scene(stage, timestep, None if over else prediction, numbers))
            frames += 1
            check()
            if over:
                break
            timestep = stage.pool.step(action)
            policy.reset(timestep.first())
            total, length = total + float(timestep.reward[0]), length + 1
        found.returns.append(total)
        found.lengths.append(length)
    return found._replace(frames=frames)


def _scene(
    stage: Stage, timestep: TimeStep, prediction: Prediction | None, lines: tuple[str, ...]
) -> Scene:
    """Returns the scene of the first environment; None predicts nothing, after the last step."""
    picture = stage.picture(timestep)
    if prediction is None:
        return Scene(picture, lines, ())
    observation, first = jax.tree.map(
        lambda x: np.asarray(x)[0], (timestep.observation, prediction)
    )
    if first.value is not None:
        lines = (*lines, f"value {float(first.value):.4g}")
    bars = bars_of(first, observation, stage.labels)
    return Scene(picture, (*lines, *numbers_of(first)), bars)


@contextlib.contextmanager
def _in_video(path: Path, fps: float) -> Iterator[Show]:
    from programs.policies.drawing import Drawer

    draw = Drawer()
    with open_video(path, fps) as video:

        def show(scene: Scene) -> None:
            image = draw(scene)
            for _ in range(1 if scene.bars else max(1, round(_HOLD * fps))):
                video.write(image)

        yield show


@contextlib.contextmanager
def _in_terminal(console: Console, fps: float) -> Iterator[Show]:
    if not console.is_terminal:  # a file or a pipe gets every step
        yield lambda scene: console.print(_shown(scene))
        return
    with Live(console=console, auto_refresh=False) as live:
        due = time.monotonic()

        def show(scene: Scene) -> None:
            nonlocal due
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - 1 / fps) + 1 / fps
            live.update(_shown(scene), refresh=True)

        yield show


def _shown(scene: Scene) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    words = Text("\n".join(scene.lines))
    for title, bars in scene.bars:
        words.append(f"\n{title}" if title else "")
        for bar in bars:
            words.append("\n").append(_bar(bar))
    table.add_row(Panel(_picture(scene), expand=False), words)
    return Group(table)


def _bar(bar: Bar) -> Text:
    blocks = "█" * round(10 * bar.share)
    mark = "*" if bar.chosen else " "
    return Text(f"{mark} {bar.label} {blocks} {bar.text}", "bold" if bar.chosen else "")


def _picture(scene: Scene) -> Text:
    """Returns the picture as text; each character shows two pixels, one above the other."""
    if isinstance(scene.picture, str):
        return Text(scene.picture)
    height, width = scene.picture.shape[:2]
    columns = min(_COLUMNS, width)
    rows = max(2, round(height * columns / width)) // 2 * 2
    ys = (np.arange(rows) * height / rows).astype(int)
    xs = (np.arange(columns) * width / columns).astype(int)
    pixels = scene.picture[ys][:, xs]
    text = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
            style = "rgb({},{},{}) on rgb({},{},{})".format(*above, *below)
            text.append("▀", style)
        text.append("\n")
    text.rstrip()
    return text
