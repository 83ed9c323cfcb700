"""Behaviour cloning: a policy that imitates recorded actions (Pomerleau 1991,
https://doi.org/10.1162/neco.1991.3.1.88).

The loss is the mean negative log likelihood of the actions taken, under a distribution that depends
on the action: one discrete choice or several, with or without a mask, real numbers (a Gaussian), or
a structure of these. The agent learns from windows of a dataset (`rlstack.storage.datasets`),
without an environment or a replay; the action at the end of an episode had no effect and is left
out. A recurrent network starts every window from the state stored with it. In recorded data this is
the initial state, so use long windows.

One deviation from plain maximum likelihood: standard deviations have a lower bound. Otherwise an
expert that acts deterministically would make the Gaussian narrower without limit, and the
likelihood infinite.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.agents.registry import register
from rlstack.checks import Checked
from rlstack.distributions import Joint, Normal
from rlstack.exploration import initial_counts
from rlstack.networks.actor_critic import policy_network
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import Components, OptimizerConfig, component_optimizer
from rlstack.stateful_params import training, weight_gradients
from rlstack.types import (
    AgentState,
    Array,
    Batch,
    LearnerOutput,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
)


@dataclasses.dataclass(frozen=True)
class BCConfig(Checked):
    """Hyperparameters of behaviour cloning."""

    entropy_cost: float = 0.0
    """Weight of an entropy bonus, which keeps the policy from being more certain than the data."""
    min_log_std: float = -3.0
    """Smallest log standard deviation of continuous actions."""
    max_grad_norm: float = 0.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    """Optimizer of all components without their own optimizer."""
    torso_optimizer: OptimizerConfig | None = None
    """Optimizer of all layers before the head. None takes optimizer, as for all components; on the
    command line, options not given are those of optimizer."""
    policy_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy head; None takes optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "entropy_cost")
        self.require_finite("min_log_std")


class BCOutput(NamedTuple):
    """The output of acting: only the action."""

    action: PyTree  # [B, ...]


class BCLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    rng_key: PRNGKey


@register(BCConfig, network=policy_network, offline=True)
class BC(Agent):
    """The agent; construct it as `rlstack.agent.Agent` says, with a policy network."""

    cfg: BCConfig

    def __init__(self, cfg: BCConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        components: Components = {
            ("torso", "core"): cfg.torso_optimizer,
            ("policy_head",): cfg.policy_head_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns newly initialised network parameters."""
        return self.network.init(rng_key)

    def initial_state(self, batch_size: int) -> AgentState:
        """Returns the recurrent core's initial state, ``[B, ...]``, or ()."""
        return self.network.initial_state(batch_size)

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> BCLearnerState:
        """Returns the optimizer's initial state and the learner's key."""
        return BCLearnerState(self._optimizer.init(params), rng_key)

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> distributions.Distribution:
        """Returns the policy."""
        del rng_key
        return self._distribution(self.network.apply(None, params, timestep, state)[0], timestep)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[BCOutput, AgentState]:
        """Draws actions for ``[B, ...]`` steps from the policy."""
        parameters, state = self.network.apply(None, params, timestep, state)
        distribution = self._distribution(parameters, timestep)
        counts = initial_counts(timestep.step_type.shape[0])
        return BCOutput(self.policy(rng_key, distribution, counts)), state

    def compute_gradients(
        self, params: Params, learner_state: BCLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss` and its logs."""
        learned = training(learner_state.rng_key, params)
        grads, logs = weight_gradients(lambda params: self.loss(params, batch), learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)})

    def update_network_state(
        self, params: Params, learner_state: BCLearnerState, batch: Batch
    ) -> Params:
        """Returns the params with the state after a pass over the windows."""
        if self.network.new_state is None:
            return params
        steps = jax.tree.map(lambda x: x[:-1], batch.trajectory)
        state = jax.tree.map(lambda x: x[0], steps.agent_state)
        learned = training(learner_state.rng_key, params)
        return params._replace(state=self.network.new_state(learned, steps.timestep, state))

    def loss(self, params: Params, batch: Batch) -> tuple[Array, Logs]:
        """Returns the mean negative log likelihood of the actions, less the entropy bonus.

        The mean is over the items' T transitions, weighted by the items' weights.
        """
        steps = jax.tree.map(lambda x: x[:-1], batch.trajectory)
        state = jax.tree.map(lambda x: x[0], steps.agent_state)
        parameters, _ = self.network.unroll(None, params, steps.timestep, state)
        distribution = self._distribution(parameters, steps.timestep)
        weights = jnp.where(steps.timestep.last(), 0.0, batch.weights)
        weights /= jnp.maximum(weights.sum(), 1e-8)

        def mean(x: Array) -> Array:
            # Not a product: a log probability of -inf at the end of an episode times 0 is NaN.
            return jnp.where(weights > 0, x * weights, 0.0).sum()

        log_prob = mean(distribution.log_prob(steps.agent_output.action))
        entropy = mean(distribution.entropy())
        loss = -log_prob - self.cfg.entropy_cost * entropy
        matches = _matches(distribution.mode(), steps.agent_output.action)
        return loss, {
            "loss": loss,
            "log_prob": log_prob,
            "entropy": entropy,
            **{name: mean(x) for name, x in matches.items()},
        }

    def update_learner_state(
        self, params: Params, learner_state: BCLearnerState, opt_state: optax.OptState
    ) -> BCLearnerState:
        """Stores the optimizer's state; for dropout, also replaces the key."""
        learner_state = learner_state._replace(opt_state=opt_state)
        if self.network.new_state is None:
            return learner_state
        return learner_state._replace(rng_key=jax.random.split(learner_state.rng_key)[0])

    def _distribution(self, parameters: Array, timestep: TimeStep) -> distributions.Distribution:
        found = distributions.from_parameters(
            self.action_spec, parameters, action_mask(timestep.observation)
        )
        return _no_narrower(found, self.cfg.min_log_std)


def _no_narrower(distribution: Any, min_log_std: float) -> Any:
    """Returns the distribution with standard deviations of at least ``exp(min_log_std)``."""
    if isinstance(distribution, Joint):
        return Joint(distribution.map(lambda part: _no_narrower(part, min_log_std)))
    if isinstance(distribution, Normal):
        return distribution._replace(log_std=jnp.maximum(distribution.log_std, min_log_std))
    return distribution


def _matches(mode: PyTree, taken: PyTree) -> dict[str, Array]:
    """Compares greedy actions ``[T, B, ...]`` with the actions taken; each result is ``[T, B]``.

    ``accuracy`` is the fraction of equal choices; ``action_error`` is the mean absolute difference
    of real numbers.
    """
    found: dict[str, list[Array]] = {"accuracy": [], "action_error": []}
    for x, y in zip(jax.tree.leaves(mode), jax.tree.leaves(taken), strict=True):
        is_choice = jnp.issubdtype(x.dtype, jnp.integer)
        near = (x == y).astype(jnp.float32) if is_choice else jnp.abs(x - y)
        near = near.reshape((*near.shape[:2], -1)).mean(axis=-1)
        found["accuracy" if is_choice else "action_error"].append(near)
    return {name: sum(x) / len(x) for name, x in found.items() if x}  # type: ignore[misc]
