"""An experiment from start to result, in a run directory of its own."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp

from programs.build import opponents, xla
from programs.build.components import announce_replay, make_agent, make_evaluator
from programs.build.environments import make_evaluation_env
from programs.build.restored import newest_checkpoint, read_config, read_params
from programs.experiment import Experiment, OpponentsConfig, to_json
from programs.run.offline import Offline, resolved
from programs.run.single_process import SingleProcess
from programs.tracking import failed_update
from programs.tracking.display import ProgressDisplay
from programs.tracking.periodic import PeriodicActions
from programs.tracking.result import Result
from programs.tracking.run_dir import RunDir
from programs.tracking.signals import Interrupted, StopSignals
from rlstack.acting.evaluator import Evaluation, as_logs
from rlstack.storage import checkpoint
from rlstack.storage.loggers import Fanout, JsonlLogger, TensorBoardLogger
from rlstack.types import Logs


def run(
    experiment: Experiment, run_dir: str | Path | None = None, *, stream: TextIO | None = None
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
      rlstack.learning.learner.NonFiniteError: an update gave NaN; the run directory has a
        dump of it.
      programs.tracking.signals.Interrupted: SIGINT or SIGTERM came; everything is saved.
    """
    experiment = opponents.resolved(resolved(experiment))
    opponents.check(experiment)
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
    experiment = read_config(directory)
    if frames is not None:
        experiment = dataclasses.replace(experiment, frames=frames)
        directory.write_config(to_json(experiment))
    opponents.check(experiment)
    return _run(experiment, directory, newest_checkpoint(directory, experiment), stream)


def evaluate(
    run_dir: str | Path,
    episodes: int | None = None,
    seed: int | None = None,
    against: Sequence[str | Path] = (),
) -> Evaluation:
    """Judges the newest params of a run with the greedy policy.

    Args:
      run_dir: of a run with a checkpoint.
      episodes: whole episodes to play; as many as at the end of training by default.
      seed: of the evaluation's environments; the run's own by default.
      against: runs, or checkpoints of runs, that play the other places of games of several agents;
        those of the run's own evaluation by default, and as greedy as these in any case.

    Raises:
      ValueError: there is no run or no checkpoint, or opponents do not fit.
    """
    directory = RunDir.open(run_dir)
    experiment = read_config(directory)
    evaluator = experiment.evaluator
    if episodes is not None:
        # Every environment plays the same number of episodes.
        num_envs = math.gcd(episodes, evaluator.num_envs)
        evaluator = dataclasses.replace(evaluator, episodes=episodes, num_envs=num_envs)
    seed = experiment.seed if seed is None else seed
    env = experiment.env
    if against:
        met = dataclasses.replace(env.eval_opponents, runs=tuple(map(str, against)), share=1.0)
        env = dataclasses.replace(env, eval_opponents=met)
    env = dataclasses.replace(env, opponents=OpponentsConfig())  # training's may be gone
    experiment = dataclasses.replace(experiment, env=env, evaluator=evaluator, seed=seed)
    opponents.check(experiment)
    with make_evaluation_env(experiment) as env:
        params = read_params(newest_checkpoint(directory, experiment), experiment, env.spec)
        return make_evaluator(experiment, env.spec).evaluate(params, env)


def rerun(dump_dir: str | Path) -> Logs:
    """Makes the update of a dump again, un-jitted, and returns its logs.

    Under ``JAX_DEBUG_NANS=True`` it stops at the operation that gave the first NaN.
    """
    path = Path(dump_dir)
    experiment = read_config(RunDir.open(path.parent))
    update = jax.tree.map(jnp.asarray, failed_update.load(path))
    alone = dataclasses.replace(experiment.env, eval_opponents=OpponentsConfig())
    with make_evaluation_env(dataclasses.replace(experiment, env=alone)) as env:
        agent = make_agent(experiment, env.spec)
    *_, output = agent.learner_step(update["params"], update["learner_state"], update["batch"])
    return output.logs


def _run(
    experiment: Experiment, directory: RunDir, restored: Path | None, stream: TextIO | None
) -> Result:
    if experiment.topology != "single_process":
        from programs.run.launch import run_program  # Launchpad is not for single processes

        return run_program(experiment, directory, restored, stream)
    xla.configure(convolutions=not experiment.older_runtime)
    start_frames = checkpoint.read_metadata(restored)["env_frames"] if restored else 0
    display = ProgressDisplay(experiment.frames, stream or sys.stderr, start_frames=start_frames)
    logger = Fanout(
        [JsonlLogger(directory.metrics), TensorBoardLogger(directory.tensorboard), display]
    )
    try:
        program = _make_program(experiment, stream or sys.stderr)
        try:
            if restored is not None:
                program.load(checkpoint.restore(restored, program.template()))
            result = _train(experiment, directory, program, logger)
        finally:
            program.close()
    finally:
        logger.close()
    directory.write_result(result._asdict())
    return result


def _make_program(experiment: Experiment, stream: TextIO) -> SingleProcess | Offline:
    """Makes the program and says how large what it learns from is."""
    if experiment.data:
        offline = Offline(experiment)
        print(offline.describe(), file=stream, flush=True)
        return offline
    program = SingleProcess(experiment)
    try:
        announce_replay(experiment, program.step_spec, stream)
    except BaseException:
        program.close()
        raise
    return program


def _train(
    experiment: Experiment, directory: RunDir, program: SingleProcess | Offline, logger: Fanout
) -> Result:
    def save(frames: int) -> None:
        checkpoint.save(directory.checkpoints, frames, program.save(), {"env_frames": frames})

    def judge(frames: int) -> None:
        logger.write(frames, as_logs(program.evaluate()))

    periodic = PeriodicActions(
        experiment,
        logger,
        start_frames=program.env_frames,
        evaluate=judge,
        checkpoint=save,
    )
    with StopSignals() as signals:
        with failed_update.saved_on_failure(directory, program.learner):
            program.train(periodic, stop=lambda: signals.received is not None)
        periodic.finish(program.env_frames, program.stats())
        if signals.received is not None:
            raise Interrupted(signals.received)
    evaluation = program.evaluate()
    return periodic.result(evaluation, program.env_frames, program.learner.version)
