"""The Inferencer: the only place that holds acting params and agent states.

It keeps one row of agent state an environment. A call gathers the rows of its batch,
starts afresh those at FIRST, acts, and scatters the new rows back, all in one jitted function. The
same object serves one local actor or, behind a service, many remote ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent
from rlstack.checks import Checked
from rlstack.exploration import with_env_ids
from rlstack.types import AgentOut, AgentState, Array, Params, PRNGKey, PyTree, TimeStep


class ParamsSource(Protocol):
    """Whoever publishes params by version: a Learner, or a client of one."""

    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        """Returns (version, params), or None when there is nothing newer."""


class FixedParams:
    """Params that never change, as an Inferencer's source."""

    def __init__(self, params: Params) -> None:
        self._params = params

    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        """Returns version 0, once."""
        return (0, self._params) if newer_than < 0 else None


@dataclasses.dataclass(frozen=True)
class InferencerConfig(Checked):
    """How an Inferencer keeps up with the learner."""

    sync_interval: int = 1
    """Calls between two looks for newer params."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "sync_interval")


class Inference(NamedTuple):
    """An answer to one batch, as numpy arrays."""

    agent_output: AgentOut  # [B, ...]
    agent_state: AgentState  # [B, ...] the state the step began from
    params_version: np.ndarray  # [B] int32


class Inferencer:
    """Acts with the newest published params, and remembers each environment's agent state."""

    def __init__(
        self,
        cfg: InferencerConfig,
        agent: Agent,
        params_source: ParamsSource,
        num_envs: int,
        rng_key: PRNGKey,
        global_ids: np.ndarray | None = None,
    ) -> None:
        """Prepares to act; the first params are pulled at the first call.

        Args:
          cfg: how often to look for newer params.
          agent: whose ``actor_step`` to run.
          params_source: who publishes params; it must have some at the first call.
          num_envs: environments served; ids are in ``[0, num_envs)``.
          rng_key: the acting key, consumed and owned by this object.
          global_ids: int ``[num_envs]``, which environments of the whole experiment these are,
            for exploration that goes by it; None for 0, 1, ...
        """
        self._cfg = cfg
        self._params_source = params_source
        self._num_envs = num_envs
        self._rng_key = rng_key
        self._initial_state = agent.initial_state
        self._lay_out = agent.lay_out
        self._global_ids = np.arange(num_envs) if global_ids is None else global_ids
        self._table = self._fresh_table()
        self._version = -1
        self._params: Params = None
        self._versions = np.zeros(num_envs, np.int32)
        self._calls_to_sync = 0
        self._act_all, self._act_rows = _acting_functions(agent)

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch.

        Args:
          env_ids: int ``[B]``, distinct ids in ``[0, num_envs)``; None for all in order. Rows
            under the id ``num_envs`` are padding, whose agent state is not kept.
          timestep: ``[B, ...]``, row i of environment ``env_ids[i]``.

        Returns:
          numpy arrays ``[B, ...]``; read-only, and not written to later.
        """
        self._pull()
        timestep = self._lay_out(timestep)
        if env_ids is None or _is_all_in_order(env_ids, self._num_envs):
            self._rng_key, self._table, state, output = self._act_all(
                self._rng_key, self._params, self._table, timestep
            )
        else:
            self._rng_key, self._table, state, output = self._act_rows(
                self._rng_key, self._params, self._table, env_ids, timestep
            )
        batch_size = len(timestep.step_type)
        return Inference(_to_numpy(output), _to_numpy(state), self._versions[:batch_size])

    __call__ = inference

    def reset(self, rows: np.ndarray) -> None:
        """Gives environments a fresh agent state.

        Args:
          rows: which, bool ``[num_envs]``; a mask and not ids, so that one shape serves all.
        """

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(rows.reshape(rows.shape + (1,) * (old.ndim - 1)), new, old)

        self._table = jax.tree.map(choose, self._fresh_table(), self._table)

    def save(self) -> PyTree:
        """Returns what a resumed run needs to act on as before."""
        return {"rng_key": self._rng_key, "table": self._table}

    def load(self, saved: PyTree) -> None:
        """Takes back what `save` returned; the next call looks for params of any version."""
        self._rng_key, self._table = saved["rng_key"], saved["table"]
        # A learner that went back to a checkpoint publishes versions older than the one held.
        self._version, self._calls_to_sync = -1, 0

    def _fresh_table(self) -> AgentState:
        return with_env_ids(self._initial_state(self._num_envs), self._global_ids)

    def _pull(self) -> None:
        """Swaps in newer params, between batches only."""
        if self._calls_to_sync:
            self._calls_to_sync -= 1
            return
        self._calls_to_sync = self._cfg.sync_interval - 1
        published = self._params_source.get_params(newer_than=self._version)
        if published is not None:
            self._version, self._params = published
            # A new array, not a write: transitions hold slices of the old one.
            self._versions = np.full(self._num_envs, self._version, np.int32)


def _acting_functions(agent: Agent) -> tuple[Any, Any]:
    def act(
        rng_key: PRNGKey, params: Params, state: AgentState, timestep: TimeStep
    ) -> tuple[PRNGKey, AgentState, AgentState, AgentOut]:
        next_key, step_key = jax.random.split(rng_key)
        state = agent.reset_state(state, timestep.first())
        output, next_state = agent.actor_step(step_key, params, timestep, state)
        return next_key, next_state, state, output

    def act_rows(
        rng_key: PRNGKey, params: Params, table: AgentState, rows: np.ndarray, timestep: TimeStep
    ) -> tuple[PRNGKey, AgentState, AgentState, AgentOut]:
        # Ids of padding lie outside: JAX reads the last row for them, and drops what they write.
        state = jax.tree.map(lambda x: x[rows], table)
        next_key, next_state, state, output = act(rng_key, params, state, timestep)
        table = jax.tree.map(lambda old, new: old.at[rows].set(new), table, next_state)
        return next_key, table, state, output

    return jax.jit(act), jax.jit(act_rows)


def _is_all_in_order(env_ids: np.ndarray, num_envs: int) -> bool:
    return (
        len(env_ids) == num_envs
        and env_ids[-1] == num_envs - 1  # not padding
        and bool((env_ids[1:] > env_ids[:-1]).all())
    )


def _to_numpy(tree: PyTree) -> PyTree:
    if isinstance(tree, tuple) and not tree:
        return tree
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return structure.unflatten([np.asarray(leaf) for leaf in leaves])
