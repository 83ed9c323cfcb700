"""CrossQ, Bhatt et al. (2024), https://arxiv.org/abs/1902.05605, SAC without target networks.

The critics have batch norm. One pass of them, in training mode, takes the actions that were taken
and, beside them, the policy's actions at the next steps, so that both have the same statistics; the
second half makes the targets, without gradients. Policy and temperature are updated at every third
update of the critics, and Adam forgets the direction of gradients sooner (beta 1 of 0.5).

The network is an option: the paper's has wide critics (``--network.critic.hidden-sizes 2048 2048``)
and ``norm`` batch_renorm with ``norm_place`` outer, ``batch_norm_decay`` 0.99 and ``renorm_after``
100,000, in critics and policy; the preset ``hopper-crossq`` has these options. Deviations: those of
SAC; the policy is updated from the params before the update of the critics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.agents.sac import SAC, SACConfig, SACLearnerState, SACParams
from rlstack.families.off_policy import CriticLosses, sampling_policy, squared_errors, with_action
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import policy_and_critic
from rlstack.optimizers import OptimizerConfig
from rlstack.stateful_params import evaluating
from rlstack.types import Array, Batch, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class CrossQConfig(SACConfig):
    """Hyperparameters of CrossQ, with the paper's values."""

    policy_period: int = 3
    """Updates of the critics for each update of the policy and the temperature."""
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=1e-3, eps=1e-8, arguments={"b1": 0.5}
    )
    """Optimizer of all components without their own optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = self.target_rate == SACConfig.target_rate
        self.require("target_rate", unused, "left out: there are no target networks")
        self.require_plain_targets("targets are the smallest value of all critics")


@register(CrossQConfig, network=policy_and_critic, policy=sampling_policy)
class CrossQ(SAC):
    """The agent; construct it with `policy_and_critic` networks whose critic has batch norm."""

    cfg: CrossQConfig

    def __init__(self, cfg: CrossQConfig, *args: Any, **kwargs: Any) -> None:
        """Checks the networks.

        Raises:
          ValueError: the critic has no state, such as the statistics of batch norm.
        """
        super().__init__(cfg, *args, **kwargs)
        if self.critics.new_state is None:
            raise ValueError(
                "CrossQ: the critic must have batch norm, which takes the place of targets; got a "
                "network without state. Use --network.norm batch_renorm, or the agent SAC."
            )

    def initial_learner_state(self, rng_key: PRNGKey, params: SACParams) -> SACLearnerState:
        """Returns the optimizer's initial state, without a target."""
        return super().initial_learner_state(rng_key, params)._replace(target_critics=())

    def critic_losses(
        self,
        rng_key: PRNGKey,
        critics: Params,
        fixed: SACParams,
        target_critics: Params,
        transition: NStep,
    ) -> CriticLosses:
        """Returns the squared TD errors of one pass over both halves (figure 2 of the paper)."""
        del target_critics
        seen, log_prob = self._joint(rng_key, fixed, transition)
        outputs = self.critics.apply(None, critics, seen, ())[0]
        now, end = jnp.split(outputs, 2)
        if self._bounds is None:
            probs = self.policy_distribution(fixed.policy, transition.end).probs()
            value = (probs * end.min(1)).sum(-1)
            now = jnp.take_along_axis(now, transition.action[:, None, None], axis=2).squeeze(2)
        else:
            value = end.min(1)
        soft_value = value - self.entropy_weight(fixed) * log_prob
        target = transition.reward + transition.discount * soft_value
        return squared_errors(target, now, transition.valid)

    def learned_by_critics(
        self, params: SACParams, learner_state: SACLearnerState, batch: Batch
    ) -> TimeStep:
        """Returns both halves, as `critic_losses` draws them, ``[1, 2 B, ...]``."""
        end_key = jax.random.split(jax.random.split(learner_state.rng_key)[1])[1]
        transition = n_step(batch.trajectory, self.cfg.discount)
        seen, _ = self._joint(end_key, evaluating(params), transition)
        return jax.tree.map(lambda x: x[None], seen)

    def _joint(
        self, rng_key: PRNGKey, params: SACParams, transition: NStep
    ) -> tuple[TimeStep, Array]:
        """Returns steps ``[2 B, ...]`` for the critics, and log probabilities at the end, ``[B]``.

        For discrete actions these are minus the entropy.
        """
        distribution = self.policy_distribution(params.policy, transition.end)
        if self._bounds is None:
            halves, log_prob = (transition.timestep, transition.end), -distribution.entropy()
        else:
            action, log_prob = distribution.sample_and_log_prob(rng_key)
            halves = (
                self.critic_input(transition.timestep, transition.action),
                with_action(transition.end, action),  # it is in [-1, 1]
            )
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), *halves), log_prob

    def update_learner_state(
        self, params: SACParams, learner_state: SACLearnerState, opt_state: Any
    ) -> SACLearnerState:
        """Stores the optimizers' states, and updates the key and the count."""
        return super().update_learner_state(params._replace(critics=()), learner_state, opt_state)
