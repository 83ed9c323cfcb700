"""Actions that repeat after a number of frames: lines of logs, evaluations and checkpoints."""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from rlstack.acting.evaluator import Evaluation, as_logs, by_opponent, by_policy
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.callbacks import Events
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.result import Result, commit_at_start, machine, versions
from rlstack.programs.session.stopping import EPISODES, StopRules, spent_budget
from rlstack.storage.loggers import Logger

_log = logging.getLogger(__name__)
_EPISODES = "actor/episode_return"  # a value for each episode
_FRAMES, _UPDATES = "actor/frames_per_second", "learner/updates_per_second"


class PeriodicActions:
    """Writes logs, evaluates and saves checkpoints, each with its own period in frames.

    The training loop passes the logs of each step to `log`, calls `tick` after each step, and
    `finish` at the end of training.
    """

    def __init__(
        self,
        experiment: Experiment,
        logger: Logger,
        *,
        start: Progress = Progress(),  # noqa: B008  (immutable)
        began: float | None = None,
        evaluate: Callable[[int], None],
        checkpoint: Callable[[int], None],
        tell: Callable[[str], None] = _log.warning,
        earlier: Path | None = None,
        events: Events | None = None,
    ) -> None:
        """Starts the clock.

        Args:
          experiment: the periods, and what the result says of the run.
          logger: the sink of the logs.
          start: the progress of the earlier commands, if this one resumes a run.
          began: the monotonic time from which this command's seconds count; by default now.
          evaluate: evaluates the current params, and passes the evaluation to `evaluated`, at
            once or later; takes the frames so far.
          checkpoint: saves a checkpoint; takes the frames so far.
          tell: shows the user a line.
          earlier: the file of metrics of the earlier commands, which stop rules see.
          events: receives updates, episodes and evaluations, for callbacks.
        """
        self._experiment = experiment
        self._logger = logger
        self._evaluate = evaluate
        self._checkpoint = checkpoint
        self._averages = _Averages()
        self._rules = StopRules(experiment.stop, tell)
        if earlier is not None:
            self._rules.replay(earlier)
        self._ended_by = ""
        self._episodes = start.episodes
        self._events = events
        self._commit = commit_at_start()
        self._start = start
        start_frames = start.env_frames
        now = time.monotonic()
        self._start_time = now if began is None else began
        self._end_time: float | None = None
        first = {_FRAMES: start_frames, **({} if start_frames else {_UPDATES: 0.0})}
        self._last_log: tuple[float, dict[str, float]] = (now, first)
        self._saved_frames = start_frames
        self._next_log = _next_multiple(start_frames, experiment.log_period)
        self._next_checkpoint = _next_multiple(start_frames, experiment.checkpoint_period)
        self._next_evaluation = _next_multiple(start_frames, experiment.evaluation_period)

    def log(self, logs: Mapping[str, ArrayLike] | None, prefix: str = "") -> None:
        """Adds values to the averages of the next line of logs."""
        if logs:
            self._averages.add(logs, prefix)
            if _EPISODES.startswith(prefix) and (ended := _EPISODES[len(prefix) :]) in logs:
                self._episodes += np.size(logs[ended])
            if self._events is not None:
                self._events.log({prefix + name: value for name, value in logs.items()})

    def tick(self, frames: int, counters: Callable[[], Mapping[str, object]]) -> None:
        """Writes, evaluates and saves what is due at these frames; cheap if nothing is due.

        Args:
          frames: frames so far, of this run and of those that it resumes.
          counters: returns values to log as they are; called only when a line of logs is due.
        """
        if frames >= self._next_log:
            self._write(frames, counters())
        if frames >= self._next_evaluation:
            self._next_evaluation = _next_multiple(frames, self._experiment.evaluation_period)
            brief = self._experiment.evaluator.period == "auto"
            if not brief or frames < self._experiment.all_frames:  # the last one follows at once
                self._evaluate(frames)
        if frames >= self._next_checkpoint:
            self._next_checkpoint = _next_multiple(frames, self._experiment.checkpoint_period)
            self.save(frames)

    @property
    def next_due(self) -> float:
        """The frames at which an evaluation or a checkpoint is due next; infinity for none."""
        return min(self._next_evaluation, self._next_checkpoint)

    def evaluated(self, frames: int, evaluation: Evaluation) -> None:
        """Logs an evaluation of params that had learned for these frames."""
        logs = as_logs(evaluation)
        self._logger.write(frames, logs)
        self._rules.see(frames, logs)
        if self._events is not None:
            self._events.evaluated(frames, evaluation)

    def end(self, reason: str) -> None:
        """Ends training as a stop rule does; does nothing if it has ended already."""
        self._rules.reason = self._rules.reason or reason

    def ended_by(self, frames: int, updates: int) -> str:
        """Returns what ends training, a budget or a stop rule; an empty string while it goes on.

        Args:
          frames: frames so far, of this run and of those that it resumes.
          updates: updates of the learner, counted in the same way.
        """
        if not self._ended_by:  # the first of them: actors may spend another budget since
            seconds = self.progress(frames).train_seconds if self._experiment.hours else 0.0
            spent = spent_budget(self._experiment, frames, updates, seconds)
            self._ended_by = spent or self._rules.reason
        return self._ended_by

    def finish(self, frames: int, counters: Mapping[str, object]) -> None:
        """Ends training: writes the last logs and, unless it exists, the last checkpoint."""
        self._end_time = time.monotonic()
        # A learner may report its last updates after the logs of the last frames were written.
        if frames > self._last_log[1][_FRAMES] or self._averages:
            self._write(frames, counters)
        if frames != self._saved_frames:
            self.save(frames)

    def result(
        self,
        evaluation: Evaluation,
        env_frames: int,
        learner_steps: int,
        policies: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> Result:
        """Returns the result of the run; call it after `finish`.

        Args:
          evaluation: the last one.
          env_frames: frames so far, of this run and of those that it resumes.
          learner_steps: updates of the learner, counted in the same way; with several learners the
            smallest number.
          policies: the counters of each policy, if there are several.
        """
        experiment, progress = self._experiment, self.progress(env_frames)
        return Result(
            eval_return_mean=float(evaluation.returns.mean()),
            eval_return_std=float(evaluation.returns.std()),
            eval_episodes=len(evaluation.returns),
            env_frames=env_frames,
            learner_steps=learner_steps,
            wall_seconds=progress.train_seconds,
            frames_per_second=progress.timed_frames / max(progress.train_seconds, 1e-9),
            seed=experiment.seed,
            topology=experiment.topology,
            preset=experiment.preset,
            git_commit=self._commit.result(),
            eval_return_by_opponent=by_opponent(evaluation),
            ended_by=self.ended_by(env_frames, learner_steps),
            policies={
                name: {**_of_returns(returns), **policies.get(name, {})}
                for name, returns in by_policy(evaluation).items()
            },
            versions=versions(),
            machine=machine(),
        )

    def progress(self, frames: int) -> Progress:
        """Returns the progress at these frames, over all commands of the run."""
        seconds = (self._end_time or time.monotonic()) - self._start_time
        timed = frames - self._start.env_frames + self._start.timed_frames
        return Progress(frames, self._start.train_seconds + seconds, timed, self._episodes)

    def save(self, frames: int) -> None:
        """Saves a checkpoint, whether or not one is due."""
        self._checkpoint(frames)
        self._saved_frames = frames

    def _write(self, frames: int, counters: Mapping[str, object]) -> None:
        self._next_log = _next_multiple(frames, self._experiment.log_period)
        logs = {**self._averages.flush(), **counters, **self._rates(frames, counters)}
        if self._episodes:
            logs[EPISODES] = self._episodes
        self._logger.write(frames, logs)
        self._rules.see(frames, logs)

    def _rates(self, frames: int, counters: Mapping[str, object]) -> dict[str, float]:
        """Returns the frames and updates per second since the last line, as far as they are known.

        The first line of a resumed run has no updates per second, because no earlier number is
        known.
        """
        then, last = self._last_log
        now, totals = time.monotonic(), {_FRAMES: float(frames)}
        if isinstance(updates := counters.get("learner/steps"), int | float):
            totals[_UPDATES] = updates
        self._last_log = (now, totals)
        seconds = max(now - then, 1e-9)
        rates = {name: (totals[name] - last[name]) / seconds for name in totals if name in last}
        return {name: rate for name, rate in rates.items() if rate > 0}


def _of_returns(returns: np.ndarray) -> dict[str, float]:
    return {
        "eval_return_mean": float(returns.mean()),
        "eval_return_std": float(returns.std()),
        "eval_episodes": len(returns),
    }


class _Averages:
    """Means of the values logged since the last flush."""

    def __init__(self) -> None:
        self._values: dict[str, list[ArrayLike]] = collections.defaultdict(list)

    def add(self, logs: Mapping[str, ArrayLike], prefix: str) -> None:
        """Adds scalars, or vectors of which each entry counts as one value."""
        for name, value in logs.items():
            self._values[prefix + name].append(value)

    def __len__(self) -> int:
        """Returns the number of names logged since the last flush."""
        return len(self._values)

    def flush(self) -> dict[str, float]:
        """Returns the mean of each name, and forgets the values."""
        means = {name: float(np.mean(np.hstack(values))) for name, values in self._values.items()}
        self._values.clear()
        return means


def _next_multiple(frames: int, period: int) -> float:
    """Returns the first multiple of ``period`` above ``frames``; infinity for period 0."""
    return (frames // period + 1) * period if period else math.inf
