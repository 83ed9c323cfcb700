"""Writes the logs, evaluations, checkpoints and result of a run in this process.

`Run` and `Engine` are the interfaces that a run must implement for this; `drive` is the loop over
an engine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rlstack.acting.evaluator import Evaluation
from rlstack.checks import EnvCrash, EnvError, ExitError, no_exits
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build.best import BestCheckpoint
from rlstack.programs.build.evaluation import Allowance, Shows
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session import failed_update, origin, signals
from rlstack.programs.session.callbacks import Events
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from rlstack.storage.loggers import Fanout
from rlstack.types import Params, PyTree

if TYPE_CHECKING:  # imported by runs with videos
    from rlstack.programs.pictures.training_videos import TrainingVideos

_SHARE = 0.02  # maximum share of the time for automatic evaluations, which pause training
_SHOWN = 2.0  # seconds until the display mentions a running automatic evaluation


class Learning(Protocol):
    """The learner of a run, or the learners of several policies."""

    @property
    def version(self) -> int:
        """The number of updates, of this run and of those that it resumes."""

    @property
    def params(self) -> Params:
        """The newest params; with several policies a dict from policy name to params."""


class Run(Protocol):
    """A run in this process, as `RunSession` sees it.

    Attributes:
      experiment: the run's experiment.
      starting_seconds: seconds spent starting environment worker processes; 0 if there are none.
    """

    experiment: Experiment
    starting_seconds: float

    @property
    def learner(self) -> Learning:
        """The learner, or the learners of several policies."""

    @property
    def env_frames(self) -> int:
        """Environment steps so far, of this run and of those that it resumes."""

    def stats(self) -> Mapping[str, object]:
        """Returns the counters to log."""

    def evaluate(self, progress: Shows | None = None, brief: bool = False) -> Evaluation:
        """Evaluates the current params with the greedy policy, in separate environments.

        Args:
          progress: called after each step with the number of finished episodes and of all episodes.
          brief: True to play only one episode in each environment.
        """

    def by_policy(self) -> Mapping[str, Mapping[str, float]]:
        """Returns the counters of each of several policies, for the result."""

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""


class Engine(Run, Protocol):
    """A run that trains in this process; `drive` is the loop."""

    def announce(self, stream: TextIO) -> None:
        """Prints the memory that the replay needs, or the dataset that the run learns from.

        Raises:
          ValueError: there is not enough memory.
        """

    def advance(self, periodic: PeriodicActions) -> None:
        """Trains a little: acts and learns once, or makes one call of a compiled program.

        It must not pass what is due next by more than a step of all environments.
        """

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""

    def older_template(self) -> PyTree:
        """Returns the structure that earlier versions saved, None if it is the same."""

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned."""

    def close(self) -> None:
        """Stops what the run has started, such as environment worker processes."""


def drive(engine: Engine, periodic: PeriodicActions, should_stop: Callable[[], bool]) -> None:
    """Trains until a budget is spent, a rule says stop, or ``should_stop()`` is true."""
    while not (periodic.ended_by(engine.env_frames, engine.learner.version) or should_stop()):
        engine.advance(periodic)
        periodic.tick(engine.env_frames, engine.stats)


