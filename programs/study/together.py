"""Several runs of the topology fused in one compiled program: their loops under ``vmap``.

Runs may differ in their seed and in numbers of the agent's config that JAX can trace: numbers that
only enter the computation, such as a learning rate, and no shapes. Each run learns what it learns
alone, up to rounding, because XLA joins other operations. Their directories are those of single
runs, so that any of them can be resumed alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlstack.checks import EnvError
from rlstack.fused.learning import Learning
from rlstack.fused.loop import NO_LIMIT, Report
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build import xla
from rlstack.programs.config.env_config import Option
from rlstack.programs.run.run_session import RunSession, allowance_of
from rlstack.programs.run.train import Opened
from rlstack.programs.session import origin
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.progress import Progress, open_logs
from rlstack.programs.session.result import Result
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.programs.study.loops import Group, Member
from rlstack.storage import allocator, checkpoint
from rlstack.storage.loggers import Fanout


def train(
    runs: Sequence[Opened], values: Mapping[str, Sequence[Option]], display: ProgressDisplay
) -> list[Result | Exception]:
    """Trains several runs to their ends.

    Args:
      runs: runs of one experiment with different seeds and values; this command must have claimed
        their directories.
      values: the value of each option in each run, for the options that are traced.
      display: shows the progress of all.

    Returns:
      The result of each run, or the error that ended it.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; checkpoints are saved.
    """
    with begun(runs, values, display) as (group, kept):
        with StopSignals(display.write_line, has_progress=lambda: group.called) as signals:
            with display.phase("compiling the loops"):
                group.call(kept)
            while any(one.active for one in kept) and signals.received is None:
                group.call(kept)
            if signals.received is not None:
                for one in kept:
                    if one.active:
                        one.session.end()
                raise Interrupted(signals.received)
        return [one.outcome() for one in kept]


@contextlib.contextmanager
def begun(
    runs: Sequence[Opened], values: Mapping[str, Sequence[Option]], display: ProgressDisplay
) -> Iterator[tuple[Group, list[VmappedRun]]]:
    """Yields the loops of runs, new or restored, and the runs with open logs; see `train`."""
    xla.configure_runs([run.experiment for run in runs])
    allocator.keep_freed_memory()
    with contextlib.ExitStack() as stack:
        with display.phase("making the runs"):
            group = Group([run.experiment for run in runs], values)
        group.members[0].announce(display.stream, len(runs))
        shown = _Shown(display)
        allowance = allowance_of(group.members[0])
        tell = functools.cache(display.write_line)  # several runs may say the same
        kept = []
        for run, member in zip(runs, group.members, strict=True):
            start = Progress.of(run.start_from)
            files = open_logs(run.directory, start, run.experiment, tell)
            logger = Fanout([files, shown.of(start.env_frames)])
            stack.callback(logger.close)
            if run.start_from is not None:
                with origin.compared(run.directory, run.start_from):
                    member.load(checkpoint.restore(run.start_from, member.template()))
            session = RunSession(
                run.experiment, run.directory, member, logger, start, display, allowance
            )
            kept.append(VmappedRun(run, member, session))
        yield group, kept


class VmappedRun:
    """One run of a vmapped group, with its logs, evaluations and checkpoints.

    Attributes:
      active: True while the run trains; False once it has stopped.
    """

    def __init__(self, run: Opened, member: Member, session: RunSession) -> None:
        self.member, self.session, self._run = member, session, run
        self._error: Exception | None = None
        self.active = not self._ended()
        if not self.active:  # it was interrupted before its last evaluation
            session.end()

    def _ended(self) -> bool:
        return bool(
            self.session.periodic.ended_by(self.member.env_frames, self.member.learner.version)
        )

    def left(self) -> tuple[int, int]:
        """Returns frames and updates until something is due."""
        experiment, member = self._run.experiment, self.member
        due = min(experiment.frames, self.session.periodic.next_due) - member.env_frames
        updates = (experiment.updates or NO_LIMIT) - member.learner.version
        return int(min(due, NO_LIMIT // 2)), updates

    @property
    def diverged(self) -> bool:
        """Whether an update with NaN has ended this run."""
        return isinstance(self._error, NonFiniteError)

    def retry(self) -> None:
        """Lets a run that an update with NaN ended continue; other runs stay as they are."""
        if self.diverged:
            self._error, self.active = None, True

    def take(self, learning: Learning, report: Report, seconds: float) -> None:
        """Records the result of a call; a failure ends this run only."""
        try:
            with self.session.kept_on_failure():
                self.member.accept(learning, report, seconds)
                self.member.log(self.session.periodic, report)
                self.session.periodic.tick(self.member.env_frames, self.member.stats)
        except (NonFiniteError, EnvError) as error:
            self._error, self.active = error, False
            return
        if self._ended():
            self.active = False
            self.session.end()

    def outcome(self) -> Result | Exception:
        """Evaluates and writes the result; returns it, or the error that ended the run."""
        if self._error is not None:
            return self._error
        result = self.session.result()
        self._run.directory.write_result(result._asdict())
        return result


class _Shown:
    """Shows the sum of the runs' frames and the means of their newest logs."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._frames: list[int] = []
        self._logs: list[dict[str, Any]] = []

    def of(self, frames: int) -> _ShownRun:
        """Returns the logger of one more run, which has made these frames."""
        self._frames.append(frames)
        self._logs.append({})
        return _ShownRun(self, len(self._frames) - 1)

    def write(self, index: int, step: int, logs: Mapping[str, Any]) -> None:
        """Stores the logs of one run, and updates the display."""
        self._frames[index] = max(self._frames[index], step)
        self._logs[index].update(logs)
        newest = [found for found in self._logs if found]
        means = {
            name: float(np.mean([found[name] for found in newest if name in found]))
            for name in logs
        }
        self._display.write(sum(self._frames), means)


class _ShownRun:
    def __init__(self, shown: _Shown, index: int) -> None:
        self._shown, self._index = shown, index

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        self._shown.write(self._index, step, logs)

    def close(self) -> None:
        """The display is closed by whoever made it."""
