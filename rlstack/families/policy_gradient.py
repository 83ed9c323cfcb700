"""The base class of policy-gradient agents; each agent estimates the advantage itself.

The learner runs its own network over an unroll, from the stored state of the unroll's first step.
Over the unroll's true transitions it minimises

    - advantage x log probability + value_cost x 0.5 (target - value)^2 - entropy_cost x entropy

where advantage and target are constants that the agent's ``loss`` estimates. Actions may be of any
kind in `rlstack.distributions`. A ratio or log probability refers to the whole action, which may
have several numbers or a structure. Losses are means over transitions. To use the values of a paper
that sums losses, divide its gradient norm and Adam's eps by the number of transitions in a batch,
and RMSProp's eps, which is added to squares, by the square of this number.

A network with state or dropout learns in training mode: log-probabilities, values and entropies of
the loss are those of that mode. It acts in evaluation mode, so the ratio to the behaviour policy is
not exactly 1 in an update's first pass. Acting with dropout would not make it 1, because the
learner draws other units.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.checks import Checked
from rlstack.exploration import initial_counts
from rlstack.networks import ActorCriticOutput
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import Components, OptimizerConfig, component_optimizer
from rlstack.stateful_params import training, weight_gradients
from rlstack.types import (
    AgentState,
    Array,
    LearnerOutput,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
    Trajectory,
)


@dataclasses.dataclass(frozen=True)
class PolicyGradientConfig(Checked):
    """Hyperparameters that these agents share."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus."""
    value_cost: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of all components without their own optimizer."""
    torso_optimizer: OptimizerConfig | None = None
    """Optimizer of the torsos and the recurrent core. None takes optimizer, as for all components;
    on the command line, options not given are those of optimizer."""
    policy_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy head; None takes optimizer."""
    value_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the value head; None takes optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("discount", 0 <= self.discount <= 1, "in [0, 1]")
        self.require_at_least(0, "entropy_cost", "value_cost", "max_grad_norm")

    def components(self) -> Components:
        """Returns the optimizers of components, by the names of their modules."""
        return {
            ("policy_head",): self.policy_head_optimizer,
            ("value_head",): self.value_head_optimizer,
            ("torso", "policy_torso", "value_torso", "core"): self.torso_optimizer,
        }

    def make_optimizer(self) -> optax.GradientTransformation:
        """Makes the optimizer of an actor-critic network."""
        return component_optimizer(self.optimizer, self.components(), self.max_grad_norm)


class PolicyGradientOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: PyTree  # [B, ...] as drawn: environments clip continuous actions to their bounds
    behaviour_log_prob: Array  # [B] float32; [B, K] if the agent stores K parts
    value: Array  # [B] float32, of the acting network


class PolicyGradientState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    rng_key: PRNGKey
    num_updates: Array  # [] int32, optimizer steps so far


class Unrolled(NamedTuple):
    """The learner's network on T transitions; ``mask`` is True for true transitions."""

    reward: Array  # [T, B] float32
    discount: Array  # [T, B] float32, the agent's times the environment's
    mask: Array  # [T, B] bool, False where there is no transition to learn from
    value: Array  # [T + 1, B] float32
    log_prob: Array  # [T, B] float32, of the actions taken
    log_rhos: Array  # [T, B] float32, log_prob minus the behaviour's
    entropy: Array  # [T, B] float32


