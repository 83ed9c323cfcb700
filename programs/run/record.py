"""Plays episodes with the params of a run and writes them to datasets."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rlstack.acting.actor import Actor
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.agents.fixed import RandomConfig
from rlstack.configs.acting import InferencerConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import Pool, make_evaluation_env
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from rlstack.programs.build.restored import counts_at, newest_checkpoint, read_params
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session import origin
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.storage import checkpoint
from rlstack.storage.datasets import Dataset, DatasetWriter, Header, minari

Policy = Literal["greedy", "explore"]

_MEDIUM = 1 / 3  # of the expert's return above that of random actions, as in D4RL
_FEWEST = 5  # checkpoints from which sets are made
SETS = ("random", "medium-replay", "medium", "expert")  # of `record_sets`, in their order
# An experiment that acts at random, but for its environments and its seed.
_PLAIN: dict[str, Any] = {
    "preset": "random",
    "agent": RandomConfig(),
    "replay": ReplayConfig(sampler="uniform", batch_size=1, unroll_length=1, max_size=1),
    "frames": 1,
}


def record(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    frames: int = 20_000,
    policy: Policy = "greedy",
    seed: int | None = None,
) -> tuple[Path, Header]:
    """Writes a dataset of whole episodes in the environments of the run's evaluation.

    Args:
      run_dir: the directory of a run with a checkpoint.
      out: a new or empty directory; by default ``dataset`` in the run directory.
      frames: minimum number of environment steps; every episode that was started is finished. It
        also limits the number of environments, to one per thousand frames.
      policy: "greedy" takes the best action; "explore" explores as at the end of training.
      seed: seed of environments and exploration; the run's seed by default. The random numbers
        differ from those of training and evaluation with the same seed.

    Returns:
      The dataset's directory and its header.

    Raises:
      ValueError: there is no run or no checkpoint, or the directory is not empty.
      rlstack.storage.datasets.DatasetWriteError: a file cannot be written; no files are left.
      rlstack.programs.session.signals.Interrupted: SIGINT or SIGTERM was received; no files are
        left.
    """
    directory = RunDir.open(run_dir)
    experiment = _recorded_experiment(read_config(directory), frames, seed)
    saved = newest_checkpoint(directory, experiment)
    path = Path(out) if out is not None else directory.path / "dataset"
    with StopSignals() as signals:
        return _write(directory, experiment, path, frames, policy, [saved], signals)


def record_sets(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    frames: int = 20_000,
    seed: int | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, tuple[Path, Header]]:
    """Writes four datasets of one run, as D4RL has them (Fu et al. 2020, arXiv:2004.07219).

    ``random`` has random actions; ``expert`` the best actions of the checkpoint with the largest
    return in an evaluation; ``medium`` the exploring policy of the first checkpoint that has a
    third of that return, counted from the random one; and ``medium-replay`` equal parts of all
    checkpoints up to that one. Deviation: D4RL's medium-replay is the replay of training itself.

    Args:
      run_dir: the directory of a run with many checkpoints; see ``checkpoints_kept``.
      out: a new or empty directory, which gets a dataset of each name; by default ``datasets`` in
        the run directory.
      frames: minimum number of environment steps of each dataset.
      seed: seed of environments and exploration; the run's seed by default.
      tell: shows the user a line.

    Returns:
      The directory and the header of each dataset, by its name.

    Raises:
      ValueError: the run has too few checkpoints, or none that is better than random actions;
        otherwise as `record`.
    """
    directory = RunDir.open(run_dir)
    experiment = _recorded_experiment(config := read_config(directory), frames, seed)
    saved = _checkpoints(directory)
    path = Path(out) if out is not None else directory.path / "datasets"
    found: dict[str, tuple[Path, Header]] = {}
    with StopSignals() as signals:

        def write(name: str, policy: Policy, chosen: Sequence[Path]) -> float:
            found[name] = _write(
                directory, experiment, path / name, frames, policy, chosen, signals
            )
            mean = found[name][1].return_mean
            tell(f"{name}: return {mean:.1f}, {_frames_of(chosen)}")
            return mean

        worst = write("random", "explore", [])
        returns = _returns(directory, config, saved, signals)
        expert = max(range(len(saved)), key=returns.__getitem__)
        if returns[expert] <= worst:
            shutil.rmtree(found["random"][0])
            raise _no_better(directory, worst, returns[expert])
        level = worst + _MEDIUM * (returns[expert] - worst)
        medium = next(i for i in range(len(saved)) if returns[i] >= level)
        write("medium-replay", "explore", saved[: medium + 1])
        write("medium", "explore", [saved[medium]])
        write("expert", "greedy", [saved[expert]])
    return found


def _checkpoints(directory: RunDir) -> list[Path]:
    """Returns the checkpoints of a run, the oldest first, if sets can be made of them."""
    saved = sorted(checkpoint.paths(directory.checkpoints), key=checkpoint.step_of)
    if len(saved) < _FEWEST:
        raise ValueError(
            f"record: {directory.path} must have at least {_FEWEST} checkpoints for --sets; it has "
            f"{len(saved)}. Train with --checkpoints-kept 20 and --checkpoint-period a twentieth "
            "of the frames."
        )
    return saved


def _no_better(directory: RunDir, chance: float, best: float) -> ValueError:
    return ValueError(
        f"record: {directory.path} must have a checkpoint that is better than random actions, "
        f"whose return is {chance:.1f}, for --sets; the best one has {best:.1f}. Train it for "
        "longer."
    )


def check_minari(names: Sequence[str]) -> None:
    """Checks that `to_minari` may write datasets of these names.

    Raises:
      DatasetError: Minari is not installed, or refuses a name.
    """
    for name in names:
        minari.check_name(name)


def to_minari(
    made: Sequence[tuple[Path, Header]], names: Sequence[str]
) -> list[tuple[Path, Header]]:
    """Writes datasets as ones of Minari, with these names; returns their directories and headers.

    Raises:
      DatasetError: Minari is not installed, or refuses a name.
    """
    pairs = zip(made, names, strict=True)
    return [(minari.export(Dataset(path), name), header) for (path, header), name in pairs]


def _frames_of(chosen: Sequence[Path]) -> str:
    frames = ", ".join(f"{checkpoint.step_of(path):,}" for path in chosen)
    return f"checkpoints at {frames} frames" if chosen else "random actions"


def _returns(
    directory: RunDir, experiment: Experiment, saved: Sequence[Path], signals: StopSignals
) -> list[float]:
    """Returns the mean return of the greedy policy of each checkpoint."""
    returns = []
    with make_evaluation_env(experiment) as env:
        evaluator = make_evaluator(experiment, env.spec)
        for path in saved:
            origin.check(directory, path)
            params = read_params(path, experiment, env.spec)
            returns.append(float(evaluate(experiment, evaluator, params).returns.mean()))
            _stop_if_told(signals)
    return returns


def _write(
    directory: RunDir,
    experiment: Experiment,
    path: Path,
    frames: int,
    policy: Policy,
    saved: Sequence[Path],
    signals: StopSignals,
) -> tuple[Path, Header]:
    """Writes a dataset in equal parts of these checkpoints; of random actions without one."""
    source = {
        "run": str(directory.path),
        "preset": experiment.preset,
        "agent": type(experiment.agent).__name__,
        "policy": policy,
        "trained_frames": int(checkpoint.read_metadata(saved[-1])["env_frames"]) if saved else 0,
        "seed": experiment.seed,
    }
    if not saved:
        experiment = Experiment(
            **_PLAIN,
            env=dataclasses.replace(experiment.env, levels=0),
            evaluator=experiment.evaluator,
            seed=experiment.seed,
        )
        source["agent"] = type(experiment.agent).__name__
    if len(saved) > 1:
        source["checkpoints"] = [checkpoint.step_of(path) for path in saved]
    parts = max(1, min(len(saved), frames))
    first, each = frames - frames // parts * (parts - 1), frames // parts
    with (
        make_evaluation_env(experiment, "record") as env,
        DatasetWriter(
            path, env.spec, env.num_envs, first, env=_env_header(experiment), source=source
        ) as writer,
    ):
        for index in range(parts):
            if index:
                writer.extend(each)
            chosen = saved[index] if saved else None
            _play(experiment, env, chosen, policy == "greedy", writer, signals)
        return path.absolute(), writer.finish()


def _play(
    experiment: Experiment,
    env: Pool,
    saved: Path | None,
    greedy: bool,
    writer: DatasetWriter,
    signals: StopSignals,
) -> None:
    """Plays until the writer is done, by the params of a checkpoint; at random without one."""
    after = None if saved is None else counts_at(saved, experiment)
    agent = make_agent(experiment, env.spec, greedy=greedy, after=after)
    key = role_key(experiment.seed, "record")
    params = () if saved is None else read_params(saved, experiment, env.spec)
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams(params), env.num_envs, key)
    actor = Actor(env, inferencer, writer)
    while not writer.done:
        actor.step()
        _stop_if_told(signals)


def _stop_if_told(signals: StopSignals) -> None:
    if signals.received is not None:
        raise Interrupted(signals.received, saved=False)


def _recorded_experiment(experiment: Experiment, frames: int, seed: int | None) -> Experiment:
    """Returns the experiment with the seed, and with few environments for few frames.

    Every environment finishes its episode, so many environments would record too many frames.
    """
    num_envs = max(1, min(experiment.evaluator.num_envs, -(-frames // 1000)))
    evaluator = dataclasses.replace(experiment.evaluator, num_envs=num_envs, episodes=num_envs)
    seed = experiment.seed if seed is None else seed
    return dataclasses.replace(experiment, evaluator=evaluator, seed=seed)


def _env_header(experiment: Experiment) -> dict[str, object]:
    """Returns the header's entry on the environments, which are those of evaluation."""
    cfg = experiment.env
    options = {**cfg.options, **cfg.eval_options}
    return {"name": cfg.name, "type": cfg.type, "options": options}
