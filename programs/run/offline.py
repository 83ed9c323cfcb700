"""One process that learns from a dataset, without acting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import jax
import numpy as np

from rlstack.acting.actor import transition_spec
from rlstack.acting.evaluator import Evaluation
from rlstack.agents import AGENTS
from rlstack.learning.learner import Learner
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_evaluation_env
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from rlstack.programs.build.seeds import role_key, role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.storage.datasets import Dataset, Windows
from rlstack.types import EnvSpec, PyTree

# Functions of these modules are environments, and do no more than their names say.
_HARMLESS = ("rlstack.envs.toy:", "rlstack.entity.games:")


def resolve_dataset(experiment: Experiment) -> Experiment:
    """Returns the experiment with its dataset's path made absolute and its environment filled in.

    With an absolute path the run can be resumed from any directory. An environment without a name
    becomes the environment of the dataset. An experiment without a dataset stays as it is.

    Raises:
      ValueError: an agent that learns only offline has no dataset; the dataset cannot be read; its
        environment is a function of the user's own, which a dataset must not call; or rewards are
        normalised by returns, which only acting measures.
    """
    if not experiment.data:
        entry = AGENTS.get(type(experiment.agent))
        if entry is not None and entry.offline:
            raise ValueError(
                f"Experiment: data must be given for {experiment.preset}, which learns from a "
                "dataset only. Record one with rlstack record RUN_DIR and give --data DATASET_DIR."
            )
        return experiment
    if experiment.normalisation.rewards == "return":
        raise ValueError(
            "Experiment: normalisation.rewards must not be return with data, because returns are "
            "measured while acting. Use --normalisation.rewards reward."
        )
    path = Path(experiment.data).absolute()
    header = Dataset.read_header(path)
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
    return dataclasses.replace(experiment, data=str(path), env=env)


class Offline:
    """The parts of an experiment that learns from a dataset, and the loop that drives them.

    Its frames are the steps learned from: batch_size x unroll_length for each update. A step of the
    dataset counts each time it is learned from.
    """

    starting_seconds = 0.0  # unknown: see `rlstack.programs.run.host.HostLoop`

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        seed = experiment.seed
        self.dataset = Dataset(experiment.data)
        with make_evaluation_env(experiment) as env:
            self.spec: EnvSpec = env.spec
        agent = make_agent(experiment, self.spec)
        cfg = experiment.replay
        self.windows = Windows(
            self.dataset,
            cfg,
            self.spec,
            transition_spec(agent, self.spec),
            jax.tree.map(np.asarray, agent.initial_state(cfg.batch_size)),
            role_seed(seed, "replay"),
        )
        self.learner = Learner(experiment.learner, agent, self.windows, role_key(seed, "learner"))
        self._evaluator = make_evaluator(experiment, self.spec)
        self.env_frames = 0

    def announce(self, stream: TextIO) -> None:
        """Prints the size of the dataset and the returns in it."""
        header = self.dataset.header
        print(
            f"dataset: {header.frames:,} frames in {header.episodes:,} episodes of return "
            f"{header.return_mean:.1f} +- {header.return_std:.1f}, "
            f"{self.windows.num_windows:,} windows",
            file=stream,
            flush=True,
        )
        if self.dataset.note:
            print(f"note: {self.dataset.path}: {self.dataset.note}", file=stream, flush=True)

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
        drawn = {f"dataset/{name}": value for name, value in self.windows.stats().items()}
        return {"learner/steps": self.learner.version, **drawn}

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

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned; learning continues as if never interrupted."""
        self.windows.load(saved["windows"])
        self.learner.load(saved["learner"])
        self.env_frames = int(saved["counters"]["env_frames"])

    def close(self) -> None:
        """Does nothing: the files of the dataset close when nothing refers to them."""
