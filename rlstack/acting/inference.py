"""The common parts of all forms of inference: config, answer, and interface for callers.

`rlstack.acting.inferencer` acts in this process, `rlstack.acting.inference_service` acts for many
callers, and `rlstack.acting.inference_client` calls a service.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from rlstack.types import AgentOut, AgentState, PyTree, TimeStep


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
    """The interface of an Inferencer that a service needs: acting, and control of agent state."""

    num_envs: int
    obs_spec: PyTree
    extras_spec: PyTree

    def reset(self, rows: np.ndarray) -> None:
        """Resets the agent state of some environments."""

    def save(self) -> PyTree:
        """Returns the key and the agent states."""

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
