"""The progress of a run, from its checkpoints; and the logs that continue from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session import origin
from rlstack.programs.session.own_loggers import own_loggers
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.stopping import LearningRates
from rlstack.storage import checkpoint, checkpoint_files, jsonl
from rlstack.storage.loggers import Fanout, JsonlLogger, Logger, TensorBoardLogger

# The entry of a checkpoint's metadata that names the replay service's checkpoint. With several
# policies each has its own, "replay/POLICY".
REPLAY = "replay"

_log = logging.getLogger(__name__)


class Progress(NamedTuple):
    """The frames and episodes of a run so far, over all of its commands, and their time."""

    env_frames: int = 0
    # Each command's seconds begin when it makes and compiles its parts. The last evaluation does
    # not count, nor the time after the last checkpoint of a command that was killed.
    train_seconds: float = 0.0
    timed_frames: int = 0  # the frames that train_seconds covers
    episodes: int = 0  # finished by learning policies, up to the last report of each node

    @classmethod
    def of(cls, path: Path | None) -> Progress:
        """Returns the progress at a checkpoint, or at the start of a run for None.

        Checkpoints of earlier versions do not tell the time and the episodes, which then count
        from here.
        """
        if path is None:
            return cls()
        metadata = checkpoint.read_metadata(path)
        frames = int(metadata["env_frames"])
        timed = int(metadata.get("timed_frames", 0))
        episodes = int(metadata.get("episodes", 0))
        return cls(frames, float(metadata.get("train_seconds", 0.0)), timed, episodes)

    def metadata(self) -> dict[str, Any]:
        """Returns what a checkpoint says of it."""
        return self._asdict()


def resume_point(directory: RunDir) -> Path | None:
    """Returns the newest checkpoint of a run that is whole, or None if there are none.

    If this command may write to the directory, damaged checkpoints are logged and moved away: the
    resumed run makes their frames again, and its new checkpoints must be the newest ones.

    Raises:
      DamagedError: all checkpoints are damaged.
      CheckpointError: the checkpoint is that of another run.
    """

    def check_replay(path: Path) -> None:
        for entry, saved in checkpoint.read_metadata(path).items():
            service, _, policy = entry.partition("/")
            if service != REPLAY or not saved:
                continue
            try:
                checkpoint_files.check(directory.replay / policy / saved["name"], saved["files"])
            except checkpoint.DamagedError as error:
                raise checkpoint.DamagedError(
                    f"checkpoint: the replay of {path} is damaged: {error}"
                ) from error

    found = checkpoint.newest_intact(directory.checkpoints, also=check_replay)
    if found is not None:
        origin.check(directory, found)
    if found is not None and directory.claim is not None:
        paths = checkpoint.paths(directory.checkpoints)
        for damaged in paths[: paths.index(found)]:
            directory.check_claim()
            _log.warning("%s is kept as %s.", damaged, checkpoint.set_aside(damaged).name)
    return found


def open_logs(
    directory: RunDir,
    start: Progress,
    experiment: Experiment,
    tell: Callable[[str], None] = _log.warning,
    nodes: Callable[[], Mapping[str, Any]] = dict,
) -> Fanout:
    """Opens the loggers of a run that write files, and the user's own, to continue at ``start``.

    The last logger warns of learning rates that reach 0 before the run ends.

    A killed run has logged frames after its last checkpoint. The resumed run makes these frames
    again, so their lines are moved to another file: every reader of metrics.jsonl sees each frame
    once. TensorBoard hides its own repeated entries.

    Args:
      directory: the run's directory.
      start: the progress at which the logs continue.
      experiment: the run's experiment, which names the loggers.
      tell: shows the user a line.
      nodes: returns each `rlstack.programs.session.metrics.figures.Node` of the program.

    Raises:
      OSError: a file cannot be written.
      ValueError: nothing can listen at the address of the metrics.
    """
    loggers = experiment.loggers
    frames, again = start.env_frames, directory.metrics.exists()
    moved = jsonl.move_lines(
        directory.metrics,
        directory.abandoned_metrics,
        lambda line: jsonl.numbers(line).get(jsonl.FRAMES, 0) > frames,
    )
    if moved:
        _log.warning(
            "%d lines of metrics after frame %d, the last checkpoint, are now in %s.",
            moved,
            frames,
            directory.abandoned_metrics,
        )
    opened: list[Logger] = []
    if experiment.program.metrics:
        from rlstack.programs.session.metrics.server import MetricsServer  # few runs need it

        opened.append(MetricsServer(experiment, directory.path, frames, nodes))
    if "jsonl" in loggers:
        opened.append(JsonlLogger(directory.metrics, before_write=directory.check_claim))
    if "tensorboard" in loggers:
        opened.append(TensorBoardLogger(directory.tensorboard, after=frames if again else None))
    rates = LearningRates(
        experiment,
        tell,
        start_frames=frames,
        start_seconds=start.train_seconds,
        earlier=directory.metrics,
    )
    return Fanout([*opened, *own_loggers(loggers, directory.path, tell), rates])
