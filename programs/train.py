"""An experiment from start to result, in a run directory of its own."""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp

from programs import xla
from programs.components import (
    announce_replay,
    make_agent,
    make_evaluation_env,
    make_evaluator,
)
from programs.display import ProgressDisplay
from programs.dumps import with_dump
from programs.experiment import Experiment, from_json, to_json
from programs.run_dir import RunDir
from programs.session import Interrupted, Result, Session, Signals
from programs.single_process import SingleProcess
from rlstack import checkpoint
from rlstack.evaluator import Evaluation
from rlstack.loggers import Fanout, JsonlLogger, TensorBoardLogger
from rlstack.types import EnvSpec, Logs, Params


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
    experiment = _config(directory)
    if frames is not None:
        experiment = dataclasses.replace(experiment, frames=frames)
        directory.write_config(to_json(experiment))
    return _run(experiment, directory, _newest(directory, experiment), stream)


def evaluate(
    run_dir: str | Path, episodes: int | None = None, seed: int | None = None
) -> Evaluation:
    """Judges the newest params of a run with the greedy policy.

    Args:
      run_dir: of a run with a checkpoint.
      episodes: whole episodes to play; as many as at the end of training by default.
      seed: of the evaluation's environments; the run's own by default.
    """
    directory = RunDir.open(run_dir)
    experiment = _config(directory)
    evaluator = experiment.evaluator
    if episodes is not None:
        # Every environment plays the same number of episodes.
        num_envs = math.gcd(episodes, evaluator.num_envs)
        evaluator = dataclasses.replace(evaluator, episodes=episodes, num_envs=num_envs)
    seed = experiment.seed if seed is None else seed
    experiment = dataclasses.replace(experiment, evaluator=evaluator, seed=seed)
    with make_evaluation_env(experiment) as env:
        params = _restored_params(_newest(directory, experiment), experiment, env.spec)
        return make_evaluator(experiment, env.spec).evaluate(params, env)


def rerun(dump_dir: str | Path) -> Logs:
    """Makes the update of a dump again, un-jitted, and returns its logs.

    Under ``JAX_DEBUG_NANS=True`` it stops at the operation that gave the first NaN.
    """
    path = Path(dump_dir)
    experiment = _config(RunDir.open(path.parent))
    with open(path / "update.pkl", "rb") as file:
        dump = jax.tree.map(jnp.asarray, pickle.load(file))
    program = SingleProcess(experiment)
    try:
        agent = make_agent(experiment, program.env.spec)
        *_, output = agent.learner_step(dump["params"], dump["learner_state"], dump["batch"])
        return output.logs
    finally:
        program.close()


def _run(
    experiment: Experiment, directory: RunDir, restored: Path | None, stream: TextIO | None
) -> Result:
    if experiment.topology != "single_process":
        from programs.launch import run_program  # Launchpad is not for single processes

        return run_program(experiment, directory, restored, stream)
    xla.configure(convolutions=experiment.may_convolve)
    start_frames = checkpoint.read_metadata(restored)["env_frames"] if restored else 0
    display = ProgressDisplay(experiment.frames, stream or sys.stderr, start_frames=start_frames)
    logger = Fanout(
        [JsonlLogger(directory.metrics), TensorBoardLogger(directory.tensorboard), display]
    )
    try:
        program = SingleProcess(experiment)
        try:
            announce_replay(experiment, program.step_spec, stream or sys.stderr)
            if restored is not None:
                program.load(checkpoint.restore(restored, program.template()))
            result = _train(experiment, directory, program, logger)
        finally:
            program.close()
    finally:
        logger.close()
    directory.write_result(result._asdict())
    return result


def _train(
    experiment: Experiment, directory: RunDir, program: SingleProcess, logger: Fanout
) -> Result:
    def save(frames: int) -> None:
        checkpoint.save(directory.checkpoints, frames, program.save(), {"env_frames": frames})

    def judge(frames: int) -> None:
        logger.write(frames, {"evaluator/episode_return": program.evaluate().returns.mean()})

    session = Session(
        experiment,
        logger,
        start_frames=program.env_frames,
        evaluate=judge,
        checkpoint=save,
    )
    with Signals() as signals:
        with with_dump(directory, program.learner):
            program.train(session, stop=lambda: signals.received is not None)
        seconds = session.seconds
        session.finish(program.env_frames, program.stats())
        if signals.received is not None:
            raise Interrupted(signals.received)
    evaluation = program.evaluate()
    return session.result(evaluation, program.env_frames, program.learner.version, seconds)


def _restored_params(path: Path, experiment: Experiment, spec: EnvSpec) -> Params:
    """Reads a checkpoint's params and nothing else of it."""
    agent = make_agent(experiment, spec)
    params = jax.eval_shape(agent.initial_params, jax.eval_shape(jax.random.PRNGKey, 0))
    saved = checkpoint.restore(path, {"learner": {"params": params}}, partial=True)
    return saved["learner"]["params"]


def _config(directory: RunDir) -> Experiment:
    return from_json(directory.config.read_text(), directory.config)


def _newest(directory: RunDir, experiment: Experiment) -> Path:
    path = checkpoint.latest(directory.checkpoints)
    if path is None:
        raise ValueError(
            f"{directory.path} has no checkpoint. Start the run again with "
            f"rlstack train {experiment.preset}."
        )
    return path
