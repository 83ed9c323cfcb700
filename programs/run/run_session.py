"""What a run in this process leaves behind: logs, evaluations, checkpoints, the result.

`Run` and `Loop` say what a run must have for this.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from rlstack.acting.evaluator import Evaluation
from rlstack.checks import EnvCrash, EnvError, ExitError, no_exits
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build.best import BestCheckpoint
from rlstack.programs.build.evaluation import Allowance, Shows
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.pictures.training_videos import TrainingVideos
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

_SHARE = 0.02  # the largest share of the time for automatic evaluations: training waits for them
_SHOWN = 2.0  # seconds until such an evaluation is shown


class Learning(Protocol):
    """What a run has learned."""

    @property
    def version(self) -> int:
        """The number of updates, of this run and of those that it resumes."""

    @property
    def params(self) -> Params:
        """The newest params; with several policies a dict of those of each."""


class Run(Protocol):
    """A run in this process, as `RunSession` sees it.

    Attributes:
      experiment: what runs.
      starting_seconds: that the processes of environments took to start; 0 if there are none.
    """

    experiment: Experiment
    starting_seconds: float

    @property
    def learner(self) -> Learning:
        """What the run has learned."""

    @property
    def env_frames(self) -> int:
        """Environment steps so far, of this run and of those that it resumes."""

    def stats(self) -> Mapping[str, object]:
        """Returns the counters to log."""

    def evaluate(self, progress: Shows | None = None, brief: bool = False) -> Evaluation:
        """Evaluates the current params with the greedy policy, in separate environments.

        Args:
          progress: called after each step with the number of episodes that ended, and of all.
          brief: whether each environment plays one episode only.
        """

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""


class Loop(Run, Protocol):
    """A run that trains by itself; see `rlstack.programs.run.train`."""

    def announce(self, stream: TextIO) -> None:
        """Prints what the run needs or learns from.

        Raises:
          ValueError: there is not enough memory.
        """

    def train(self, periodic: PeriodicActions, stop: Callable[[], bool]) -> None:
        """Trains until a budget is spent, a rule says stop, or ``stop()`` is true."""

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned."""

    def close(self) -> None:
        """Ends what the run has started, such as processes of environments."""


class RunSession:
    """What a run leaves behind while its loop trains: logs, evaluations, checkpoints, the result.

    Attributes:
      periodic: writes, evaluates and saves what is due.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDir,
        loop: Run,
        logger: Fanout,
        start: Progress,
        display: ProgressDisplay,
        allowance: Allowance | None = None,
    ) -> None:
        """Counts seconds from when the display began.

        Args:
          experiment: what runs.
          directory: of the run, to write to.
          loop: what trains.
          logger: the sink of the logs.
          start: where the run continues.
          display: shows evaluations and messages.
          allowance: for automatic evaluations, if runs share one.
        """
        self._directory, self._loop, self._display = directory, loop, display
        self._listener = display.listener
        self._saving = threading.Lock()
        self._first = loop.learner.version
        self._evaluated: dict[int, Evaluation] = {}  # the newest evaluation, by its frames
        self._best = BestCheckpoint(directory)
        self._videos = TrainingVideos(experiment, directory, display.write_line)
        self._logger = logger
        self._allowance = allowance or allowance_of(loop)
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
        return self._loop.env_frames, self._loop.learner.version

    def end(self) -> None:
        """Ends training: writes the last logs and the last checkpoint."""
        self.periodic.finish(self._loop.env_frames, self._loop.stats())

    def save(self) -> None:
        """Saves a checkpoint now."""
        self.periodic.save(self._loop.env_frames)

    def result(self) -> Result:
        """Evaluates, unless these params were evaluated when it was due; call it after `end`."""
        loop = self._loop
        if loop.env_frames not in self._evaluated:
            self._evaluate(loop.env_frames)
        found = self._evaluated[loop.env_frames]
        several: dict[str, Any] = getattr(
            loop, "by_policy", dict
        )()  # of a loop of several policies
        return self.periodic.result(found, loop.env_frames, loop.learner.version, several)

    @contextlib.contextmanager
    def kept_on_failure(self) -> Iterator[None]:
        """Saves the inputs of an update that gave NaN, and the run after every other failure.

        Raises:
          NonFiniteError, EnvError, EnvCrash, ExitError: the failure; its message says how to go on.
          Exception: any other failure, as it is; a line that is shown says how to go on.
        """
        with failed_update.saved_on_failure(self._directory, self._loop.learner):
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
                if self._loop.learner.version > self._first:  # else it is a mistake in the config
                    self._save_if_possible()
                raise

    def _save_if_possible(self) -> None:
        """Saves after a failure that may be of the run itself, such as a full disk."""
        with self._saving, contextlib.suppress(Exception):  # the failure counts, which is raised
            self.end()
            if checkpoint.latest(self._directory.checkpoints) is not None:
                self._display.write_line(self._how_to_go_on().strip())

    def end_now(self, reason: str) -> None:
        """Saves while the main thread hangs in code of others, and ends the process.

        Args:
          reason: names what hangs.
        """
        self._saving.acquire()  # and keeps it: if the main thread comes back, it must not save too
        with contextlib.suppress(Exception):  # the reason counts
            self.end()
            if checkpoint.latest(self._directory.checkpoints) is not None:
                reason = f"{reason}{self._how_to_go_on()}"
        signals.fail(reason)

    def _how_to_go_on(self) -> str:
        return (
            f"\nThe run is saved at frame {self._loop.env_frames:,}. To continue it: rlstack train "
            f"--resume {self._directory.path}"
        )

    def _save(self, frames: int) -> None:
        path = checkpoint.save(
            self._directory.checkpoints,
            frames,
            self._loop.save(),
            self.periodic.progress(frames).metadata() | origin.record(self._directory),
            before_rename=self._directory.check_claim,
        )
        if self._listener is not None:
            self._listener("checkpoint", frames, path)

    def _evaluate(self, frames: int) -> None:
        def show(ended: int, total: int) -> None:
            self._display.write_activity(f"evaluating, {ended}/{total} episodes")

        self._display.write_activity("evaluating")
        try:
            found = self._loop.evaluate(show)
            video = self._videos.evaluated(frames, self._loop.learner.params)
        finally:
            self._display.write_activity("")
        self._best.offer(frames, self._loop.learner.params, found)
        self._take(frames, found, video)
        self._evaluated = {frames: found}

    def _evaluate_briefly(self, frames: int) -> None:
        """Evaluates if the allowance suffices; the result of the run is not from here."""
        began = time.monotonic()

        def show(ended: int, total: int) -> bool:
            if time.monotonic() > began + _SHOWN:
                self._display.write_activity(f"evaluating, {ended}/{total} episodes")
            return True

        def evaluation(progress: Shows) -> Evaluation:
            found = self._loop.evaluate(progress, brief=True)
            self._best.offer(frames, self._loop.learner.params, found)
            return found

        try:
            found = self._allowance.evaluate(evaluation, show)
            if found is not None:
                self._take(frames, found, self._videos.evaluated(frames, self._loop.learner.params))
        finally:
            self._display.write_activity("")

    def _take(self, frames: int, found: Evaluation, video: Path | None) -> None:
        self.periodic.evaluated(frames, found)
        if video is not None:
            self._logger.write_video(frames, video)


def allowance_of(loop: Run) -> Allowance:
    """Returns the time that evaluations of a run in this process may take."""
    in_jax = loop.experiment.env.type == "jax"
    return Allowance(_SHARE, expected=loop.starting_seconds, starts_once=in_jax)