class PolicyGradientAgent(Agent):
    """An agent with an actor-critic network and a `PolicyGradientConfig`; subclasses add `loss`.

    An agent that makes several passes over a batch is also an `rlstack.agent.EpochAgent`, for
    example PPO.
    """

    cfg: Any
    has_values = True

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._optimizer = cfg.make_optimizer()

    def trajectory_values(self, params: Params, trajectory: Trajectory) -> Array:
        """Returns the values that the acting network gave."""
        del params
        return trajectory.agent_output.value

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns newly initialised network parameters."""
        return self.network.init(rng_key)

    def initial_state(self, batch_size: int) -> AgentState:
        """Returns the recurrent core's initial state, ``[B, ...]``, or ()."""
        return self.network.initial_state(batch_size)

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> PolicyGradientState:
        """Returns the optimizer's initial state and the learner's key."""
        return PolicyGradientState(self._optimizer.init(params), rng_key, jnp.zeros((), jnp.int32))

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[PolicyGradientOutput, AgentState]:
        """Draws actions for ``[B, ...]`` steps from the policy."""
        output, state = self.network.apply(None, params, timestep, state)
        distribution = self.distribution(output, timestep)
        action = self.policy(rng_key, distribution, initial_counts(timestep.step_type.shape[0]))
        return PolicyGradientOutput(
            action, self.log_prob(distribution, action), output.value
        ), state

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> distributions.Distribution:
        """Returns the policy."""
        del rng_key
        return self.distribution(self.network.apply(None, params, timestep, state)[0], timestep)

    def log_prob(self, distribution: distributions.Distribution, action: PyTree) -> Array:
        """Returns the log probability that acting stores with an action, ``[B]``."""
        return distribution.log_prob(action)

    def distribution(
        self, output: ActorCriticOutput, timestep: TimeStep
    ) -> distributions.Distribution:
        """Returns the policy at ``timestep``; the observation may contain an action mask."""
        return distributions.from_parameters(
            self.action_spec, output.policy, action_mask(timestep.observation)
        )

    @abc.abstractmethod
    def loss(self, params: Params, batch: Any) -> tuple[Array, Logs]:
        """Returns the loss on a Batch (of an EpochAgent: on rows of a batch), and logs."""

    def unrolled(self, params: Params, trajectory: Trajectory) -> Unrolled:
        """Runs the network over a trajectory ``[T+1, B, ...]`` from its first stored state."""
        state = jax.tree.map(lambda x: x[0], trajectory.agent_state)
        output, _ = self.network.unroll(None, params, trajectory.timestep, state)
        policy, before = jax.tree.map(lambda x: x[:-1], (output, trajectory))
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        distribution = self.distribution(policy, before.timestep)
        log_prob = distribution.log_prob(before.agent_output.action)
        return Unrolled(
            reward=after.reward,
            discount=after.discount * self.cfg.discount,
            mask=~after.first(),
            value=output.value,
            log_prob=log_prob,
            log_rhos=log_prob - before.agent_output.behaviour_log_prob,
            entropy=distribution.entropy(),
        )

    def compute_gradients(
        self, params: Params, learner_state: PolicyGradientState, batch: Any
    ) -> tuple[Params, LearnerOutput]:
        """Returns the gradient of `loss` with respect to the weights, and its logs."""
        learned = training(learner_state.rng_key, params, learner_state.num_updates)
        grads, logs = weight_gradients(lambda params: self.loss(params, batch), learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)})

    def update_network_state(
        self, params: Params, learner_state: PolicyGradientState, batch: Any
    ) -> Params:
        """Returns the params with the state after a pass over the batch."""
        if self.network.new_state is None:
            return params
        learned = training(learner_state.rng_key, params, learner_state.num_updates)
        return params._replace(state=self.network.new_state(learned, *self.learned_steps(batch)))

    def learned_steps(self, batch: Any) -> tuple[TimeStep, AgentState]:
        """Returns the steps that `loss` runs the network on, and the state before them."""
        trajectory = batch.trajectory
        return trajectory.timestep, jax.tree.map(lambda x: x[0], trajectory.agent_state)

    def update_learner_state(
        self, params: Params, learner_state: PolicyGradientState, opt_state: optax.OptState
    ) -> PolicyGradientState:
        """Stores the optimizer's state and counts the update."""
        del params
        num_updates = learner_state.num_updates + 1
        return learner_state._replace(opt_state=opt_state, num_updates=num_updates)


