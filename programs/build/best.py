"""The params with the best return in an evaluation of a run so far, ``checkpoints/best``."""

from __future__ import annotations

import logging
import shutil

from rlstack.acting.evaluator import Evaluation
from rlstack.programs.session import origin
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from rlstack.types import Params

_MEAN = "eval_return_mean"

_log = logging.getLogger(__name__)


class BestCheckpoint:
    """Saves the params with the best evaluation so far, over all commands of a run."""

    def __init__(self, directory: RunDir) -> None:
        """Reads the return of the best params so far."""
        self._directory = directory
        self._best = float("-inf")
        path = checkpoint.latest(directory.best)
        if path is not None:
            try:
                self._best = float(checkpoint.read_metadata(path)[_MEAN])
            except (checkpoint.CheckpointError, KeyError, TypeError, ValueError) as error:
                _log.warning("%s cannot be read, and will be replaced: %s", path, error)

    def offer(self, frames: int, params: Params, evaluation: Evaluation) -> None:
        """Saves these params if their mean return is above the best so far.

        A failure to write them is logged and does not end the run. The run ends only when its
        ordinary checkpoints cannot be written.
        """
        mean = float(evaluation.returns.mean())
        if not mean > self._best:
            return
        found = {"env_frames": frames, _MEAN: mean, "eval_episodes": len(evaluation.returns)}
        metadata = found | origin.record(self._directory)
        try:
            saved = checkpoint.save(
                self._directory.best,
                frames,
                {"learner": {"params": params}},
                metadata,
                before_rename=self._directory.check_claim,
            )
        except checkpoint.CheckpointWriteError as error:
            _log.warning("the best params so far could not be kept: %s", error)
            return
        self._best = mean
        for path in checkpoint.paths(self._directory.best):
            if path != saved:
                shutil.rmtree(path, ignore_errors=True)
