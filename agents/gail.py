"""Generative adversarial imitation learning, Ho and Ermon (2016), arXiv:1606.03476, off-policy.

A discriminator learns to tell demonstrations (``replay.demonstrations``) from the agent's own
steps, and its opinion is the reward of SAC, which never sees those of the environment. This is
discriminator-actor-critic (Kostrikov et al. 2019, https://arxiv.org/abs/1809.02925): the reward is
the discriminator's logit, log D - log (1 - D), and the discriminator has a gradient penalty
(section 4.3, equations 4 and 5). The constants are those of that paper.

Deviations: no absorbing states are added, so an episode's end is worth 0; the penalty is taken
between random pairs of rows; SAC instead of TD3, which learns from both kinds of rows, with rewards
of the newest discriminator; one update of both for each batch. The discriminator is a network like
one of the critics.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dm_env import specs

from rlstack.agents.registry import register
from rlstack.agents.sac import SAC, SACConfig, SACLearnerState, SACParams
from rlstack.families.demonstrated import is_demonstrated
from rlstack.families.off_policy import sampling_policy, with_action
from rlstack.networks import policy_and_critic
from rlstack.optimizers import OptimizerConfig, component_optimizer, optimizer_step
from rlstack.types import (
    Array,
    Batch,
    LearnerOutput,
    Logs,
    Params,
    PRNGKey,
    TimeStep,
    merge_leading_dims,
)


@dataclasses.dataclass(frozen=True)
class GAILConfig(SACConfig):
    """Hyperparameters of GAIL: those of SAC, and those of the discriminator."""

    gradient_penalty: float = 10.0
    """Weight of the squared distance of the norm of the discriminator's gradient to 1. The gradient
    is that of real numbers and pixels; discrete observations and actions have none."""
    discriminator: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    """Optimizer of the discriminator."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "gradient_penalty")


class GAILState(NamedTuple):
    """The learner's state."""

    agent: SACLearnerState
    discriminator: Params
    opt_state: optax.OptState
    rng_key: PRNGKey