def actor_critic_loss(
    cfg: PolicyGradientConfig, unrolled: Unrolled, advantages: Array, targets: Array
) -> tuple[Array, Logs]:
    """Returns the loss described at the top of this file, and logs.

    Args:
      cfg: the weights of the terms.
      unrolled: the network's outputs.
      advantages: ``[T, B]``. No gradient flows through them or through the targets.
      targets: ``[T, B]``, the targets of the values.
    """
    advantages, targets = jax.lax.stop_gradient((advantages, targets))
    mask = unrolled.mask
    policy_loss = -masked_mean(advantages * unrolled.log_prob, mask)
    value_loss = 0.5 * masked_mean((targets - unrolled.value[:-1]) ** 2, mask)
    entropy = masked_mean(unrolled.entropy, mask)
    loss = policy_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy
    explained = explained_variance(unrolled.value[:-1], targets, mask)
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "kl": kl_estimate(unrolled.log_rhos, mask),
        "explained_variance": jax.lax.stop_gradient(explained),
    }


def weighted_as_acted(unrolled: Unrolled, advantages: Array, targets: Array) -> tuple[Array, Array]:
    """Weights on-policy estimates by the change of the actions' probabilities since acting.

    Unrolls overlap by one step, so the params before the last update chose the first action of an
    unroll, also in lock-step. The weight of a step is ``min(1, ratio)``, with the ratio of the
    learner's probability of the action to that in acting, as in V-trace (Espeholt et al. 2018,
    section 4.1, with rho-bar 1 and one-step traces). It is 1 for actions of the learner's own
    policy.

    Args:
      unrolled: the network's outputs.
      advantages: ``[T, B]``.
      targets: ``[T, B]``, the targets of the values.

    Returns:
      The weighted advantages, and targets that are as much nearer to the values.
    """
    weights = jnp.exp(jnp.minimum(unrolled.log_rhos, 0.0))
    values = unrolled.value[:-1]
    return weights * advantages, values + weights * (targets - values)


def masked_mean(x: Array, mask: Array) -> Array:
    """Returns the mean of ``x`` where ``mask`` is True; 0 if it is True nowhere."""
    return jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def kl_estimate(log_ratios: Array, mask: Array) -> Array:
    """Estimates the KL divergence of the learner's policy from the one that acted, [] float32.

    It is the mean of Schulman's k3, ``exp(x) - 1 - x`` >= 0 (http://joschu.net/blog/kl-approx.html).
    Larger log ratios count as 20: an action that the old policy took with density exp(-100), which
    losses with clipped ratios bear, would make the mean infinite.

    Args:
      log_ratios: log probability by the learner's policy minus that by the one that acted.
      mask: True for the entries that count in the mean.
    """
    x = jnp.minimum(log_ratios, 20.0)
    return masked_mean(jnp.exp(x) - 1 - x, mask)


def explained_variance(values: Array, targets: Array, mask: Array) -> Array:
    """Returns the share of the targets' variance that the values explain, [] float32.

    It is ``1 - Var(targets - values) / Var(targets)`` where ``mask`` is True: 1 if the values are
    the targets, 0 if they are as good as a constant, and negative if they are worse. 0 if the
    targets do not vary.
    """

    def variance(x: Array) -> Array:
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    total = variance(targets)
    varies = total > 0
    return jnp.where(varies, 1 - variance(targets - values) / jnp.where(varies, total, 1.0), 0.0)


def standardised(x: Array, mask: Array, epsilon: float = 1e-8) -> Array:
    """Standardises ``x`` to mean 0 and standard deviation 1 where ``mask`` is True; 0 elsewhere.

    ``epsilon`` is added to the standard deviation before the division.
    """
    centred = jnp.where(mask, x - masked_mean(x, mask), 0.0)
    return centred / (jnp.sqrt(masked_mean(centred**2, mask)) + epsilon)