class RunSession:
    """Logs, evaluates and saves a run while its loop trains, and makes its result.

    Attributes:
      periodic: writes logs, evaluates and saves checkpoints when they are due.
      best: saves the params with the best evaluation.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDir,
        run: Run,
        logger: Fanout,
        start: Progress,
        display: ProgressDisplay,
        allowance: Allowance | None = None,
    ) -> None:
        """Creates the session. Its clock starts when the display began.

        Args:
          experiment: the run's experiment.
          directory: the run's directory, claimed by this command.
          run: what trains.
          logger: receives the logs.
          start: the progress at which the run continues.
          display: shows evaluations and messages.
          allowance: time budget for automatic evaluations, if several runs share one; by default
            the run gets its own.
        """
        self._directory, self._run, self._display = directory, run, display
        self._listener = display.listener
        self._saving = threading.Lock()
        self._first = run.learner.version
        self._evaluated: dict[int, Evaluation] = {}  # the newest evaluation, by its frames
        self.best = BestCheckpoint(directory)
        self._videos: TrainingVideos | None = None
        if experiment.evaluator.video:
            from rlstack.programs.pictures.training_videos import TrainingVideos

            self._videos = TrainingVideos(experiment, directory, display.write_line)
        self._logger = logger
        self._allowance = allowance or allowance_of(run)
        brief = experiment.evaluator.period == "auto"
        self.periodic = PeriodicActions(
            experiment,
            logger,
            start=start,
            began=display.began,  # before the parts were made, and a loop compiled
            evaluate=self._evaluate_briefly if brief else self._evaluate,
            checkpoint=self._save,
            tell=display.write_line,
            earlier=directory.metrics,
            events=None if self._listener is None else Events(self._listener, self._position),
        )
        if self._listener is not None:
            self._listener.end = self.periodic.end

    def _position(self) -> tuple[int, int]:
        return self._run.env_frames, self._run.learner.version

    def end(self) -> None:
        """Ends training: writes the last logs and the last checkpoint."""
        self.periodic.finish(self._run.env_frames, self._run.stats())

    def save(self) -> None:
        """Saves a checkpoint now."""
        self.periodic.save(self._run.env_frames)

    def result(self) -> Result:
        """Returns the result; evaluates the last params first if needed. Call `end` before it."""
        run = self._run
        if run.env_frames not in self._evaluated:
            self._evaluate(run.env_frames)
        found = self._evaluated[run.env_frames]
        return self.periodic.result(found, run.env_frames, run.learner.version, run.by_policy())

    @contextlib.contextmanager
    def kept_on_failure(self) -> Iterator[None]:
        """Saves the inputs of an update that gave NaN; after other failures, saves the run.

        Raises:
          NonFiniteError, EnvError, EnvCrash, ExitError: the failure; its message says how to go on.
          Exception: any other failure, unchanged; the display shows how to go on.
        """
        with failed_update.saved_on_failure(self._directory, self._run.learner):
            try:
                with no_exits():
                    yield
            except NonFiniteError:
                raise
            except (EnvError, EnvCrash, ExitError) as error:
                with self._saving:
                    self.end()
                if checkpoint.latest(self._directory.checkpoints) is None:
                    raise
                raise type(error)(f"{error}{self._how_to_go_on()}") from error
            except Exception:
                if self._run.learner.version > self._first:  # else it is a mistake in the config
                    self._save_if_possible()
                raise

    def _save_if_possible(self) -> None:
        """Tries to save the run; saving may fail for the same reason as the run: a full disk."""
        with self._saving, contextlib.suppress(Exception):  # the caller raises the first failure
            self.end()
            if checkpoint.latest(self._directory.checkpoints) is not None:
                self._display.write_line(self._how_to_go_on().strip())

    def end_now(self, reason: str) -> None:
        """Saves the run while the main thread hangs in foreign code, and ends the process.

        Args:
          reason: the error message, which names what hangs.
        """
        # Never released: if the main thread comes back, it must not save as well.
        self._saving.acquire()
        with contextlib.suppress(Exception):  # a failure to save must not hide the reason
            self.end()
            if checkpoint.latest(self._directory.checkpoints) is not None:
                reason = f"{reason}{self._how_to_go_on()}"
        signals.fail(reason)

    def _how_to_go_on(self) -> str:
        return (
            f"\nThe run is saved at frame {self._run.env_frames:,}. To continue it: rlstack train "
            f"--resume {self._directory.name}"
        )

    def _save(self, frames: int) -> None:
        path = checkpoint.save(
            self._directory.checkpoints,
            frames,
            self._run.save(),
            self.periodic.progress(frames).metadata() | origin.record(self._directory),
            keep=self._run.experiment.checkpoints_kept,
            before_rename=self._directory.check_claim,
        )
        if self._listener is not None:
            self._listener("checkpoint", frames, path)

    def _evaluate(self, frames: int) -> None:
        def show(ended: int, total: int) -> None:
            self._display.write_activity(f"evaluating, {ended}/{total} episodes")

        self._display.write_activity("evaluating")
        try:
            found = self._run.evaluate(show)
            video = self._video(frames)
        finally:
            self._display.write_activity("")
        self.best.offer(frames, self._run.learner.params, found)
        self._take(frames, found, video)
        self._evaluated = {frames: found}

    def _evaluate_briefly(self, frames: int) -> None:
        """Evaluates if the time budget allows it. The run's final result never uses this one."""
        began = time.monotonic()

        def show(ended: int, total: int) -> bool:
            if time.monotonic() > began + _SHOWN:
                self._display.write_activity(f"evaluating, {ended}/{total} episodes")
            return True

        def evaluation(progress: Shows) -> Evaluation:
            found = self._run.evaluate(progress, brief=True)
            self.best.offer(frames, self._run.learner.params, found)
            return found

        try:
            found = self._allowance.evaluate(evaluation, show)
            if found is not None:
                self._take(frames, found, self._video(frames))
        finally:
            self._display.write_activity("")

    def _video(self, frames: int) -> Path | None:
        """Makes the video of an evaluation, if one is due."""
        if self._videos is None:
            return None
        return self._videos.evaluated(frames, self._run.learner.params)

    def _take(self, frames: int, found: Evaluation, video: Path | None) -> None:
        self.periodic.evaluated(frames, found)
        if video is not None:
            self._logger.write_video(frames, video)


def allowance_of(run: Run) -> Allowance:
    """Returns the time budget for automatic evaluations of a run in this process."""
    in_jax = run.experiment.env.type == "jax"
    return Allowance(_SHARE, expected=run.starting_seconds, starts_once=in_jax)
