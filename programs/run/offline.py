"""One process that learns from a dataset, without acting or before it acts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TextIO

import numpy as np

from rlstack.acting.evaluator import Evaluation
from rlstack.agents import AGENTS
from rlstack.learning.learner import Learner
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_evaluation_env
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from rlstack.programs.build.recorded import make_windows
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.run_session import Engine
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.storage.datasets import Dataset, Header, Windows, located
from rlstack.types import EnvSpec, PyTree

# Functions of these modules are environments, and do no more than their names say.
_HARMLESS = ("rlstack.envs.toy:", "rlstack.entity.games:")


def resolve_dataset(experiment: Experiment) -> Experiment:
    """Returns the experiment with its dataset's path made absolute and its environment filled in.

    With an absolute path the run can be resumed from any directory. An environment without a name
    becomes the environment of the dataset. An experiment without a dataset stays as it is.

    Raises:
      ValueError: the agent needs recorded steps and has none; a dataset cannot be read; its
        environment is a function of the user's own, which a dataset must not call; or rewards are
        normalised by returns, which only acting measures.
    """
    _check_recorded(experiment)
    if experiment.replay.demonstrations:
        name, _ = _named(experiment.replay.demonstrations)
        replay = dataclasses.replace(experiment.replay, demonstrations=name)
        experiment = dataclasses.replace(experiment, replay=replay)
    if not experiment.data:
        return experiment
    path, header = _named(experiment.data)
    env = experiment.env
    if not env.name:
        name = str(header.env["name"])
        if ":" in name and not name.startswith(_HARMLESS):
            raise ValueError(
                f"Experiment: env.name must be given, because the environment that {path} names "
                f"is a function, and calling it runs code: {name}, with the options "
                f"{header.env['options']}. If you trust it, add --env.name {name}"
                " and the options by --env.options."
            )
        env = dataclasses.replace(env, **header.env, eval_options={})
    return dataclasses.replace(experiment, data=path, env=env)


def _named(name: str) -> tuple[str, Header]:
    """Returns the name of a dataset for any working directory, and its header."""
    path = located(name)
    return name if name.startswith("minari:") else str(path), Dataset.read_header(path)


def _check_recorded(experiment: Experiment) -> None:
    """Checks that the agent has the recorded steps that it needs, and may learn from them."""
    entry = AGENTS.get(type(experiment.agent))
    demonstrations = experiment.replay.demonstrations
    if entry is not None and entry.offline and not experiment.data:
        raise ValueError(
            f"Experiment: data must be given for {experiment.preset}, which learns from a "
            "dataset only. Record one with rlstack record RUN_DIR and give --data DATASET_DIR."
        )
    if entry is not None and entry.offline and experiment.offline_updates:
        raise ValueError(
            f"Experiment: offline_updates must be 0 for {entry.agent.__name__}, which does not "
            f"learn by acting; got {experiment.offline_updates}."
        )
    if experiment.offline_updates and experiment.learner.processes > 1:
        raise ValueError(
            "Experiment: learner.processes must be 1 with offline_updates, because one process "
            f"draws from the dataset; got {experiment.learner.processes}."
        )
    if entry is not None and entry.recorded and not demonstrations:
        either = entry.recorded == "any"
        if not (either and experiment.data):
            raise ValueError(
                f"Experiment: {'data or ' * either}replay.demonstrations must be given for "
                f"{experiment.preset}, which learns from recorded steps. Record some with rlstack "
                f"record RUN_DIR and give {'--data or ' * either}--replay.demonstrations "
                "DATASET_DIR."
            )
    if experiment.normalisation.rewards == "return" and (experiment.data or demonstrations):
        raise ValueError(
            "Experiment: normalisation.rewards must not be return with data or demonstrations, "
            "because returns are measured while acting. Use --normalisation.rewards reward."
        )


def make_loop(experiment: Experiment, phase: Callable[[str], AbstractContextManager]) -> Engine:
    """Returns the loop of an experiment with data.

    Args:
      experiment: the experiment.
      phase: called with a text about what may take long, and entered while it lasts.
    """
    return OfflineFirst(experiment, phase) if experiment.acts else Offline(experiment)


def _announce(dataset: Dataset, windows: Windows, stream: TextIO) -> None:
    """Prints the size of a dataset and the returns in it."""
    header = dataset.header
    print(
        f"dataset: {header.frames:,} frames in {header.episodes:,} episodes of return "
        f"{header.return_mean:.1f} +- {header.return_std:.1f}, "
        f"{windows.num_windows:,} windows",
        file=stream,
        flush=True,
    )
    if dataset.note:
        print(f"note: {dataset.path}: {dataset.note}", file=stream, flush=True)


def _drawn(windows: Windows) -> dict[str, object]:
    return {f"dataset/{name}": value for name, value in windows.stats().items()}


class Offline:
    """The parts of an experiment that learns from a dataset, and the loop that drives them.

    Its frames are the steps learned from: batch_size x unroll_length for each update. A step of the
    dataset counts each time it is learned from.
    """

    starting_seconds = 0.0  # unknown: see `rlstack.programs.run.single_process.SingleProcessRun`

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        seed = experiment.seed
        self.dataset = Dataset(located(experiment.data))
        with make_evaluation_env(experiment) as env:
            self.spec: EnvSpec = env.spec
        agent = make_agent(experiment, self.spec)
        self.windows = make_windows(experiment, self.dataset, self.spec, agent)
        self.learner = Learner(experiment.learner, agent, self.windows, role_key(seed, "learner"))
        self._evaluator = make_evaluator(experiment, self.spec)
        self.env_frames = 0

    def announce(self, stream: TextIO) -> None:
        """Prints the size of the dataset and the returns in it."""
        _announce(self.dataset, self.windows, stream)

    def advance(self, periodic: PeriodicActions) -> None:
        """Makes an update."""
        cfg = self.experiment.replay
        periodic.log(self.learner.step(self.windows.sample()), "learner/")
        self.env_frames += cfg.batch_size * cfg.unroll_length

    def by_policy(self) -> Mapping[str, Mapping[str, float]]:
        """Returns nothing: one policy learns."""
        return {}

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        return {"learner/steps": self.learner.version, **_drawn(self.windows)}

    def evaluate(
        self, progress: Callable[[int, int], None] | None = None, brief: bool = False
    ) -> Evaluation:
        """Evaluates the current params; see `rlstack.programs.run.run_session.Run.evaluate`."""
        params = self.learner.params
        return evaluate(self.experiment, self._evaluator, params, progress, brief=brief)

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        return {
            "learner": self.learner.save(),
            "windows": self.windows.save(),
            "counters": {"env_frames": np.int64(self.env_frames)},
        }

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""
        return self.save()

    def older_template(self) -> PyTree:
        """Returns None: earlier versions saved the same structure."""
        return None

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned; learning continues as if never interrupted."""
        self.windows.load(saved["windows"])
        self.learner.load(saved["learner"])
        self.env_frames = int(saved["counters"]["env_frames"])

    def close(self) -> None:
        """Does nothing: the files of the dataset close when nothing refers to them."""


