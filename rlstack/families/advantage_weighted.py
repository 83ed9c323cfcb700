"""The base of agents whose policy imitates actions of data, weighted by their advantages.

AWAC and IQL are such agents. Their policy never asks a critic about an action that is not in the
data, so they learn from a dataset, and go on with what they collect themselves. Continuous actions
are learned in [-1, 1], by a Gaussian whose mean is squashed by tanh and whose standard deviation
does not depend on the observation; drawn actions are clipped. So an action at a bound has an
ordinary density, which a squashed Gaussian does not give it. Discrete actions may be masked.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from dm_env import specs

from rlstack import distributions
from rlstack.configs.network import NetworkConfig
from rlstack.distributions import Normal
from rlstack.exploration import Counts, next_counts
from rlstack.families.off_policy import PolicyAndCriticsConfig, SampledAgent
from rlstack.math.n_step import NStep
from rlstack.networks import PolicyAndCritic, policy_and_critic
from rlstack.networks.actor_critic import policy_network
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import Components, component_optimizer
from rlstack.stateful_params import moved_towards, training, weight_gradients
from rlstack.types import Array, Batch, LearnerOutput, Logs, Params, PRNGKey, PyTree, TimeStep

_MOST_LOG_STD = 2.0


@dataclasses.dataclass(frozen=True)
class AdvantageWeightedConfig(PolicyAndCriticsConfig):
    """Hyperparameters that these agents share."""

    random_frames: int = 0
    """Number of frames with random actions at the start, in all environments together."""
    min_log_std: float = -5.0
    """Smallest log standard deviation of continuous actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("min_log_std", -20 <= self.min_log_std <= _MOST_LOG_STD, "in [-20, 2]")


class AdvantageWeightedOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B] int32, or [B, D] float32 within the spec's bounds


class AdvantageWeightedParams(NamedTuple):
    """The params that the learner publishes."""

    policy: Params
    critics: Params  # [N, ...]
    state_value: Params  # () without a network of state values


class AdvantageWeightedState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    target_critics: Params  # [N, ...]
    rng_key: PRNGKey


def imitator_and_critic(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> PolicyAndCritic:
    """Builds `policy_and_critic` networks whose standard deviation is the same everywhere."""
    cfg = cfg or NetworkConfig(hidden_sizes=(256, 256), activation="relu")
    plain = dataclasses.replace(cfg, policy_log_std=NetworkConfig.policy_log_std)
    both = policy_and_critic(obs_spec, action_spec, plain)
    of_policy = dataclasses.replace(
        cfg, critic_input=NetworkConfig.critic_input, critic=NetworkConfig.critic
    )
    return both._replace(policy=policy_network(obs_spec, action_spec, of_policy))


class AdvantageWeightedAgent(SampledAgent):
    """Acts by the policy; a subclass defines `loss`."""

    cfg: AdvantageWeightedConfig

    def __init__(self, cfg: AdvantageWeightedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        components: Components = {
            ("policy",): cfg.policy_optimizer,
            ("critics",): cfg.critics_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> AdvantageWeightedParams:
        """Returns newly initialised params of both networks."""
        policy_key, critics_key = jax.random.split(rng_key)
        policy, critics = self.network.policy.init(policy_key), self.critics.init(critics_key)
        return AdvantageWeightedParams(policy, critics, ())

    def initial_learner_state(
        self, rng_key: PRNGKey, params: AdvantageWeightedParams
    ) -> AdvantageWeightedState:
        """Returns the optimizer's initial state, with the critics as the target."""
        return AdvantageWeightedState(self._optimizer.init(params), params.critics, rng_key)

    def action_distribution(
        self, rng_key: PRNGKey, params: AdvantageWeightedParams, timestep: TimeStep, state: Counts
    ) -> distributions.Categorical | Normal:
        """Returns the policy; continuous actions are scaled so that their bounds are -1 and 1."""
        del rng_key, state
        return self.distribution(params.policy, timestep)

    def actor_step(
        self, rng_key: PRNGKey, params: AdvantageWeightedParams, timestep: TimeStep, state: Counts
    ) -> tuple[AdvantageWeightedOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps; continuous ones are clipped to the bounds."""
        distribution = self.action_distribution(rng_key, params, timestep, state)
        action = self.draw(rng_key, distribution, state)
        return AdvantageWeightedOutput(action), next_counts(state, timestep)

    def compute_gradients(
        self, params: AdvantageWeightedParams, learner_state: AdvantageWeightedState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the mean ``|TD error|`` as priorities."""
        loss_key = jax.random.split(learner_state.rng_key)[1]
        learned = training(learner_state.rng_key, params)

        def loss(params: AdvantageWeightedParams) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(loss_key, params, learner_state.target_critics, batch)

        grads, (logs, priorities) = weight_gradients(loss, learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    @abc.abstractmethod
    def loss(
        self,
        rng_key: PRNGKey,
        params: AdvantageWeightedParams,
        target_critics: Params,
        batch: Batch,
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of the losses, (logs, mean ``|TD errors|`` ``[B]``)."""

    def distribution(
        self, policy: Params, timestep: TimeStep
    ) -> distributions.Categorical | Normal:
        """Returns the policy's distribution for ``[B, ...]`` steps."""
        parameters, _ = self.network.policy.apply(None, policy, timestep, ())
        if self._bounds is None:
            return distributions.categorical(parameters, action_mask(timestep.observation))
        mean, log_std = jnp.split(parameters, 2, axis=-1)
        return Normal(jnp.tanh(mean), jnp.clip(log_std, self.cfg.min_log_std, _MOST_LOG_STD))

    def imitation_loss(self, policy: Params, transition: NStep, worth: Array) -> Array:
        """Returns minus the mean over items of worth ``[B]`` times the action's log likelihood."""
        distribution = self.distribution(policy, transition.timestep)
        log_prob = distribution.log_prob(self.unit_action(transition.action))
        # Not a product: the log likelihood at the end of an episode may be -inf.
        return -jnp.where(transition.valid, worth * log_prob, 0.0).mean()

    def update_learner_state(
        self,
        params: AdvantageWeightedParams,
        learner_state: AdvantageWeightedState,
        opt_state: optax.OptState,
    ) -> AdvantageWeightedState:
        """Stores the optimizers' state, and updates the target critics and the key."""
        old = learner_state.target_critics
        target = moved_towards(params.critics, old, self.cfg.target_rate)
        return AdvantageWeightedState(opt_state, target, jax.random.split(learner_state.rng_key)[0])