@register(GAILConfig, network=policy_and_critic, policy=sampling_policy, recorded="demonstrations")
class GAIL(SAC):
    """The agent; construct it as `rlstack.agent.Agent` says, with `policy_and_critic` networks."""

    cfg: GAILConfig
    reads_rewards = False

    def __init__(self, cfg: GAILConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if self.network.critic.new_state is not None:
            raise ValueError(
                "GAIL: the network must have no state and no dropout, because its discriminator "
                "has none. Use --network.norm layer or none, and --network.dropout 0."
            )
        self._discriminator_optimizer = component_optimizer(cfg.discriminator, {}, 0.0)

    def initial_learner_state(self, rng_key: PRNGKey, params: SACParams) -> Any:
        """Returns SAC's state and a newly initialised discriminator."""
        agent_key, own_key, rng_key = jax.random.split(rng_key, 3)
        discriminator = self.network.critic.init(own_key)
        opt_state = self._discriminator_optimizer.init(discriminator)
        agent = super().initial_learner_state(agent_key, params)
        return GAILState(agent, discriminator, opt_state, rng_key)

    def learner_step(
        self, params: SACParams, learner_state: GAILState, batch: Batch
    ) -> tuple[SACParams, GAILState, LearnerOutput]:
        """Updates the discriminator, and then SAC by its rewards."""
        loss_key, rng_key = jax.random.split(learner_state.rng_key)
        gradient = jax.grad(self.discriminator_loss, has_aux=True)
        grads, own_logs = gradient(learner_state.discriminator, loss_key, batch)
        discriminator, opt_state, _ = optimizer_step(
            self._discriminator_optimizer,
            learner_state.discriminator,
            learner_state.opt_state,
            grads,
        )
        rewarded = self.with_rewards(discriminator, batch)
        params, agent_state, output = super().learner_step(params, learner_state.agent, rewarded)
        learner_state = GAILState(agent_state, discriminator, opt_state, rng_key)
        return params, learner_state, output._replace(logs={**output.logs, **own_logs})

    def logits(self, discriminator: Params, timestep: TimeStep, action: Array) -> Array:
        """Returns the log odds that steps and actions are demonstrated, ``[B]``.

        Args:
          discriminator: the discriminator's params.
          timestep: ``[B, ...]``.
          action: ``[B]`` int32, or ``[B, D]`` in [-1, 1].
        """
        if self._bounds is None:
            values, _ = self.network.critic.apply(None, discriminator, timestep, ())
            return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]
        return self.network.critic.apply(None, discriminator, with_action(timestep, action), ())[0]

    def discriminator_loss(
        self, discriminator: Params, rng_key: PRNGKey, batch: Batch
    ) -> tuple[Array, Logs]:
        """Returns the cross-entropy of both kinds of rows, and the penalty; and logs."""
        first = jax.tree.map(lambda x: jnp.asarray(x[0]), batch.trajectory)
        valid = ~(first.timestep.last() | batch.trajectory.timestep.first()[1])
        action, demonstrated = self.unit_action(first.agent_output.action), is_demonstrated(batch)
        logits = self.logits(discriminator, first.timestep, action)
        losses = optax.sigmoid_binary_cross_entropy(logits, demonstrated.astype(jnp.float32))
        right = (logits > 0) == demonstrated

        def mean(x: Array, rows: Array) -> Array:
            return jnp.where(rows, x, 0.0).sum() / jnp.maximum(rows.sum(), 1)

        # Both kinds count alike, whatever their shares are.
        kinds = valid & demonstrated, valid & ~demonstrated
        entropy = mean(losses, kinds[0]) + mean(losses, kinds[1])
        norm = self._gradient_norm(discriminator, rng_key, first.timestep, action)
        penalty = mean(jnp.square(norm - 1.0), valid)
        return entropy + self.cfg.gradient_penalty * penalty, {
            "discriminator_loss": entropy,
            "gradient_penalty": penalty,
            "discriminator_accuracy": 0.5 * (mean(right, kinds[0]) + mean(right, kinds[1])),
        }

    def _gradient_norm(
        self, discriminator: Params, rng_key: PRNGKey, timestep: TimeStep, action: Array
    ) -> Array:
        """Returns the norm of the gradient at points between random pairs of rows, ``[B]``."""
        pair_key, place_key = jax.random.split(rng_key)
        rows = len(timestep.step_type)
        other, place = (
            jax.random.permutation(pair_key, rows),
            jax.random.uniform(place_key, (rows,)),
        )
        observation = jax.tree.map(_pixels_as_floats, self.obs_spec, timestep.observation)
        leaves, structure = jax.tree.flatten((observation, action))
        is_real = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

        def between(x: Array) -> Array:
            share = place.reshape((rows,) + (1,) * (x.ndim - 1))
            return share * x + (1.0 - share) * x[other]

        def total(mixed: list[Array]) -> Array:
            left = iter(mixed)
            parts = [next(left) if real else x for x, real in zip(leaves, is_real, strict=True)]
            observation, taken = structure.unflatten(parts)
            step = timestep._replace(observation=observation)
            return self.logits(discriminator, step, taken).sum()

        mixed = [between(x) for x, real in zip(leaves, is_real, strict=True) if real]
        squares = [jnp.square(x).reshape((rows, -1)).sum(-1) for x in jax.grad(total)(mixed)]
        return jnp.sqrt(sum(squares, jnp.zeros(rows)) + 1e-12)

    def with_rewards(self, discriminator: Params, batch: Batch) -> Batch:
        """Returns the batch with the discriminator's logits as rewards."""
        trajectory = batch.trajectory
        before = jax.tree.map(lambda x: x[:-1], trajectory)

        action = self.unit_action(merge_leading_dims(before.agent_output.action))
        logits = self.logits(discriminator, merge_leading_dims(before.timestep), action)
        timestep = trajectory.timestep
        reward = jnp.where(timestep.first()[1:], 0.0, logits.reshape(timestep.reward[1:].shape))
        reward = jnp.concatenate([jnp.zeros_like(timestep.reward[:1]), reward])
        timestep = timestep._replace(reward=reward)
        return batch._replace(trajectory=trajectory._replace(timestep=timestep))


def _pixels_as_floats(spec: specs.Array, x: Array) -> Array:
    is_pixels = spec.dtype == np.uint8 and not isinstance(spec, specs.DiscreteArray)
    return jnp.asarray(x, jnp.float32) if is_pixels else x
