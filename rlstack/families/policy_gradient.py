"""What agents that follow the policy gradient share; each estimates the advantage itself.

The learner runs its own network over an unroll from the stored state of the unroll's first step,
and minimises, over its true transitions,

    - advantage x log probability + value_cost x 0.5 (target - value)^2 - entropy_cost x entropy

where advantage and target are constants that the agent estimates (its ``loss``). Actions may be of
any kind in `rlstack.distributions`: a ratio or log probability is of the whole action, which may
have several numbers or a structure. Losses are means over transitions. For papers that sum them,
divide the gradient norm and the optimizer's eps by the number of transitions in a batch.
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
from rlstack.optimizers import OptimizerConfig, component_optimizer, optimizer_step
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
    """Optimizer of all components without an optimizer of their own."""
    torso_optimizer: OptimizerConfig | None = None
    """Optimizer of the torsos and the recurrent core."""
    policy_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy head."""
    value_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the value head."""

    def __post_init__(self) -> None:
        self.require("discount", 0 <= self.discount <= 1, "in [0, 1]")
        self.require_at_least(0, "entropy_cost", "value_cost", "max_grad_norm")

    def make_optimizer(self) -> optax.GradientTransformation:
        """Makes the optimizer of an actor-critic network."""
        return component_optimizer(
            self.optimizer,
            {
                ("policy_head",): self.policy_head_optimizer,
                ("value_head",): self.value_head_optimizer,
                ("torso", "policy_torso", "value_torso", "core"): self.torso_optimizer,
            },
            self.max_grad_norm,
        )


class PolicyGradientOutput(NamedTuple):
    """What acting leaves for learning."""

    action: PyTree  # [B, ...] as drawn: environments clip continuous actions to their bounds
    behaviour_log_prob: Array  # [B] float32; [B, K] of an agent that keeps K parts of it apart
    value: Array  # [B] float32, of the network that acted


class PolicyGradientState(NamedTuple):
    """What the learner keeps."""

    opt_state: optax.OptState
    rng_key: PRNGKey
    num_updates: Array  # [] int32, optimizer steps so far


class Unrolled(NamedTuple):
    """The learner's network on T transitions; ``mask`` marks the real ones."""

    reward: Array  # [T, B] float32
    discount: Array  # [T, B] float32, the agent's times the environment's
    mask: Array  # [T, B] bool, False where there is no transition to learn from
    value: Array  # [T + 1, B] float32
    log_prob: Array  # [T, B] float32, of the actions taken
    log_rhos: Array  # [T, B] float32, log_prob less the behaviour's
    entropy: Array  # [T, B] float32


class PolicyGradientAgent(Agent):
    """An agent with an actor-critic network and a `PolicyGradientConfig`; subclasses add `loss`.

    One that goes over a batch several times is an `rlstack.agent.EpochAgent` too, as PPO is.
    """

    cfg: Any

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._optimizer = cfg.make_optimizer()

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns fresh network parameters."""
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
        action = self.policy(rng_key, distribution, initial_counts(len(timestep.step_type)))
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
        """Returns the policy at ``timestep``, whose observation may tell the legal actions."""
        return distributions.from_parameters(
            self.action_spec, output.policy, action_mask(timestep.observation)
        )

    @abc.abstractmethod
    def loss(self, params: Params, batch: Any) -> tuple[Array, Logs]:
        """Returns the loss on a Batch (an EpochAgent's: on the rows of it), and what to log."""

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
        """Returns the gradient of `loss`, and its logs."""
        del learner_state
        grads, logs = jax.grad(self.loss, has_aux=True)(params, batch)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)})

    def apply_gradients(
        self, params: Params, learner_state: PolicyGradientState, grads: PyTree
    ) -> tuple[Params, optax.OptState, Logs]:
        """Takes one step of the optimizer."""
        return optimizer_step(self._optimizer, params, learner_state.opt_state, grads)

    def update_learner_state(
        self, params: Params, learner_state: PolicyGradientState, opt_state: optax.OptState
    ) -> PolicyGradientState:
        """Keeps the optimizer's state and counts."""
        del params
        num_updates = learner_state.num_updates + 1
        return learner_state._replace(opt_state=opt_state, num_updates=num_updates)


def actor_critic_loss(
    cfg: PolicyGradientConfig, unrolled: Unrolled, advantages: Array, targets: Array
) -> tuple[Array, Logs]:
    """Returns the loss at the top of this file, and logs.

    Args:
      cfg: has the weights of the terms.
      unrolled: the network's outputs.
      advantages: ``[T, B]``; no gradient passes through them, nor through the targets.
      targets: ``[T, B]``, what the values should be.
    """
    advantages, targets = jax.lax.stop_gradient((advantages, targets))
    mask = unrolled.mask
    policy_loss = -masked_mean(advantages * unrolled.log_prob, mask)
    value_loss = 0.5 * masked_mean((targets - unrolled.value[:-1]) ** 2, mask)
    entropy = masked_mean(unrolled.entropy, mask)
    loss = policy_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy
    # Schulman's k3 estimator: how far the learner's policy is from the one that acted.
    kl = masked_mean(jnp.exp(unrolled.log_rhos) - 1 - unrolled.log_rhos, mask)
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "kl": kl,
    }


def masked_mean(x: Array, mask: Array) -> Array:
    """Returns the mean of ``x`` where ``mask`` holds; 0 where it holds nowhere."""
    return jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def standardised(x: Array, mask: Array, epsilon: float = 1e-8) -> Array:
    """Brings ``x`` to mean 0 and deviation 1 where ``mask`` holds; 0 elsewhere.

    ``epsilon`` is added to the deviation that is divided by.
    """
    centred = jnp.where(mask, x - masked_mean(x, mask), 0.0)
    return centred / (jnp.sqrt(masked_mean(centred**2, mask)) + epsilon)
