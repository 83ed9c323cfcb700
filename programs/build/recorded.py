"""Makes the windows of a dataset from which an experiment learns."""

from __future__ import annotations

import jax
import numpy as np

from rlstack.acting.actor import transition_spec
from rlstack.agent import Agent
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.storage.datasets import Dataset, Windows
from rlstack.types import EnvSpec


def make_windows(experiment: Experiment, dataset: Dataset, spec: EnvSpec, agent: Agent) -> Windows:
    """Returns the windows of a dataset, in the order of the experiment's seed.

    Args:
      experiment: the experiment, which has the sizes of windows and batches.
      dataset: the dataset.
      spec: the spec of one environment.
      agent: the agent that learns.

    Raises:
      DatasetError: the dataset does not fit the environment, the agent or the sizes.
    """
    return Windows(
        dataset,
        experiment.replay,
        spec,
        transition_spec(agent, spec),
        jax.tree.map(np.asarray, agent.initial_state(experiment.replay.batch_size)),
        role_seed(experiment.seed, "replay"),
    )
