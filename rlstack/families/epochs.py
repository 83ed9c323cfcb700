"""The base class of policy-gradient agents that go over each batch several times (PPO, V-MPO).

`EpochPolicyGradient.prepare` makes rows of a batch, with advantages by GAE, and each minibatch of
rows is one gradient step on the agent's ``loss``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.agent import EpochAgent
from rlstack.families.policy_gradient import (
    PolicyGradientAgent,
    PolicyGradientConfig,
    PolicyGradientOutput,
    PolicyGradientState,
    explained_variance,
)
from rlstack.math import returns, shuffle
from rlstack.types import (
    AgentState,
    Array,
    Batch,
    Logs,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    merge_leading_dims,
)


@dataclasses.dataclass(frozen=True)
class EpochsConfig(PolicyGradientConfig):
    """Hyperparameters that these agents share."""

    gae_lambda: float = 0.95
    """Trace decay of the advantage estimator."""
    num_epochs: int = 4
    """Number of passes over a batch."""
    num_minibatches: int = 4
    """Number of gradient steps per pass. A recurrent network splits the batch by environment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("gae_lambda", 0 <= self.gae_lambda <= 1, "in [0, 1]")
        self.require("num_epochs", self.num_epochs >= 1, "at least 1")
        self.require("num_minibatches", self.num_minibatches >= 1, "at least 1")


class EpochRows(NamedTuple):
    """Rows of a batch to learn from; feed-forward ``[N, ...]``, recurrent ``[B, T, ...]``."""

    timestep: TimeStep
    output: PolicyGradientOutput  # the behaviour policy's
    advantage: Array
    target: Array  # the target of the value
    mask: Array  # False where there is no transition
    state: AgentState  # [B, ...] at the first step; () without recurrence
    entropy_cost: Array | tuple[()] = ()  # () if it is the config's
    old_policy: Array | tuple[()] = ()  # parameters of the policy before the update, or ()


class EpochPolicyGradient(PolicyGradientAgent, EpochAgent):
    """An agent with an actor-critic network that learns from rows; subclasses add `loss`."""

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._is_recurrent = bool(jax.tree.leaves(self.initial_state(1)))

    def prepare(
        self, params: Params, learner_state: PolicyGradientState, batch: Batch
    ) -> tuple[PolicyGradientState, EpochRows, Array]:
        """Estimates advantages and shuffles; see `rlstack.agent.EpochAgent`."""
        rows = self._rows(params, learner_state, batch.trajectory)
        num_rows = rows.mask.shape[0]
        size = num_rows // self.cfg.num_minibatches
        if size < 1:
            raise ValueError(
                f"{type(self).__name__}: num_minibatches must be at most the {num_rows} rows of a "
                f"batch ({'environments' if self._is_recurrent else 'steps'}); "
                f"got {self.cfg.num_minibatches}."
            )
        rng_key, shuffle_key = jax.random.split(learner_state.rng_key)
        schedule = shuffle.permutations(shuffle_key, self.cfg.num_epochs, num_rows)
        # Rows that do not fill a whole minibatch are left out; each epoch leaves out different
        # rows.
        schedule = schedule[:, : size * self.cfg.num_minibatches].reshape((-1, size))
        return learner_state._replace(rng_key=rng_key), rows, schedule

    def _rows(
        self, params: Params, learner_state: PolicyGradientState, trajectory: Trajectory
    ) -> EpochRows:
        # A state that is stored for the first step only has one row.
        before = jax.tree.map(lambda x: x[:-1] if len(x) > 1 else x, trajectory)
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        mask = ~after.first()
        advantage, target = returns.gae(
            rewards=after.reward,
            discounts=after.discount * self.cfg.discount,
            values=trajectory.agent_output.value,
            gae_lambda=self.cfg.gae_lambda,
            mask=mask,
        )
        rows = EpochRows(before.timestep, before.agent_output, advantage, target, mask, state=())
        rows = self.completed(params, learner_state, before, rows)
        if self._is_recurrent:
            state = jax.tree.map(lambda x: x[0], trajectory.agent_state)
            return _swap_axes(rows)._replace(state=state)
        return merge_leading_dims(rows)

    def completed(
        self,
        params: Params,
        learner_state: PolicyGradientState,
        trajectory: Trajectory,
        rows: EpochRows,
    ) -> EpochRows:
        """Returns rows ``[T, B, ...]`` with what else an agent needs; by default as they are."""
        del params, learner_state, trajectory
        return rows

    def batch_logs(self, rows: EpochRows) -> Logs:
        """Returns how well the values of the acting network explain their targets."""
        explained = explained_variance(rows.output.value, rows.target, rows.mask)
        return {"explained_variance": explained}

    def lay_out_rows(self, minibatch: EpochRows) -> EpochRows:
        """Lays out the steps; see `rlstack.agent.Agent.lay_out`."""
        if self._is_recurrent:
            return minibatch
        return minibatch._replace(timestep=self.lay_out(minibatch.timestep))

    def learned_steps(self, batch: EpochRows) -> tuple[TimeStep, AgentState]:
        """Returns the steps of a minibatch, time-major, and the state before them."""
        if self._is_recurrent:
            return _swap_axes(batch.timestep), batch.state
        return jax.tree.map(lambda x: x[None], batch.timestep), ()

    def outputs(self, params: Params, rows: EpochRows) -> tuple[Any, EpochRows]:
        """Returns the network's output on a minibatch, and rows with the same leading axes."""
        if self._is_recurrent:
            state, rows = rows.state, _swap_axes(rows._replace(state=()))
            return self.network.unroll(None, params, rows.timestep, state)[0], rows
        return self.network.apply(None, params, rows.timestep, ())[0], rows


def _swap_axes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
