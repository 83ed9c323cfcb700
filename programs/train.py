"""`run`: an experiment from start to result, in a run directory of its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from programs import xla
from programs.display import ProgressDisplay
from programs.experiment import Experiment, from_json, to_json
from programs.run_dir import RunDir, git_commit
from rlstack import checkpoint
from rlstack.loggers import Fanout, JsonlLogger, TensorBoardLogger

if TYPE_CHECKING:
    from programs.session import Result, Session
    from programs.single_process import SingleProcess


def run(
    experiment: Experiment,
    run_dir: str | Path | None = None,
    *,
    stream: TextIO | None = None,
) -> Result:
    """Trains, evaluates, and files everything under the run directory.

    Args:
      experiment: what to run.
      run_dir: an empty or new directory; by default a fresh one under ``runs/``.
      stream: where progress is shown; standard error by default.

    Returns:
      What ``result.json`` holds.

    Raises:
      ValueError: the config contradicts itself or the environment.
      rlstack.learner.NonFiniteError: an update gave NaN; the run directory holds a dump of it.
      programs.session.Interrupted: SIGINT or SIGTERM came; everything is saved.
    """
    directory = RunDir.create(run_dir, experiment.preset, experiment.seed)
    directory.write_config(to_json(experiment))
    return _run(experiment, directory, None, stream)


def resume(
    run_dir: str | Path, *, frames: int | None = None, stream: TextIO | None = None
) -> Result:
    """Goes on with a run from its newest checkpoint.

    Args:
      run_dir: of a run that was interrupted, or ended.
      frames: a new budget, in frames since the run's very start; the old one by default.
      stream: where progress is shown; standard error by default.

    Raises:
      ValueError: there is no run or no checkpoint, or it does not fit the config.
    """
    directory = RunDir.open(run_dir)
    experiment = from_json(directory.config.read_text(), directory.config)
    if frames is not None:
        experiment = dataclasses.replace(experiment, frames=frames)
    path = checkpoint.latest(directory.checkpoints)
    if path is None:
        raise ValueError(
            f"resume: {directory.path} has no checkpoint to go on from. Start the run again with "
            f"rlstack train {experiment.preset}."
        )
    return _run(experiment, directory, path, stream)


def _run(
    experiment: Experiment, directory: RunDir, restored: Path | None, stream: TextIO | None
) -> Result:
    if experiment.network.torso == "mlp":
        xla.prefer_small_networks()
    # Imported here: the flags above count only before JAX computes for the first time.
    from programs.session import Interrupted, Session, Signals
    from programs.single_process import SingleProcess
    from rlstack.learner import NonFiniteError

    display = ProgressDisplay(experiment.frames, stream or sys.stderr)
    program = SingleProcess(experiment)
    logger = Fanout(
        [JsonlLogger(directory.metrics), TensorBoardLogger(directory.tensorboard), display]
    )
    try:
        with Signals() as signals:
            if restored is not None:
                program.load(checkpoint.restore(restored, program.save()))

            def save(frames: int) -> None:
                metadata = {"config": to_json(experiment), "env_frames": frames}
                checkpoint.save(directory.checkpoints, frames, program.save(), metadata)

            session = Session(
                experiment,
                logger,
                start_frames=program.env_frames,
                evaluate=program.evaluate,
                checkpoint=save,
            )
            try:
                program.train(session, lambda: signals.received is not None)
            except NonFiniteError as error:
                path = directory.dump(program.learner.version + 1)
                checkpoint.save(path, 0, {**error.before, "batch": error.batch}, {})
                raise NonFiniteError(
                    f"{error} To run that update again: rlstack rerun {path}",
                    error.before,
                    error.batch,
                ) from error
            session.finish(program.env_frames, program.stats())
            if signals.received is not None:
                raise Interrupted(signals.received)
            result = _result(experiment, program, session)
            directory.write_result(result._asdict())
        return result
    finally:
        program.close()
        logger.close()


def _result(experiment: Experiment, program: SingleProcess, session: Session) -> Result:
    from programs.session import Result

    seconds = session.seconds
    evaluation = program.evaluate()
    return Result(
        eval_return_mean=float(evaluation.returns.mean()),
        eval_return_std=float(evaluation.returns.std()),
        eval_episodes=len(evaluation.returns),
        env_frames=program.env_frames,
        learner_steps=program.learner.version,
        wall_seconds=seconds,
        frames_per_second=session.frames_here(program.env_frames) / seconds,
        seed=experiment.seed,
        topology=experiment.topology,
        preset=experiment.preset,
        git_commit=git_commit(),
    )
