"""What learns from recorded steps: the windows of a dataset, and an agent with demonstrations.

`demonstrated` makes the agent that also learns from a recording, as `ReplayConfig.demonstrations`
says.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import numpy as np

from rlstack.acting.actor import transition_spec
from rlstack.agent import Agent
from rlstack.configs.replay import ReplayConfig
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.storage.datasets import Dataset, Windows, check_steps, located, window_starts
from rlstack.types import EnvSpec

if TYPE_CHECKING:
    from rlstack.families.demonstrated import Recording


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


def demonstrated(cfg: ReplayConfig, agent: Agent, spec: EnvSpec) -> Agent:
    """Returns an agent that also learns from the recording ``cfg.demonstrations``.

    Raises:
      DatasetError: the recording cannot be read, or does not fit the environment or the agent.
    """
    from rlstack.families.demonstrated import Demonstrated

    header = Dataset.read_header(located(cfg.demonstrations))
    step = transition_spec(agent, spec)
    check_steps(header, spec, step, f"Experiment: replay.demonstrations {cfg.demonstrations}")
    load = functools.partial(_recording, cfg, spec)
    return Demonstrated(agent, load, cfg.demonstration_share)


@functools.lru_cache(maxsize=1)  # an update is traced several times
def _read_all(demonstrations: str) -> Dataset:
    return Dataset(located(demonstrations))


def _recording(cfg: ReplayConfig, spec: EnvSpec) -> Recording:
    from rlstack.families.demonstrated import Recording

    dataset = _read_all(cfg.demonstrations)
    starts = window_starts(dataset, cfg)
    timestep, action = dataset.read(np.arange(dataset.header.steps), spec)
    return Recording(timestep, action, starts.astype(np.int32))
