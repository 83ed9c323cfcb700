"""One process without actors: learning from recorded steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agents import AGENTS
from programs.build.components import make_agent, make_evaluator
from programs.build.environments import make_evaluation_env
from programs.build.seeds import role_key, role_seed
from programs.experiment import Experiment
from programs.tracking.periodic import PeriodicActions
from rlstack.acting.actor import transition_spec
from rlstack.acting.evaluator import Evaluation
from rlstack.learning.learner import Learner
from rlstack.storage.datasets import Dataset, Windows
from rlstack.types import EnvSpec, PyTree


def resolved(experiment: Experiment) -> Experiment:
    """Returns an experiment with what its dataset decides filled in.

    The path becomes absolute, so that the run can be resumed from anywhere; an environment without
    a name becomes the dataset's.

    Raises:
      ValueError: there is no dataset where there must be one; or rewards are to be divided by the
        deviation of returns, which are counted while acting.
    """
    if not experiment.data:
        entry = AGENTS.get(type(experiment.agent))
        if entry is not None and entry.offline:
            raise ValueError(
                f"Experiment: data must be given for {experiment.preset}, which learns from a "
                "dataset alone. Record one with rlstack record RUN_DIR and give --data DATASET_DIR."
            )
        return experiment
    if experiment.normalisation.rewards == "return":
        raise ValueError(
            "Experiment: normalisation.rewards must not be return with data, since returns are "
            "counted while acting. Use --normalisation.rewards reward."
        )
    path = Path(experiment.data).absolute()
    header = Dataset.read_header(path)
    env = experiment.env
    if not env.name:
        env = dataclasses.replace(env, **header.env, eval_options={})
    return dataclasses.replace(experiment, data=str(path), env=env)


class Offline:
    """The parts of an experiment that learns from a dataset, and the loop that moves them.

    Frames are the dataset's steps learned from, each time they are: batch_size x unroll_length an
    update.
    """

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

    def train(self, periodic: PeriodicActions, stop: Callable[[], bool]) -> None:
        """Learns until the experiment's frames are learned from, or told to stop."""
        cfg = self.experiment.replay
        while self.env_frames < self.experiment.frames and not stop():
            periodic.log(self.learner.step(self.windows.sample()), "learner/")
            self.env_frames += cfg.batch_size * cfg.unroll_length
            periodic.tick(self.env_frames, self.stats)

    def describe(self) -> str:
        """Returns one line about the dataset."""
        header = self.dataset.header
        return (
            f"dataset: {header.frames:,} frames in {header.episodes:,} episodes of return "
            f"{header.return_mean:.1f} +- {header.return_std:.1f}, "
            f"{self.windows.num_windows:,} windows"
        )

    def stats(self) -> dict[str, Any]:
        """Returns counters to log."""
        drawn = {f"dataset/{name}": value for name, value in self.windows.stats().items()}
        return {"learner/steps": self.learner.version, **drawn}

    def evaluate(self) -> Evaluation:
        """Judges the current params with the greedy policy."""
        with make_evaluation_env(self.experiment) as env:
            return self._evaluator.evaluate(self.learner.params, env)

    def save(self) -> PyTree:
        """Returns everything that a resumed run needs, for `rlstack.storage.checkpoint`."""
        return {
            "learner": self.learner.save(),
            "windows": self.windows.save(),
            "counters": {"env_frames": np.int64(self.env_frames)},
        }

    def template(self) -> PyTree:
        """Returns the template of `save`'s result, for `rlstack.storage.checkpoint.restore`."""
        return self.save()

    def load(self, saved: PyTree) -> None:
        """Takes back what `save` returned; learning then goes on as if never interrupted."""
        self.windows.load(saved["windows"])
        self.learner.load(saved["learner"])
        self.env_frames = int(saved["counters"]["env_frames"])

    def close(self) -> None:
        """Does nothing: the files of the dataset are closed when nothing refers to them."""
