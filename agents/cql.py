"""Conservative Q-learning, Kumar et al. (2020), https://arxiv.org/abs/2006.04779.

An agent whose critics also learn that actions which the data lacks are worth less: the loss of each
critic has ``weight * (logsumexp over actions of Q - Q of the action taken)`` besides (equation 4,
CQL(H)). `CQL` does this to SAC, for continuous actions, and `DiscreteCQL` to DQN. The constants are
those of the authors' programs, https://github.com/aviralkumar2907/CQL.

For continuous actions the logsumexp is an integral, which is estimated by importance sampling from
uniform actions and from the policy's at both ends of the transition (appendix F). Deviations: the
weight is constant, without the Lagrange multiplier that the program may learn; the policy never
imitates, where the program's does in its first updates; `DiscreteCQL` is built on double DQN, where
the program's builds on QR-DQN. The rest is SAC and DQN, with their deviations.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.agents.registry import register
from rlstack.agents.sac import SAC, SACConfig, SACParams
from rlstack.checks import ActionKindError
from rlstack.exploration import initial_counts
from rlstack.families import q_learning
from rlstack.families.off_policy import sampling_policy
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import policy_and_critic, q_network
from rlstack.optimizers import OptimizerConfig
from rlstack.stateful_params import evaluating
from rlstack.types import Array, Batch, Logs, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class CQLConfig(SACConfig):
    """Hyperparameters of CQL: those of SAC, and those of the penalty."""

    random_frames: int = 0
    """Number of frames with random actions at the start, in all environments together."""
    soft_targets: bool = False
    """Whether the critics' targets include the policy's entropy."""
    policy_optimizer: OptimizerConfig | None = OptimizerConfig(learning_rate=1e-4, eps=1e-8)
    """Optimizer of the policy. None takes optimizer."""
    temperature_optimizer: OptimizerConfig | None = OptimizerConfig(learning_rate=1e-4, eps=1e-8)
    """Optimizer of the temperature's logarithm; None takes optimizer."""
    conservative_weight: float = 5.0
    """Alpha of equation 4: weight of the penalty on the values of actions that the data lacks. The
    equation halves the squared error and the authors' program does not, so its min_q_weight has
    twice this value for the same objective."""
    num_sampled: int = 10
    """Number of actions drawn from each of three distributions, to estimate the penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "conservative_weight")
        self.require_at_least(1, "num_sampled")


@register(
    CQLConfig,
    network=policy_and_critic,
    policy=sampling_policy,
    recorded="any",
    older_runtime=False,
)
class CQL(SAC):
    """The agent; construct it as `rlstack.agent.Agent` says, with `policy_and_critic` networks."""

    cfg: CQLConfig

    def __init__(self, cfg: CQLConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if self._bounds is None:
            raise ActionKindError(
                f"CQL: the action must be continuous; got {self.action_spec}. Use DiscreteCQL."
            )

    def loss(
        self,
        rng_key: PRNGKey,
        params: SACParams,
        target_critics: Params,
        batch: Batch,
        moves: Array | None = None,
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss of SAC and the penalty, (logs, mean |TD errors| [B])."""
        penalty_key, rng_key = jax.random.split(rng_key)
        loss, (logs, errors) = super().loss(rng_key, params, target_critics, batch, moves)
        transition = n_step(batch.trajectory, self.cfg.discount)
        penalties = self.penalties(penalty_key, params, transition)
        penalties = jnp.where(transition.valid[:, None], penalties, 0.0)
        gap = jnp.mean(batch.weights * penalties.sum(-1))
        loss += self.cfg.conservative_weight * gap
        return loss, ({**logs, "loss": loss, "conservative_gap": gap}, errors)

    def penalties(self, rng_key: PRNGKey, params: SACParams, transition: NStep) -> Array:
        """Returns each critic's logsumexp over actions less the value of the one taken, [B, N]."""
        assert self._bounds is not None
        count, timestep = self.cfg.num_sampled, transition.timestep
        taken = self._bounds.to_unit(transition.action)
        fixed, no_counts = jax.lax.stop_gradient(evaluating(params)), initial_counts(0)
        uniform_key, now_key, end_key = jax.random.split(rng_key, 3)
        actions = jax.random.uniform(uniform_key, (count, *taken.shape), minval=-1.0, maxval=1.0)
        densities = jnp.full((count, len(taken)), -taken.shape[-1] * math.log(2.0))
        found = [(actions, densities)]
        for key, steps in ((now_key, timestep), (end_key, transition.end)):
            distribution: Any = self.action_distribution(key, fixed, steps, no_counts)
            keys = jax.random.split(key, count)
            found.append(jax.vmap(distribution.sample_and_log_prob)(keys))
        actions, densities = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
        values = jax.vmap(lambda action: self.critic_values(params.critics, timestep, action))(
            actions
        )
        integral = jax.nn.logsumexp(values - densities[..., None], axis=0) - math.log(3 * count)
        return integral - self.critic_values(params.critics, timestep, taken)


@dataclasses.dataclass(frozen=True)
class DiscreteCQLConfig(DQNConfig):
    """Hyperparameters of CQL of discrete actions: those of DQN, and the weight of the penalty."""

    epsilon_start: float = 0.05
    """Probability of a random action at the first frame."""
    conservative_weight: float = 1.0
    """Alpha: weight of the penalty on the values of actions that the data lacks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "conservative_weight")


@register(DiscreteCQLConfig, network=q_network, policy=q_learning.behaviour_policy, recorded="any")
class DiscreteCQL(DQN):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values."""

    cfg: DiscreteCQLConfig

    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss of DQN and the penalty, (logs, ``|TD errors|`` ``[B]``)."""
        loss, (logs, errors) = super().loss(rng_key, params, target_params, batch)
        transition = n_step(batch.trajectory, self.cfg.discount)
        values = self.outputs(jax.random.split(rng_key)[0], params, transition.timestep)
        policy = q_learning.preferences(values, transition.timestep)
        gaps = jnp.where(transition.valid, -policy.log_prob(transition.action), 0.0)
        gap = jnp.mean(batch.weights * gaps)
        loss += self.cfg.conservative_weight * gap
        return loss, ({**logs, "loss": loss, "conservative_gap": gap}, errors)
