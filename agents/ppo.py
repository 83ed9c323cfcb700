"""Proximal policy optimisation, Schulman et al. (2017), https://arxiv.org/abs/1707.06347.

Discrete, multi-discrete, masked, continuous and structured actions; feed-forward or recurrent
networks. Deviations from the paper are the field's customs (Huang et al. 2022, "The 37
implementation details of PPO"): advantages normalised by minibatch, gradients clipped by global
norm, value loss optionally clipped. Two are ours: a truncated episode is bootstrapped from its true
last observation, and LAST -> FIRST pairs of steps, which are no transitions, are left out of every
mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack import returns, shuffle
from rlstack.agent import EpochAgent
from rlstack.policy_gradient import (
    PolicyGradientAgent,
    PolicyGradientConfig,
    PolicyGradientOutput,
    PolicyGradientState,
)
from rlstack.types import (
    AgentState,
    Array,
    Batch,
    Logs,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)


@dataclasses.dataclass(frozen=True)
class PPOConfig(PolicyGradientConfig):
    """Hyperparameters of PPO."""

    gae_lambda: float = 0.95
    """Trace decay of the advantage estimator."""
    clip_ratio: float = 0.2
    """The policy ratio is clipped to 1 plus or minus this (paper, equation 7)."""
    value_clip: float = 0.0
    """Values move at most this far from the behaviour's value; 0 does not clip."""
    num_epochs: int = 4
    """Passes over a batch."""
    num_minibatches: int = 4
    """Gradient steps a pass; a recurrent network splits the batch by environments."""
    normalise_advantages: bool = True
    """Whether each minibatch's advantages are brought to mean 0 and deviation 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("gae_lambda", 0 <= self.gae_lambda <= 1, "in [0, 1]")
        self.require("clip_ratio", self.clip_ratio > 0, "positive")
        self.require("value_clip", self.value_clip >= 0, "at least 0")
        self.require("num_epochs", self.num_epochs >= 1, "at least 1")
        self.require("num_minibatches", self.num_minibatches >= 1, "at least 1")


class PPORows(NamedTuple):
    """Rows of a batch to learn from; feed-forward ``[N, ...]``, recurrent ``[B, T, ...]``."""

    timestep: TimeStep
    output: PolicyGradientOutput  # the behaviour policy's
    advantage: Array
    target: Array  # what the value should be
    mask: Array  # False where there is no transition
    state: AgentState  # [B, ...] as of the first step; () without recurrence


class PPO(PolicyGradientAgent, EpochAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with an actor-critic network."""

    cfg: PPOConfig

    def __init__(self, cfg: PPOConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._is_recurrent = bool(jax.tree.leaves(self.initial_state(1)))

    def prepare(
        self, params: Params, learner_state: PolicyGradientState, batch: Batch
    ) -> tuple[PolicyGradientState, PPORows, Array]:
        """Estimates advantages and shuffles; see `rlstack.agent.EpochAgent`."""
        rows = self._rows(batch.trajectory)
        num_rows = rows.mask.shape[0]
        size = num_rows // self.cfg.num_minibatches
        if size < 1:
            raise ValueError(
                f"PPO: num_minibatches must be at most the {num_rows} rows of a batch "
                f"({'environments' if self._is_recurrent else 'steps'}); "
                f"got {self.cfg.num_minibatches}."
            )
        rng_key, shuffle_key = jax.random.split(learner_state.rng_key)
        schedule = shuffle.permutations(shuffle_key, self.cfg.num_epochs, num_rows)
        # A remainder that fills no minibatch is left out, a different one each epoch.
        schedule = schedule[:, : size * self.cfg.num_minibatches].reshape((-1, size))
        return learner_state._replace(rng_key=rng_key), rows, schedule

    def _rows(self, trajectory: Trajectory) -> PPORows:
        before = jax.tree.map(lambda x: x[:-1], trajectory)
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        mask = ~after.first()
        advantage, target = returns.gae(
            rewards=after.reward,
            discounts=after.discount * self.cfg.discount,
            values=trajectory.agent_output.value,
            gae_lambda=self.cfg.gae_lambda,
            mask=mask,
        )
        rows = PPORows(before.timestep, before.agent_output, advantage, target, mask, state=())
        if self._is_recurrent:
            state = jax.tree.map(lambda x: x[0], trajectory.agent_state)
            return _swap_axes(rows)._replace(state=state)
        return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), rows)

    def loss(self, params: Params, rows: PPORows) -> tuple[Array, Logs]:
        """Returns the clipped surrogate plus value and entropy terms (paper, equation 9)."""
        if self._is_recurrent:
            state, rows = rows.state, _swap_axes(rows._replace(state=()))
            run = self.network.unroll
        else:
            state, run = (), self.network.apply
        output, _ = run(None, params, rows.timestep, state)
        weights = rows.mask / jnp.maximum(rows.mask.sum(), 1)

        def mean(x: Array) -> Array:
            return (x * weights).sum()

        distribution = self.distribution(output, rows.timestep)
        advantage = rows.advantage
        if self.cfg.normalise_advantages:
            centred = advantage - mean(advantage)
            advantage = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
        log_ratio = distribution.log_prob(rows.output.action) - rows.output.behaviour_log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - self.cfg.clip_ratio, 1 + self.cfg.clip_ratio)
        policy_loss = -mean(jnp.minimum(ratio * advantage, clipped * advantage))
        value_loss = 0.5 * mean(self._value_error(output.value, rows))
        entropy = mean(distribution.entropy())
        loss = policy_loss + self.cfg.value_cost * value_loss - self.cfg.entropy_cost * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": mean(ratio - 1 - log_ratio),  # Schulman's k3 estimator, always >= 0
            "clip_fraction": mean(jnp.abs(ratio - 1) > self.cfg.clip_ratio),
        }

    def _value_error(self, value: Array, rows: PPORows) -> Array:
        error = (value - rows.target) ** 2
        if not self.cfg.value_clip:
            return error
        move = jnp.clip(value - rows.output.value, -self.cfg.value_clip, self.cfg.value_clip)
        return jnp.maximum(error, (rows.output.value + move - rows.target) ** 2)


def _swap_axes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
