"""`rlstack watch` in games of several seats: the policies of one run, or of several that compete.

The sides change seats from episode to episode, so that none has the first move more often.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from rlstack.programs.build.policies.members import seat_names
from rlstack.programs.build.policies.policy import Prediction
from rlstack.programs.build.restored import Which
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.pictures.scene import MAX_BARS, Bar, Bars, Scene, bars_of, numbers_of
from rlstack.programs.pictures.screen import Show, open_screen
from rlstack.programs.pictures.stage import Stage
from rlstack.programs.pictures.video import check_video
from rlstack.programs.pictures.watch import MAX_STEPS, check_stop
from rlstack.programs.session.signals import StopSignals
from rlstack.programs.tools.seats import results
from rlstack.programs.tools.seats.match import Moment, PolicyPlayer, play_game, seen_by
from rlstack.programs.tools.seats.sides import Entry, Side, check_same_game, find, sides_of


class Watched(NamedTuple):
    """The games that were played."""

    sides: list[str]  # names, in the order of the runs
    seats: tuple[str, ...]  # names
    episodes: list[results.Episode]
    frames: int  # pictures that were shown
    greedy: bool  # whether all policies took their best actions

    def standings(self) -> list[results.Standing]:
        """Returns the results of each side."""
        return results.standings(self.sides, self.episodes)

    def summary(self) -> list[str]:
        """Returns the results of the sides in words, a line for each; none for a single one."""
        if len(self.sides) == 1:
            return []
        repeated = results.num_repeated(self.episodes) if self.greedy else 0
        return results.summary(self.standings(), repeated)


def is_game_of_seats(runs: Sequence[str | os.PathLike[str]]) -> bool:
    """Returns whether `watch` shows these runs: several, or one of a game of several seats."""
    return len(runs) > 1 or len(seat_names(find("watch", runs[0]).experiment.evaluation_env)) > 1


def watch(
    runs: Sequence[str | os.PathLike[str]],
    *,
    video: str | os.PathLike[str] | None = None,
    window: bool = False,
    shows: bool = True,
    episodes: int | None = None,
    params: Which = "last",
    greedy: bool = True,
    seed: int | None = None,
    max_steps: int = MAX_STEPS,
    fps: float | None = None,
    console: Console | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> Watched:
    """Plays games between runs in the environments of the first one's evaluation.

    The policies of a run play the seats that they played in training. A policy's newest params play
    the seats that its earlier versions played.

    Args:
      runs: directories of runs, or of checkpoints. For a run with several policies, ``:NAME`` after
        the directory names the policy that plays all seats for this run.
      video: the file to write, .mp4, .webm or .gif; by default the terminal shows the games.
      window: True to show the games in a window; closing it ends the last game early.
      shows: False to show nothing, unless `video` is given.
      episodes: number of games; by default one for each run, so that each plays each seat once.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      greedy: True if policies take their best action; False to explore as at the end of training.
      seed: seed of the game and of random actions; by default the seed of the first run.
      max_steps: number of steps after which a game is cut; a game that is cut has no winner.
      fps: steps per second; by default the game's own rate, or 10.
      console: shows the games; standard output by default.
      tell: called with the result of each episode in words, when it ends.

    Raises:
      ValueError: there is no run or no checkpoint, the runs are not of one game, there are more of
        them than seats, or the video or the window cannot be made.
      rlstack.programs.session.signals.Interrupted: SIGINT or SIGTERM was received; no video is
        left.
    """
    if video is not None:
        check_video(Path(video))
    entries = [find("watch", run, params) for run in runs]
    _check_number(entries)
    experiment = entries[0].experiment
    seed = experiment.seed if seed is None else seed
    with contextlib.closing(Stage(experiment, role_seed(seed, "watch"))) as stage:
        check_same_game(entries, stage.spec)
        sides = sides_of(entries, stage.spec, len(stage.seats), greedy=greedy, seed=seed)
        number = len(sides) if episodes is None else episodes
        found = Watched([side.name for side in sides], stage.titles, [], 0, greedy)
        screen: contextlib.AbstractContextManager[Show | None] = contextlib.nullcontext()
        if shows or video is not None:
            path = None if video is None else Path(video)
            screen = open_screen(path, stage.fps if fps is None else fps, console, window=window)
        frames = 0
        with screen as show, StopSignals() as stop:
            frames = _play(stage, sides, number, max_steps, found, show, stop, tell)
        return found._replace(frames=frames)


def _play(
    stage: Stage,
    sides: Sequence[Side],
    number: int,
    max_steps: int,
    found: Watched,
    show: Show | None,
    stop: StopSignals,
    tell: Callable[[str], object],
) -> int:
    """Adds this number of episodes to what was found; returns the number of steps shown."""
    frames = 0
    seatings = results.seatings(len(stage.seats), len(sides), number)
    for at, seating in enumerate(seatings, 1):
        view = _View(stage, sides, seating, f"episode {at} of {number}")

        def see(moment: Moment, view: _View = view) -> None:
            nonlocal frames
            if show is not None:
                show(view.scene(moment))
                frames += 1
            check_stop(stop)

        players = [PolicyPlayer(sides[side].policies[seat]) for seat, side in enumerate(seating)]
        episode = results.Episode(seating, play_game(stage, players, max_steps, see))
        found.episodes.append(episode)
        tell(results.told(at, episode, found.sides, found.seats))
    return frames


def _check_number(entries: Sequence[Entry]) -> None:
    """Checks that each run can have a seat.

    Raises:
      ValueError: there are more runs than seats.
    """
    first = entries[0]
    seats = seat_names(first.experiment.evaluation_env)
    if len(entries) > len(seats):
        raise ValueError(
            f"watch: there may be as many runs as the game has seats; {first.text} is of "
            f"{first.experiment.env.name}, which has {len(seats)}; got {len(entries)} runs."
        )


class _View:
    """Shows the steps of one game."""

    def __init__(
        self, stage: Stage, sides: Sequence[Side], seating: Sequence[int], title: str
    ) -> None:
        self._stage, self._title = stage, title
        several = len(sides) > 1
        self._names = [
            f"{seat}: {sides[side].name}" if several else seat
            for seat, side in zip(stage.titles, seating, strict=True)
        ]

    def scene(self, moment: Moment) -> Scene:
        """Returns what is shown of a step: all seats, and the choices of those who act."""
        lines = [self._title, f"step {moment.step}"]
        bars: list[tuple[str, tuple[Bar, ...]]] = []
        acting = self._acting(moment)
        for seat, name in enumerate(self._names):
            line = f"{name} {moment.returns[seat]:.6g}"
            choice = moment.choices[seat]
            if choice is not None and choice.value is not None:
                line += f", value {choice.value:.4g}"
            lines.append(line)
            if seat in acting:
                lines += acting[seat][1]
                bars += [(f"{name} {title}".rstrip(), own) for title, own in acting[seat][0]]
        picture = self._stage.picture(moment.timestep)
        return Scene(picture, tuple(lines), tuple(bars), moment.is_last)

    def _acting(self, moment: Moment) -> dict[int, tuple[Bars, tuple[str, ...]]]:
        """Returns the bars and the numbers of the seats that have a choice, or else of all."""
        found = {}
        for seat, choice in enumerate(moment.choices):
            if choice is not None:
                found[seat] = self._bars(moment, seat, choice, MAX_BARS), numbers_of(choice)
        choosing = [
            seat
            for seat, (bars, numbers) in found.items()
            if numbers or any(len(own) > 1 for _, own in bars)
        ]
        if not choosing:
            return found
        most = max(2, MAX_BARS // len(choosing))
        return {
            seat: (
                self._bars(moment, seat, choice, most),
                found[seat][1][:most],
            )
            for seat in choosing
            if (choice := moment.choices[seat]) is not None
        }

    def _bars(self, moment: Moment, seat: int, choice: Prediction, most: int) -> Bars:
        observation = seen_by(moment.timestep, seat)
        return bars_of(choice, observation, self._stage.labels_of(seat), most)