class OfflineFirst(SingleProcessRun):
    """Learns from a dataset for ``offline_updates``, and then acts and learns in one process.

    Its frames are the steps learned from before it acts, as in `Offline`, and then those acted. The
    replay has the steps acted alone; with ``replay.demonstrations`` recorded ones go on being
    learned.
    """

    def __init__(
        self,
        experiment: Experiment,
        phase: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Makes the parts; arguments are those of `SingleProcessRun`."""
        super().__init__(experiment, phase)
        try:
            spec = self.env.spec
            self.dataset = Dataset(located(experiment.data))
            agent = make_agent(experiment, spec)
            self.windows = make_windows(experiment, self.dataset, spec, agent)
        except BaseException:
            self.close()
            raise

    def announce(self, stream: TextIO) -> None:
        """Prints the memory that the replay needs, and the size of the dataset."""
        super().announce(stream)
        _announce(self.dataset, self.windows, stream)

    def advance(self, periodic: PeriodicActions) -> None:
        """Makes an update from the dataset, or acts and learns once there were enough of them."""
        if self.learner.version >= self.experiment.offline_updates:
            super().advance(periodic)
            return
        cfg = self.experiment.replay
        periodic.log(self.learner.step(self.windows.sample()), "learner/")
        self.player.count(cfg.batch_size * cfg.unroll_length)

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        return super().stats() | _drawn(self.windows)

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        return super().save() | {"windows": self.windows.save()}

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned; if it has acted, new episodes start."""
        self.windows.load(saved["windows"])
        if int(saved["learner"]["version"]) >= self.experiment.offline_updates:
            super().load(saved)
            return
        self.learner.load(saved["learner"])
        self.player.count(int(saved["counters"]["env_frames"]))
