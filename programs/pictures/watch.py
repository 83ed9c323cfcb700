"""Plays episodes with the policy of a run, and shows them: terminal, window or video."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console

from rlstack.programs.build.policies.policy import Policy, Prediction, load
from rlstack.programs.build.restored import Which, chosen_checkpoint
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.pictures.scene import Scene, bars_of, numbers_of
from rlstack.programs.pictures.screen import Show, open_screen
from rlstack.programs.pictures.stage import Stage
from rlstack.programs.pictures.video import check_video
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.types import TimeStep

MAX_STEPS = 2000  # maximum length of an episode that is shown


class Watched(NamedTuple):
    """The episodes that were shown."""

    returns: list[float]  # return of each episode, in order
    lengths: list[int]  # number of steps of each episode, in order
    frames: int  # number of pictures that were shown


def watch(
    run_dir: str | os.PathLike[str],
    *,
    video: str | os.PathLike[str] | None = None,
    window: bool = False,
    episodes: int = 1,
    params: Which = "last",
    greedy: bool = True,
    seed: int | None = None,
    max_steps: int = MAX_STEPS,
    fps: float | None = None,
    console: Console | None = None,
) -> Watched:
    """Plays episodes in the environments of the run's evaluation, and shows each step.

    In a game of several seats the policy plays all of them, and the first one is shown;
    `rlstack.programs.tools.seats.watch.watch` shows all of them.

    Args:
      run_dir: the directory of a run with a checkpoint.
      video: the file to write, .mp4, .webm or .gif; by default the terminal shows the run.
      window: True to show the run in a window; closing it ends the last episode early.
      episodes: number of episodes.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      greedy: True to take the best action; False to explore as at the end of training.
      seed: seed of the environment and of random actions; by default the seed of the run.
      max_steps: number of steps after which an episode is cut.
      fps: steps per second; by default the environment's own rate, or 10.
      console: shows the run; standard output by default.

    Raises:
      ValueError: there is no run or no checkpoint, the environment cannot be made, the video
        cannot be written, or no window can be opened.
      rlstack.programs.session.signals.Interrupted: SIGINT or SIGTERM was received; no video is
        left.
    """
    directory = RunDir.open(run_dir)
    experiment = read_config(directory)
    chosen_checkpoint(directory, experiment, params)  # before anything is made
    if video is not None:
        check_video(Path(video))
    seed = experiment.seed if seed is None else seed
    with contextlib.closing(Stage(experiment, role_seed(seed, "watch"))) as stage:
        policy = load(run_dir, params=params, greedy=greedy, seed=seed, spec=stage.spec)
        path = None if video is None else Path(video)
        screen = open_screen(path, stage.fps if fps is None else fps, console, window=window)
        found, frames = Watched([], [], 0), 0
        with screen as show, StopSignals() as stop:
            titles = [f"episode {i + 1} of {episodes}" for i in range(episodes)]
            frames = _play(stage, policy, show, titles, found, max_steps, lambda: check_stop(stop))
        return found._replace(frames=frames)


def check_stop(stop: StopSignals) -> None:
    """Raises `Interrupted` if a signal has asked to stop."""
    if stop.received is not None:
        raise Interrupted(stop.received, saved=False)


def film(stage: Stage, policy: Policy, path: Path, title: str) -> Watched:
    """Writes a video of one episode of at most `MAX_STEPS` steps.

    Args:
      stage: a new environment; the caller closes it.
      policy: the policy that plays, in its initial state.
      path: the file to write.
      title: text shown above the number of the step.

    Raises:
      ValueError: the video cannot be written; see `check_video`.
    """
    found, frames = Watched([], [], 0), 0
    with open_screen(path, stage.fps) as show:
        frames = _play(stage, policy, show, [title], found, MAX_STEPS)
    return found._replace(frames=frames)


def _play(
    stage: Stage,
    policy: Policy,
    show: Show,
    titles: Sequence[str],
    found: Watched,
    max_steps: int,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Plays an episode for each title, and adds its return and length to ``found``.

    ``check`` is called after each step and may raise. Returns the number of steps shown.
    """
    frames = 0
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
    return frames


def _scene(
    stage: Stage, timestep: TimeStep, prediction: Prediction | None, lines: tuple[str, ...]
) -> Scene:
    """Returns the scene of the first environment; None predicts nothing, after the last step."""
    picture = stage.picture(timestep)
    if prediction is None:
        return Scene(picture, lines, (), is_last=True)
    observation, first = jax.tree.map(
        lambda x: np.asarray(x)[0], (timestep.observation, prediction)
    )
    if first.value is not None:
        lines = (*lines, f"value {float(first.value):.4g}")
    bars = bars_of(first, observation, stage.labels)
    return Scene(picture, (*lines, *numbers_of(first)), bars)
