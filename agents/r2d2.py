"""Recurrent replay distributed DQN, Kapturowski et al. (2019), openreview.net/forum?id=r1lyTjAqYX.

Double Q-learning with n-step targets on sequences from replay: the first ``burn_in`` steps only
bring the recurrent state stored with a sequence's first step up to date; rewards are neither
clipped nor scaled, but values are rescaled (paper, section 2.3); and a sequence's priority mixes
the largest and the mean TD error of its steps. An item of replay is one sequence. Its
``unroll_length`` is burn_in plus the transitions that are learned from; in the paper half of these
overlap (``period``).

Deviations: the network does not see the last action and reward; new sequences enter replay with the
largest priority so far instead of the actor's own estimate; items may span episodes: there the
core's state is reset, and no target crosses the boundary; the last transitions of a sequence have
targets of fewer than n steps. A noisy network acts and learns with its mean weights. A truncated
episode is bootstrapped from its true last observation. A network with state or dropout computes the
values after the burn-in in training mode; these also choose the next actions.

The loss is a sum over the transitions of a sequence and a mean over sequences, unlike those of the
other agents, which are means over transitions. So are those of the published programs: SEED RL
(github.com/google-research/seed_rl, agents/r2d2/learner.py) and Acme
(github.com/google-deepmind/acme, acme/agents/jax/r2d2/learning.py). The gradient's largest norm and
Adam's eps, which SEED RL also has, are those of this sum: it grows with the sequence's length, and
a mean over n transitions has the same updates with both divided by n.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.checks import Checked
from rlstack.exploration import EpsilonGreedy, EpsilonLadder, Policy
from rlstack.families.q_learning import (
    QOutput,
    SequenceQLearning,
    SequenceState,
    TargetLearnerState,
    preferences,
    values_of,
)
from rlstack.math import returns
from rlstack.networks import q_network_without_noise
from rlstack.optimizers import OptimizerConfig
from rlstack.stateful_params import training
from rlstack.types import Array, Batch, Logs, Params, TimeStep

R2D2Output, R2D2State = QOutput, SequenceState


@dataclasses.dataclass(frozen=True)
class R2D2Config(Checked):
    """Hyperparameters of R2D2; defaults follow the paper (sections 2.3 and 3, table 2).

    The authors of SEED RL publish the same values of burn-in, n-step targets, rescaling, clipping
    and Adam's eps. The last two belong to a loss that is summed over time: the module says more.
    """

    discount: float = 0.997
    """Discount of future rewards, per step."""
    burn_in: int = 40
    """Steps at the beginning of a sequence that only bring the recurrent state up to date."""
    n_step: int = 5
    """Number of transitions before a target bootstraps."""
    rescale_values: bool = True
    """Whether the network predicts h(value), with h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x."""
    rescaling_eps: float = 1e-3
    """The eps of h, see rescale_values."""
    priority_max_share: float = 0.9
    """eta: a sequence's priority is eta times the largest TD error plus 1 - eta times their
    mean."""
    target_period: int = 2500
    """Updates between two copies of the params to the target. Ignored if target_rate is above 0."""
    target_rate: float = 0.0
    """Fraction by which the target moves towards the params at each update. 0: copies every
    target_period."""
    max_grad_norm: float = 40.0
    """Global norm that gradients are clipped to (Ape-X); 0 does not clip. The gradient is that of a
    sum over the transitions of a sequence."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, eps=1e-3)
    """Optimizer of all components without their own optimizer."""
    torso_optimizer: OptimizerConfig | None = None
    """Optimizer of all layers before the heads. None takes optimizer, as for all components; on the
    command line, options not given are those of optimizer."""
    value_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the heads, which give the actions' values; None takes optimizer."""
    epsilon_base: float = 0.4
    """Environment i of N takes random actions with probability base ** (1 + alpha i / (N - 1))."""
    epsilon_alpha: float = 7.0
    """The alpha of these probabilities. Base and alpha are those of Ape-X, Horgan et al. 2018."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("discount", "priority_max_share", "target_rate"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        self.require_at_least(0, "burn_in")
        self.require_at_least(1, "n_step", "target_period")
        self.require("rescaling_eps", self.rescaling_eps > 0, "positive, or h has no inverse")


def behaviour_policy(cfg: R2D2Config, num_envs: int) -> Policy:
    """Returns epsilon-greedy with a different epsilon for each environment."""
    return EpsilonGreedy(EpsilonLadder(num_envs, cfg.epsilon_base, cfg.epsilon_alpha))


@register(R2D2Config, network=q_network_without_noise, policy=behaviour_policy)
class R2D2(SequenceQLearning):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values."""

    cfg: R2D2Config
    reads_first_state = True

    def __init__(self, cfg: R2D2Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if not jax.tree.leaves(self.network.initial_state(1)):
            raise ValueError(
                "R2D2: the network must be recurrent; got one without a state. Use --network.core "
                "lstm, or dqn, which learns from transitions."
            )

    def update_network_state(
        self, params: Params, learner_state: TargetLearnerState, batch: Batch
    ) -> Params:
        """Returns the params with the state after a pass over the steps after the burn-in."""
        if self.network.new_state is None:
            return params
        learned = training(learner_state.rng_key, params, learner_state.num_updates)
        steps = self.after_burn_in(params, batch.trajectory)
        return params._replace(state=self.network.new_state(learned, *steps))

    def loss(
        self, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss, (logs, priorities ``[B]``).

        The loss, also that of the logs, is half the sum of the squared TD errors of a sequence's
        valid transitions, times the sequence's weight, in the mean over sequences. The logged
        ``td_error`` is the mean ``|TD error|`` of single transitions.
        """
        values = self.values(params, batch.trajectory)
        target_values = self.values(target_params, batch.trajectory)
        learned = jax.tree.map(lambda x: x[self.cfg.burn_in :], batch.trajectory)
        targets = jax.lax.stop_gradient(self.targets(values, target_values, learned.timestep))
        chosen = values_of(values[:-1], learned.agent_output.action[:-1])
        valid = ~learned.timestep.first()[1:]  # LAST -> FIRST is no transition
        td_error = jnp.where(valid, targets - chosen, 0.0)
        loss = jnp.mean(batch.weights * 0.5 * jnp.square(td_error).sum(axis=0))
        priorities = self.priorities(td_error, valid)
        logs: Logs = {
            "loss": loss,
            "value": jnp.mean(chosen),
            "td_error": jnp.abs(td_error).mean(),
            "priority": jnp.mean(priorities),
        }
        return loss, (logs, priorities)

    def targets(self, values: Array, target_values: Array, timestep: TimeStep) -> Array:
        """Returns n-step double Q-learning targets, ``[T, B]`` (paper, equation 1).

        Args:
          values: ``[T + 1, B, A]``, of the online network, which chooses the action.
          target_values: ``[T + 1, B, A]``, of the target network, which values the action.
          timestep: ``[T + 1, B, ...]``.
        """
        value = values_of(target_values, preferences(values, timestep).mode())
        rescaled, eps = self.cfg.rescale_values, self.cfg.rescaling_eps
        after = jax.tree.map(lambda x: x[1:], timestep)
        n_step_returns = returns.n_step_returns(
            rewards=after.reward,
            discounts=after.discount * self.cfg.discount,
            bootstrap_values=returns.signed_parabolic(value, eps) if rescaled else value,
            n=self.cfg.n_step,
            mask=~after.first(),
        )
        return returns.signed_hyperbolic(n_step_returns, eps) if rescaled else n_step_returns

    def priorities(self, td_error: Array, valid: Array) -> Array:
        """Returns ``eta max |TD error| + (1 - eta) mean |TD error|`` over valid steps, ``[B]``."""
        size = jnp.abs(td_error)  # 0 where not valid
        mean = size.sum(axis=0) / jnp.maximum(valid.sum(axis=0), 1)
        eta = self.cfg.priority_max_share
        return eta * size.max(axis=0) + (1 - eta) * mean
