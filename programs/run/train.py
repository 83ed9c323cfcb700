"""Trains an experiment from start to result, in a run directory; resumes and evaluates runs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from setproctitle import setproctitle

from programs.components import opponents, xla
from programs.components.agent import make_agent
from programs.components.best import BestCheckpoint
from programs.components.environments import check_opponents, make_evaluation_env
from programs.components.hooks import check_hooks
from programs.components.restored import (
    read_config,
    require_checkpoint,
)
from programs.env_config import OpponentsConfig
from programs.experiment import Experiment, to_json
from programs.run.evaluation import evaluate as evaluate
from programs.run.fused import Fused
from programs.run.launch import run_program
from programs.run.offline import Offline, resolve_dataset
from programs.run.single_process import SingleProcess
from programs.tracking import failed_update, signals
from programs.tracking.display import ProgressDisplay
from programs.tracking.endings import BUDGETS, is_complete
from programs.tracking.periodic import PeriodicActions
from programs.tracking.progress import Progress, open_logs, resume_point
from programs.tracking.result import Result, read_result
from programs.tracking.run_dir import RunDir
from programs.tracking.signals import Interrupted, StopSignals
from rlstack.acting.evaluator import Evaluation
from rlstack.checks import EnvCrash, EnvError
from rlstack.storage import checkpoint
from rlstack.storage.loggers import Fanout
from rlstack.types import Logs

_log = logging.getLogger(__name__)

Loop = SingleProcess | Offline | Fused


def run(
    experiment: Experiment, run_dir: str | Path | None = None, *, stream: TextIO | None = None
) -> Result:
    """Trains, evaluates, and writes everything to the run directory.

    Args:
      experiment: what to run.
      run_dir: an empty or new directory; by default a new one under ``runs/``.
      stream: receives the progress display; standard error by default.

    Returns:
      The content of ``result.json``.

    Raises:
      ValueError: the config contradicts itself or the environment.
      rlstack.learning.learner.NonFiniteError: an update gave NaN; its inputs are saved in the run
        directory.
      programs.tracking.signals.Interrupted: SIGINT or SIGTERM was received; a checkpoint is saved.
      programs.run.launch.ProgramError: a node of a program failed for good.
    """
    experiment = opponents.resolved(resolve_dataset(experiment))
    check_hooks(experiment)
    check_opponents(experiment)
    created = RunDir.create(run_dir, experiment.preset, experiment.seed)
    with created.claimed() as directory:
        directory.check_new()  # another command may have had it since
        directory.write_config(to_json(experiment))
        return _run(experiment, directory, None, stream)


def resume(
    run_dir: str | Path,
    *,
    frames: int | None = None,
    updates: int | None = None,
    hours: float | None = None,
    stream: TextIO | None = None,
) -> Result:
    """Continues a run from its newest undamaged checkpoint.

    A run that has spent a budget is left as it is. So is one that a stop rule ended, unless it gets
    a new budget; it then ends when a rule says so at a later evaluation.

    Args:
      run_dir: the directory of a run that was interrupted or has finished.
      frames: a new budget, counted from the start of the first run; unchanged by default.
      updates: likewise.
      hours: likewise.
      stream: receives the progress display; standard error by default.

    Raises:
      ValueError: there is no run or no checkpoint, the checkpoint does not fit the config, or
        another command writes to the directory.
    """
    with RunDir.open(run_dir).claimed() as directory:
        experiment = read_config(directory)
        given: dict[str, Any] = {"frames": frames, "updates": updates, "hours": hours}
        given = {name: value for name, value in given.items() if value is not None}
        experiment = dataclasses.replace(experiment, **given)
        result = read_result(directory)
        if result is not None and is_complete(experiment, result, same_budget=not given):
            _log.warning(
                "%s has finished after %d frames, %d updates and %.2f hours (%s), and stays as it "
                "is. Give more --%s to go on.",
                directory.path,
                result.env_frames,
                result.learner_steps,
                result.wall_seconds / 3600,
                result.ended_by,
                result.ended_by if result.ended_by in BUDGETS else "frames",
            )
            return result
        check_hooks(experiment)
        check_opponents(experiment)
        start_from = require_checkpoint(directory, experiment, resume_point(directory))
        if given:
            directory.write_config(to_json(experiment))
        return _run(experiment, directory, start_from, stream)


def rerun(dump_dir: str | Path) -> Logs:
    """Repeats an update that gave NaN, without jit, and returns its logs.

    With ``JAX_DEBUG_NANS=True`` in the environment it stops at the operation that gives the first
    NaN.
    """
    path = Path(dump_dir)
    experiment = read_config(RunDir.open(path.parent))
    update = jax.tree.map(jnp.asarray, failed_update.load(path))
    env_cfg = dataclasses.replace(experiment.env, eval_opponents=OpponentsConfig())
    with make_evaluation_env(dataclasses.replace(experiment, env=env_cfg)) as env:
        agent = make_agent(experiment, env.spec)
    *_, output = agent.learner_step(update["params"], update["learner_state"], update["batch"])
    return output.logs


def _run(
    experiment: Experiment, directory: RunDir, start_from: Path | None, stream: TextIO | None
) -> Result:
    """Runs an experiment, from a checkpoint if one is given, in one process or in several."""
    if signals.is_watching():  # a notebook keeps its own title
        setproctitle(f"rlstack: train {directory.path}")
    start = Progress.of(start_from)
    with ProgressDisplay(
        experiment.frames,
        stream,
        start_frames=start.env_frames,
        shows_progress="terminal" in experiment.loggers,
    ) as display:
        if experiment.in_one_process:
            return _run_in_process(experiment, directory, start_from, display)
        return run_program(experiment, directory, start_from, display)


def _run_in_process(
    experiment: Experiment, directory: RunDir, start_from: Path | None, display: ProgressDisplay
) -> Result:
    """Runs an experiment in this process."""
    xla.configure(convolutions=not experiment.older_runtime)
    start = Progress.of(start_from)
    files = open_logs(directory, start, experiment.loggers, display.write_line)
    logger = Fanout([files, display])
    try:
        loop = _make_loop(experiment, display)
        try:
            loop.announce(display.stream)
            if start_from is not None:
                loop.load(checkpoint.restore(start_from, loop.template()))
            result = _train(experiment, directory, loop, logger, display, start)
        finally:
            loop.close()
    finally:
        logger.close()
    directory.write_result(result._asdict())
    return result


def _make_loop(experiment: Experiment, display: ProgressDisplay) -> Loop:
    if experiment.data:
        return Offline(experiment)
    if experiment.topology == "fused":
        return Fused(experiment, display.phase)
    return SingleProcess(experiment, display.phase)


def _train(
    experiment: Experiment,
    directory: RunDir,
    loop: Loop,
    logger: Fanout,
    display: ProgressDisplay,
    start: Progress,
) -> Result:
    """Trains until the budget is spent, then evaluates; saves when due and at the end."""

    def save(frames: int) -> None:
        checkpoint.save(
            directory.checkpoints,
            frames,
            loop.save(),
            periodic.progress(frames).metadata(),
            before_rename=directory.check_claim,
        )

    def evaluation() -> Evaluation:
        def show(ended: int, total: int) -> None:
            display.write_activity(f"evaluating, {ended}/{total} episodes")

        display.write_activity("evaluating")
        try:
            return loop.evaluate(show)
        finally:
            display.write_activity("")

    def evaluate(frames: int) -> None:
        found = evaluation()
        best.offer(frames, loop.learner.params, found)
        periodic.judged(frames, found)
        judged.clear()
        judged[frames] = found

    judged: dict[int, Evaluation] = {}  # the newest evaluation, by its frames
    best = BestCheckpoint(directory)
    periodic = PeriodicActions(
        experiment,
        logger,
        start=start,
        evaluate=evaluate,
        checkpoint=save,
        tell=display.write_line,
        earlier=directory.metrics,
    )
    before = loop.learner.version
    with StopSignals(has_progress=lambda: loop.learner.version > before) as stop_signals:
        with (
            failed_update.saved_on_failure(directory, loop.learner),
            _saved_before_env_errors(directory, loop, periodic),
        ):
            loop.train(periodic, stop=lambda: stop_signals.received is not None)
        periodic.finish(loop.env_frames, loop.stats())
        if stop_signals.received is not None:
            raise Interrupted(stop_signals.received)
    if loop.env_frames not in judged:  # these params may have been evaluated when it was due
        evaluate(loop.env_frames)
    return periodic.result(judged[loop.env_frames], loop.env_frames, loop.learner.version)


@contextlib.contextmanager
def _saved_before_env_errors(
    directory: RunDir, loop: Loop, periodic: PeriodicActions
) -> Iterator[None]:
    """Writes the last logs and a checkpoint if an environment fails during training.

    Raises:
      EnvError, EnvCrash: the environment's error, which then says that the run can be resumed.
    """
    try:
        yield
    except (EnvError, EnvCrash) as error:
        periodic.finish(loop.env_frames, loop.stats())
        if checkpoint.latest(directory.checkpoints) is None:
            raise
        raise type(error)(
            f"{error}\nThe run is saved at frame {loop.env_frames:,}. To continue it: "
            f"rlstack train --resume {directory.path}"
        ) from error
