"""Makes the agent that also learns from recorded steps, as `ReplayConfig.demonstrations` says."""

from __future__ import annotations

import functools

import numpy as np

from rlstack.acting.actor import transition_spec
from rlstack.agent import Agent
from rlstack.configs.replay import ReplayConfig
from rlstack.families.demonstrated import Demonstrated, Recording
from rlstack.storage.datasets import Dataset, check_steps, located, window_starts
from rlstack.types import EnvSpec


def demonstrated(cfg: ReplayConfig, agent: Agent, spec: EnvSpec) -> Agent:
    """Returns an agent that also learns from the recording ``cfg.demonstrations``.

    Raises:
      DatasetError: the recording cannot be read, or does not fit the environment or the agent.
    """
    header = Dataset.read_header(located(cfg.demonstrations))
    step = transition_spec(agent, spec)
    check_steps(header, spec, step, f"Experiment: replay.demonstrations {cfg.demonstrations}")
    load = functools.partial(_recording, cfg, spec)
    return Demonstrated(agent, load, cfg.demonstration_share)


@functools.lru_cache(maxsize=1)  # an update is traced several times
def _read_all(demonstrations: str) -> Dataset:
    return Dataset(located(demonstrations))


def _recording(cfg: ReplayConfig, spec: EnvSpec) -> Recording:
    dataset = _read_all(cfg.demonstrations)
    starts = window_starts(dataset, cfg)
    timestep, action = dataset.read(np.arange(dataset.header.steps), spec)
    return Recording(timestep, action, starts.astype(np.int32))
