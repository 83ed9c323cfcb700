"""Trains an experiment from start to result, in a run directory; resumes and evaluates runs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp

from rlstack.agents import AGENTS
from rlstack.checks import no_exits
from rlstack.envs import watch
from rlstack.imports.deferred import on_first_use
from rlstack.programs.build import xla
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.devices import check_devices
from rlstack.programs.build.environments import check_opponents, environment_spec
from rlstack.programs.build.hooks import check_hooks
from rlstack.programs.build.replay import check_pace, check_place
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.experiment import Experiment, ProgramConfig
from rlstack.programs.config.member_config import is_fixed
from rlstack.programs.run.run_session import Engine, RunSession, drive
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session import failed_update, origin, signals
from rlstack.programs.session.callbacks import Callbacks, check_callback
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.profile import Profile, Updates, chosen_updates, summary
from rlstack.programs.session.progress import Progress, open_logs, resume_point
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_config import (
    BUDGETS,
    changed,
    moved,
    read_config,
    record_changes,
)
from rlstack.programs.session.run_dir import RunDir, fetched
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.programs.session.stopping import is_complete
from rlstack.programs.session.titles import set_title
from rlstack.references import Hook
from rlstack.storage import allocator, checkpoint
from rlstack.storage.loggers import Fanout
from rlstack.types import Logs

if TYPE_CHECKING:
    from rlstack.programs.run.evaluation import evaluate as evaluate

__getattr__ = on_first_use("rlstack.programs.run", {"evaluate": "evaluation"})

_log = logging.getLogger(__name__)


@no_exits()
def run(
    experiment: Experiment,
    run_dir: str | Path | None = None,
    *,
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Hook] = (),
    profile: str = "",
    stream: TextIO | None = None,
) -> Result:
    """Trains, evaluates, and writes everything to the run directory.

    Args:
      experiment: what to run.
      run_dir: an empty or new directory, or the URL of one in an object store, such as
        ``s3://bucket/runs/one``; by default a new directory under ``runs/``.
      callbacks: objects with methods of `rlstack.programs.session.callbacks.Callback`; this process
        calls them.
      loggers: further loggers, in addition to those of the experiment.
      profile: updates to measure, such as ``20..30``; see
        `rlstack.programs.session.profile`.
      stream: receives the progress display; standard error by default.

    Returns:
      The content of ``result.json``.

    Raises:
      ValueError: the config contradicts itself or the environment.
      rlstack.learning.learner.NonFiniteError: an update gave NaN; its inputs are saved in the run
        directory.
      rlstack.programs.session.signals.Interrupted: SIGINT or SIGTERM was received; a checkpoint is
        saved.
      rlstack.programs.run.launch.ProgramError: a node of a program failed for good.
    """
    experiment = dataclasses.replace(experiment, loggers=(*experiment.loggers, *loggers))
    for callback in callbacks:
        check_callback(callback)
    updates = chosen_updates(profile, experiment)
    with new_run(experiment, run_dir) as opened:
        return train_opened(opened, stream, callbacks, updates)


class Opened(NamedTuple):
    """A run whose directory this process has claimed."""

    experiment: Experiment
    directory: RunDir  # claimed by this process
    start_from: Path | None = None  # the checkpoint to resume from; None for a new run
    result: Result | None = None  # the final result, if the run has nothing left to train


@no_exits()
def checked(experiment: Experiment) -> Experiment:
    """Checks an experiment as far as possible without a run directory; makes its paths absolute.

    Raises:
      ValueError: the config contradicts itself, the environment or this machine.
    """
    experiment = resolved(experiment)
    _check(experiment)
    return experiment


# What few experiments need is imported in the functions below. So a run of one policy in one
# process imports, and its tracebacks show, only what it uses.


def resolved(experiment: Experiment) -> Experiment:
    """Returns the experiment with absolute paths of its dataset, opponents and policies.

    Raises:
      ValueError: one of them cannot be read, or an agent that learns offline has no dataset.
    """
    entry = AGENTS.get(type(experiment.agent))
    needs_data = entry is not None and (entry.offline or entry.recorded)
    if experiment.data or experiment.replay.demonstrations or needs_data:
        from rlstack.programs.run.offline import resolve_dataset

        experiment = resolve_dataset(experiment)
    if experiment.env.opponents.runs or experiment.env.eval_opponents.runs:
        from rlstack.programs.build import opponents

        experiment = opponents.resolved(experiment)
    if experiment.policies:
        from rlstack.programs.build.policies import members

        experiment = members.resolved(experiment)
    return experiment


def _check(experiment: Experiment) -> None:
    check_hooks(experiment)
    check_opponents(experiment)
    check_devices(experiment)
    if experiment.evaluator.video:
        from rlstack.programs.pictures.training_videos import check_videos  # few runs make any

        check_videos(experiment)
    check_pace(experiment)
    check_place(experiment)
    if experiment.program.metrics and not experiment.program.on_several_hosts:
        from rlstack.programs.session.metrics import server

        server.check(experiment.program.metrics)


@contextlib.contextmanager
def new_run(experiment: Experiment, run_dir: str | Path | None = None) -> Iterator[Opened]:
    """Makes the directory of a new run and claims it; arguments and errors are those of `run`."""
    if run_dir is not None:
        RunDir.at(run_dir).check_free()
    experiment = checked(experiment)
    created = RunDir.create(run_dir, experiment.preset, experiment.seed)
    with created.claimed() as directory:
        directory.check_new()  # another command may have had it since
        directory.write_config(to_json(experiment))
        try:
            yield Opened(experiment, directory)
        except ValueError:  # a mistake in the config: the corrected run may use this directory
            directory.clear_unused()
            raise


@no_exits()
def resume(
    run_dir: str | Path,
    *,
    frames: int | None = None,
    updates: int | None = None,
    hours: float | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    callbacks: Sequence[Any] = (),
    stream: TextIO | None = None,
    again: ProgramConfig | None = None,
) -> Result:
    """Continues a run from its newest undamaged checkpoint.

    A run that has spent a budget stays as it is. A run that a stop rule ended also stays as it is,
    unless it gets a new budget or rule; it then ends when a rule says so at a later evaluation.

    Args:
      run_dir: the directory of a run that was interrupted or has finished.
      frames: a new budget, counted from the start of the first run; unchanged by default.
      updates: a new budget of updates, counted in the same way; unchanged by default.
      hours: a new budget of training hours, counted in the same way; unchanged by default.
      changes: other options with an effect on logs, evaluations, checkpoints or the end of the
        run, by name, such as ``{"evaluator.period": 1000, "loggers": ["jsonl"]}``. The run
        directory's changes.jsonl records them, and what is learned stays the same.
      callbacks: objects that are told what happens; see `run`.
      stream: receives the progress display; standard error by default.
      again: for a command that a scheduler starts again: its hosts, ports and addresses replace
        those of the run, and a run without a checkpoint starts from the beginning.

    Raises:
      ValueError: there is no run or no checkpoint, the checkpoint does not fit the config, the
        dataset of the run or an option that must stay has changed, or another command writes to
        the directory.
    """
    budgets = {"frames": frames, "updates": updates, "hours": hours}
    given = {name: value for name, value in budgets.items() if value is not None}
    restarts = again is not None
    with earlier_run(run_dir, {**changes, **given}, may_restart=restarts, again=again) as opened:
        result = opened.result
        if result is None:
            return train_opened(opened, stream, callbacks)
        _log.warning(
            "%s has finished after %d frames, %d updates and %.2f hours (%s), and stays as it "
            "is. Give more --%s to go on.",
            opened.directory.name,
            result.env_frames,
            result.learner_steps,
            result.wall_seconds / 3600,
            result.ended_by,
            result.ended_by if result.ended_by in BUDGETS else "frames",
        )
        return result


@contextlib.contextmanager
def earlier_run(
    run_dir: str | Path,
    changes: Mapping[str, Any],
    *,
    may_restart: bool = False,
    again: ProgramConfig | None = None,
) -> Iterator[Opened]:
    """Claims the directory of a run that was interrupted or has finished.

    Args:
      run_dir: the run's directory.
      changes: new values of options, by name; see `rlstack.programs.session.run_config.changed`.
      may_restart: True to start a run without a checkpoint from the beginning; False to raise.
      again: see `resume`.

    Raises:
      ValueError: see `resume`.
    """
    with RunDir.open(run_dir).claimed() as directory:
        before = read_config(directory, several=True)
        experiment = changed(before, changes)
        if again is not None:
            experiment = moved(experiment, again)
        result = read_result(directory)
        same = not {name.partition(".")[0] for name in changes} & {*BUDGETS, "stop"}
        if result is not None and is_complete(experiment, result, same_budget=same):
            yield Opened(experiment, directory, result=result)
            return
        _check(experiment)
        start_from = resume_point(directory)
        if not may_restart:
            from rlstack.programs.build.restored import require_checkpoint

            start_from = require_checkpoint(directory, experiment, start_from)
        if start_from is not None:
            origin.check_datasets(directory, start_from)
        record_changes(directory, before, experiment, Progress.of(start_from).env_frames)
        yield Opened(experiment, directory, start_from)


def rerun(dump_dir: str | Path) -> Logs:
    """Repeats an update that gave NaN, without jit, and returns its logs.

    With ``JAX_DEBUG_NANS=True`` in the environment, JAX raises an error at the operation that gives
    the first NaN.

    Raises:
      ValueError: the directory holds no such update.
    """
    path = fetched(Path(dump_dir).parent) / Path(dump_dir).name
    RunDir(path.parent).fetch(path.name)
    failed_update.check(path)
    config = read_config(RunDir.open(path.parent), several=True)
    saved = failed_update.load(path)
    from rlstack.programs.build.policies import members

    experiment = members.of_one(config, str(saved.pop("policy", "")), path.parent)
    update = jax.tree.map(jnp.asarray, saved)
    agent = make_agent(experiment, environment_spec(experiment))
    *_, output = agent.learner_step(update["params"], update["learner_state"], update["batch"])
    return output.logs


@no_exits()
def train_opened(
    opened: Opened,
    stream: TextIO | None = None,
    callbacks: Sequence[Any] = (),
    profiled: Updates | None = None,
) -> Result:
    """Runs an experiment, from a checkpoint if one is given, in one process or in several."""
    experiment, directory, start_from, _ = opened
    if signals.is_watching():  # a notebook keeps its own title
        set_title(f"rlstack: train {directory.path}")
    start = Progress.of(start_from)
    with ProgressDisplay(
        experiment.all_frames,
        stream,
        start_frames=start.env_frames,
        shows_progress="terminal" in experiment.loggers,
    ) as display:
        if callbacks:
            display.listener = Callbacks(callbacks, display.write_line)
        run = _run_in_process
        if not experiment.in_one_process:
            from rlstack.programs.run.launch import run_program as run
        result = run(experiment, directory, start_from, display, profiled)
        if profiled is not None:
            display.write_line(summary(directory))
        if note := _why_no_update(experiment, result):
            display.write_line(note)
        return result


def _why_no_update(experiment: Experiment, result: Result) -> str:
    """Returns a warning about a run that had too few frames to learn from; "" for others."""
    learns = experiment.acts and not (experiment.policies or is_fixed(experiment.agent))
    if result.learner_steps or result.ended_by != "frames" or not learns:
        return ""
    replay = experiment.replay
    return (
        f"no update was made in {result.env_frames:,} frames: the first one needs "
        f"{replay.min_size:,} items in the replay, and a batch of {replay.batch_size:,}, of "
        f"{replay.unroll_length} steps each. Give more --frames, or lower replay.min_size, "
        "replay.batch_size or replay.unroll_length."
    )


def _run_in_process(
    experiment: Experiment,
    directory: RunDir,
    start_from: Path | None,
    display: ProgressDisplay,
    profiled: Updates | None,
) -> Result:
    """Runs an experiment in this process."""
    xla.configure_runs([experiment])
    allocator.keep_freed_memory()
    start = Progress.of(start_from)
    files = open_logs(directory, start, experiment, display.write_line)
    logger = Fanout([files, display])
    try:
        engine = _make_engine(experiment, display)
        try:
            engine.announce(display.stream)
            if start_from is not None:
                with origin.compared(directory, start_from):
                    older = engine.older_template()
                    engine.load(checkpoint.restore(start_from, engine.template(), older=older))
            profile = Profile(profiled, directory, experiment.topology)
            profile.time_engine(engine)
            with contextlib.closing(profile):
                result = _train(experiment, directory, engine, logger, display, start, profile)
        finally:
            engine.close()
    finally:
        logger.close()
    directory.write_result(result._asdict())
    return result


def _make_engine(experiment: Experiment, display: ProgressDisplay) -> Engine:
    if experiment.data:
        from rlstack.programs.run.offline import make_loop

        return make_loop(experiment, display.phase)
    if experiment.layout.is_compiled:
        from rlstack.programs.run.fused import Fused

        return Fused(experiment, display.phase)
    return SingleProcessRun(experiment, display.phase)


def _train(
    experiment: Experiment,
    directory: RunDir,
    engine: Engine,
    logger: Fanout,
    display: ProgressDisplay,
    start: Progress,
    profile: Profile,
) -> Result:
    """Trains until the budget is spent, then evaluates; saves when due and at the end."""
    session = RunSession(experiment, directory, engine, logger, start, display)
    profile.time_saving(session.best, session.periodic)
    before = engine.learner.version
    with (
        watch.at_last_resort(session.end_now),
        StopSignals(
            display.write_line, has_progress=lambda: engine.learner.version > before
        ) as stop_signals,
    ):

        def stop() -> bool:
            profile.observe(engine.learner.version)
            return stop_signals.received is not None

        with session.kept_on_failure():
            drive(engine, session.periodic, stop)
        profile.close()
        session.end()
        if stop_signals.received is not None:
            raise Interrupted(stop_signals.received)
    with watch.at_last_resort(session.end_now):
        return session.result()
