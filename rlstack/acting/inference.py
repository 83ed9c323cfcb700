"""What all forms of inference share: the config, the answer, and the interface for callers.

`rlstack.acting.inferencer` acts in this process, `rlstack.acting.inference_service` acts for many
callers, and `rlstack.acting.inference_client` calls a service.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np

from rlstack import devices
from rlstack.checks import Checked
from rlstack.types import AgentOut, AgentState, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class InferencerConfig(Checked):
    """How an Inferencer keeps up with the learner."""

    sync_interval: int = 1
    """Batches between two requests for newer params. Raise it when the params are so large that
    taking new ones slows acting down; actions are then chosen by older params."""
    devices: tuple[int, ...] = ()
    """Devices for acting, by their index in jax.local_devices(). Several actors or services take
    them in turn. By default actors act on the CPU, services on those of inferencer.devices or JAX's
    default device, and a single process on the learner's first device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "sync_interval")
        self.require("devices", devices.are_distinct(self.devices), "distinct and at least 0")


class Inference(NamedTuple):
    """The answer to one batch, as numpy arrays."""

    agent_output: AgentOut  # [B, ...]
    agent_state: AgentState  # [B, ...] the state at the beginning of the step
    params_version: np.ndarray  # [B] int32


class InferencerLike(Protocol):
    """A local Inferencer, or a client of one."""

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch of environments."""


class Servable(InferencerLike, Protocol):
    """An Inferencer as its service needs it: state can be reset, and restored after an error."""

    num_envs: int
    obs_spec: PyTree

    def reset(self, rows: np.ndarray) -> None:
        """Resets the agent state of some environments."""

    def save(self) -> PyTree:
        """Returns the key and the agent states."""

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
