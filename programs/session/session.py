"""What surrounds a training loop: logs, evaluations, checkpoints, interruption and the result."""

from __future__ import annotations

import collections
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from programs.experiment import Experiment
from programs.session.run_dir import git_commit
from rlstack.acting.evaluator import Evaluation, by_opponent
from rlstack.storage.loggers import Logger


class Interrupted(Exception):  # noqa: N818, it is no error
    """A signal asked the run to end; everything there was to save is saved."""

    def __init__(self, signal_number: int, *, saved: bool = True) -> None:
        what = "everything is saved" if saved else "there was nothing to save yet"
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {what}.")
        self.exit_code = 128 + signal_number


class ProgramError(RuntimeError):
    """A node failed for good and so ended its program; the message has what it raised."""


class Averages:
    """Means of what was logged since the last flush."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = collections.defaultdict(list)

    def add(self, logs: Mapping[str, Any] | None, prefix: str = "") -> None:
        """Adds scalars, or vectors whose entries count one each; None adds nothing."""
        for name, value in (logs or {}).items():
            self._values[prefix + name].append(value)

    def __len__(self) -> int:
        """How many names have been logged since the last flush."""
        return len(self._values)

    def flush(self) -> dict[str, float]:
        """Returns the mean of each name and starts anew."""
        means = {name: float(np.mean(np.hstack(values))) for name, values in self._values.items()}
        self._values.clear()
        return means


class Signals:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one is not held back.

    Only the main thread may set signal handlers; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = number
        for held, handler in self._previous.items():
            signal.signal(held, handler)


class Session:
    """Keeps a run's schedule; the loop tells it each step's logs and asks when to stop."""

    def __init__(
        self,
        experiment: Experiment,
        logger: Logger,
        *,
        start_frames: int = 0,
        evaluate: Callable[[int], None],
        checkpoint: Callable[[int], None],
    ) -> None:
        """Starts the clock.

        Args:
          experiment: whose budget and periods hold.
          logger: where logs go, by frames.
          start_frames: frames of the runs that this one resumes.
          evaluate: judges the current params, given the frames so far, and logs what it found.
          checkpoint: saves everything, given the frames so far.
        """
        self._experiment = experiment
        self._logger = logger
        self._evaluate = evaluate
        self._checkpoint = checkpoint
        self._averages = Averages()
        self._start_frames = start_frames
        self._start_time = time.monotonic()
        self._last_log = (start_frames, self._start_time)
        self._saved_frames = start_frames
        self._next_log = self._after(start_frames, experiment.log_period)
        self._next_checkpoint = self._after(start_frames, experiment.checkpoint_period)
        self._next_evaluation = self._after(start_frames, experiment.evaluator.period)

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self._start_time

    def frames_here(self, frames: int) -> int:
        """Frames made since the start, without those of the runs that this one resumes."""
        return frames - self._start_frames

    def log(self, logs: Mapping[str, Any] | None, prefix: str = "") -> None:
        """Adds to the averages of the next line of logs."""
        if logs:
            self._averages.add(logs, prefix)

    def tick(self, frames: int, more: Callable[[], Mapping[str, Any]]) -> None:
        """Writes, evaluates and saves what is due at these frames; cheap when nothing is."""
        if frames >= self._next_log:
            self._write(frames, more())
        if frames >= self._next_evaluation:
            self._next_evaluation = self._after(frames, self._experiment.evaluator.period)
            self._evaluate(frames)
        if frames >= self._next_checkpoint:
            self._next_checkpoint = self._after(frames, self._experiment.checkpoint_period)
            self.save(frames)

    def save(self, frames: int) -> None:
        """Writes a checkpoint."""
        self._checkpoint(frames)
        self._saved_frames = frames

    def finish(self, frames: int, more: Mapping[str, Any]) -> None:
        """Writes the last logs and, if the newest checkpoint is older, one more."""
        # A learner may tell of its last updates when the last frames are written already.
        if frames > self._last_log[0] or self._averages:
            self._write(frames, more)
        if frames != self._saved_frames:
            self.save(frames)

    def result(
        self, evaluation: Evaluation, env_frames: int, learner_steps: int, seconds: float
    ) -> Result:
        """Returns how the run ended, after so many seconds of training."""
        experiment = self._experiment
        return Result(
            eval_return_mean=float(evaluation.returns.mean()),
            eval_return_std=float(evaluation.returns.std()),
            eval_episodes=len(evaluation.returns),
            env_frames=env_frames,
            learner_steps=learner_steps,
            wall_seconds=seconds,
            frames_per_second=self.frames_here(env_frames) / seconds,
            seed=experiment.seed,
            topology=experiment.topology,
            preset=experiment.preset,
            git_commit=git_commit(),
            eval_return_by_opponent=by_opponent(evaluation),
        )

    @staticmethod
    def _after(frames: int, period: int) -> float:
        """Returns the first multiple of ``period`` past ``frames``; never for period 0."""
        return (frames // period + 1) * period if period else math.inf

    def _write(self, frames: int, more: Mapping[str, Any]) -> None:
        now = time.monotonic()
        last_frames, last_time = self._last_log
        self._last_log = (frames, now)
        self._next_log = self._after(frames, self._experiment.log_period)
        logs = {**self._averages.flush(), **more}
        if frames > last_frames:
            logs["actor/frames_per_second"] = (frames - last_frames) / max(now - last_time, 1e-9)
        self._logger.write(frames, logs)


class Result(NamedTuple):
    """How a run ended."""

    eval_return_mean: float
    eval_return_std: float
    eval_episodes: int
    env_frames: int
    learner_steps: int
    wall_seconds: float
    frames_per_second: float
    seed: int
    topology: str
    preset: str
    git_commit: str
    eval_return_by_opponent: Mapping[str, float] = MappingProxyType({})  # empty without opponents
