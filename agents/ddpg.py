"""Deep deterministic policy gradient, Lillicrap et al. (2016), https://arxiv.org/abs/1509.02971.

One critic and a policy that climbs it, each with a slowly moving target (algorithm 1). Deviations:
exploration by independent Gaussian or uniform noise in place of an Ornstein-Uhlenbeck process,
which later work found to do as well; n-step targets (the replay's ``unroll_length``); policy and
critic are moved from the same params, in one pass; the action joins the critic at its first layer.
Noise is in units of half the action's range. A truncated episode is bootstrapped from its true last
observation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.exploration import Counts, next_counts
from rlstack.n_step import n_step
from rlstack.off_policy import PolicyAndCriticsAgent
from rlstack.optimizers import OptimizerConfig, component_optimizer
from rlstack.types import (
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
class DDPGConfig:
    """Hyperparameters of DDPG."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    num_critics: int = 1
    """Critics; of several, of which the paper knows nothing, the least value counts."""
    target_rate: float = 0.005
    """Share of the params that the targets take over at each update (the paper's is 0.001)."""
    noise: Literal["gaussian", "uniform"] = "gaussian"
    """Kind of noise that explores."""
    noise_scale: float = 0.1
    """Standard deviation (gaussian) or largest size (uniform) of that noise, in half-ranges."""
    random_frames: int = 5_000
    """Frames, of all environments together, of random actions at the start."""
    max_grad_norm: float = 0.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the critic."""
    policy_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy; None is the critic's."""

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("discount", 0 <= self.discount <= 1, "in [0, 1]"),
            ("num_critics", self.num_critics >= 1, "at least 1"),
            ("target_rate", 0 < self.target_rate <= 1, "in (0, 1]"),
            ("noise", self.noise in ("gaussian", "uniform"), "gaussian or uniform"),
            ("noise_scale", self.noise_scale >= 0, "at least 0"),
            ("random_frames", self.random_frames >= 0, "at least 0"),
        ):
            if not holds:
                raise ValueError(f"DDPGConfig: {name} must be {rule}; got {getattr(self, name)!r}.")


class DDPGOutput(NamedTuple):
    """What acting leaves for learning."""

    action: Array  # [B, D] float32, within the spec's bounds


class DDPGParams(NamedTuple):
    """What the learner publishes."""

    policy: Params
    critics: Params  # [N, ...]


class DDPGLearnerState(NamedTuple):
    """What the learner keeps."""

    opt_state: Any
    target_params: DDPGParams


class DDPG(PolicyAndCriticsAgent):
    """The agent; construct it with `deterministic_policy_and_critic` networks."""

    cfg: DDPGConfig

    def __init__(self, cfg: DDPGConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._bounds = distributions.bounds_of(self.action_spec, "DDPG")
        self._optimizer = component_optimizer(
            cfg.optimizer, {("policy",): cfg.policy_optimizer}, cfg.max_grad_norm
        )

    def initial_params(self, rng_key: PRNGKey) -> DDPGParams:
        """Returns fresh networks."""
        policy_key, critics_key = jax.random.split(rng_key)
        return DDPGParams(self.network.policy.init(policy_key), self.critics.init(critics_key))

    def initial_learner_state(self, rng_key: PRNGKey, params: DDPGParams) -> DDPGLearnerState:
        """Returns the optimizer's initial state, with the params as target."""
        del rng_key  # nothing in its learning is drawn
        return DDPGLearnerState(self._optimizer.init(params), params)

    def actor_step(
        self, rng_key: PRNGKey, params: DDPGParams, timestep: TimeStep, state: Counts
    ) -> tuple[DDPGOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps, with noise where the policy has any."""
        certain = distributions.Deterministic(self._act(params.policy, timestep))
        unit = self.policy(rng_key, certain, state)
        return DDPGOutput(self._bounds.from_unit(unit)), next_counts(state, timestep)

    def compute_gradients(
        self, params: DDPGParams, learner_state: DDPGLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and ``|TD error|`` as priorities."""
        grads, (logs, priorities) = jax.grad(self.loss, has_aux=True)(
            params, learner_state.target_params, batch
        )
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, params: DDPGParams, target_params: DDPGParams, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of the critic's and the policy's loss, (logs, ``|TD errors|`` ``[B]``).

        Each moves its own part of the params alone; importance weights count for the critic.
        """
        transition = n_step(batch.trajectory, self.cfg.discount)
        end, timestep = transition.end, transition.timestep
        end_action = self._act(target_params.policy, end)
        end_value = self.judge(target_params.critics, end, end_action).min(1)
        target = jax.lax.stop_gradient(transition.reward + transition.discount * end_value)
        taken = self.judge(params.critics, timestep, self._bounds.to_unit(transition.action))
        # An item that begins at the end of an episode holds no transition to learn from.
        td_errors = jnp.where(transition.valid[:, None], target[:, None] - taken, 0.0)
        critic_loss = (batch.weights * 0.5 * jnp.square(td_errors).sum(-1)).mean()

        fixed = jax.lax.stop_gradient(params.critics)
        value = self.judge(fixed, timestep, self._act(params.policy, timestep)).min(1)
        policy_loss = -jnp.where(transition.valid, value, 0.0).mean()
        loss, errors = critic_loss + policy_loss, jnp.abs(td_errors).mean(-1)
        logs = {
            "loss": loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "value": taken.mean(),
            "td_error": errors.mean(),
        }
        return loss, (logs, errors)

    def apply_gradients(
        self, params: DDPGParams, learner_state: DDPGLearnerState, grads: PyTree
    ) -> tuple[DDPGParams, Any, Logs]:
        """Applies the optimizers."""
        updates, opt_state = self._optimizer.update(grads, learner_state.opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    def update_learner_state(
        self, params: DDPGParams, learner_state: DDPGLearnerState, opt_state: Any
    ) -> DDPGLearnerState:
        """Keeps the optimizers' state and moves the targets."""
        old = learner_state.target_params
        target = optax.incremental_update(params, old, self.cfg.target_rate)
        return DDPGLearnerState(opt_state, target)

    def _act(self, policy: Params, timestep: TimeStep) -> Array:
        """The policy's action in [-1, 1], ``[B, D]``."""
        return jnp.tanh(self.network.policy.apply(None, policy, timestep, ())[0])
