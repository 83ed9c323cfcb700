"""Multi-agent DDPG, Lowe et al. (2017), https://arxiv.org/abs/1706.02275.

It learns from joint rows (``env.options.joint``) with continuous actions. Each seat has a policy of
its own observation. Critics are centralised: each sees what all seats see and do. By default every
seat has its own critic, which learns the seat's own rewards, and its own policy (algorithm 1); with
``critics`` shared there is one critic of the team's reward, and with ``policies`` shared one policy
that sees the number of the seat. A seat's policy maximises its critic at the actions that the
others took. Seats that are out of the game enter no loss.

Deviations: targets have n steps (the replay's ``unroll_length``); with several critics, the
smallest value is used; policies and critics are updated from the same params; Gaussian noise
explores, where the authors' program (github.com/openai/maddpg) draws actions and penalises large
logits, which it needs for the discrete actions that it relaxes by Gumbel-softmax. Networks have no
state and no dropout. A truncated game is bootstrapped from its true last observations.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.agents.registry import register
from rlstack.checks import WrongKindError
from rlstack.exploration import Counts, initial_counts, next_counts
from rlstack.families.off_policy import (
    DeterministicConfig,
    DeterministicOutput,
    DeterministicParams,
    behaviour_policy,
    with_action,
)
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import PolicyAndCritic, ensemble
from rlstack.networks.seats import (
    one_for_each_seat,
    require_joint,
    seat_policy_and_critic,
    seat_specs,
    shared_by_seats,
)
from rlstack.optimizers import Components, OptimizerConfig, component_optimizer
from rlstack.specs import ALIVE, REWARDS
from rlstack.stateful_params import moved_towards
from rlstack.types import Array, Batch, LearnerOutput, Logs, Params, PRNGKey, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class MADDPGConfig(DeterministicConfig):
    """Hyperparameters of MADDPG."""

    critics: Literal["own", "shared"] = "own"
    """Whether each seat has a critic of its own rewards, or all one critic of the team's reward.
    normalisation.rewards changes only the team's reward."""
    policies: Literal["own", "shared"] = "own"
    """Whether each seat has a policy of its own, or all one that sees the number of the seat."""
    discount: float = 0.95
    """Discount of future rewards, per step; the default is the paper's."""
    num_critics: int = 1
    """Number of critics of a seat, or of all if shared. With several, the smallest value counts."""
    target_rate: float = 0.01
    """Fraction by which the targets move towards the params at each update; the paper's."""
    max_grad_norm: float = 0.5
    """Global norm that gradients are clipped to, as in the authors' program; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2, eps=1e-8)
    """Optimizer of all components without their own optimizer; the paper's learning rate."""


class MADDPGLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    target_params: DeterministicParams


@register(MADDPGConfig, network=seat_policy_and_critic, policy=behaviour_policy)
class MADDPG(Agent):
    """The agent; construct it with `seat_policy_and_critic` networks."""

    cfg: MADDPGConfig
    has_priorities = True

    def __init__(self, cfg: MADDPGConfig, *args: Any, **kwargs: Any) -> None:
        """Makes the networks of all seats.

        Raises:
          ActionKindError: the specs are not those of joint rows with bounded numbers.
          WrongKindError: the network factory did not return a `PolicyAndCritic`.
          ValueError: a network is recurrent.
        """
        super().__init__(cfg, *args, **kwargs)
        if not isinstance(self.network, PolicyAndCritic):
            raise WrongKindError(
                "MADDPG: the network factory must give a PolicyAndCritic; got "
                f"{type(self.network).__name__}. See rlstack.networks.seats."
            )
        if any(jax.tree.leaves(network.initial_state(1)) for network in self.network):
            raise ValueError(
                "MADDPG: the networks must be feed-forward, since transitions carry no recurrent "
                "state."
            )
        one = seat_specs(self.obs_spec, self.action_spec, "MADDPG")
        self._number = one.number
        self._bounds = distributions.bounds_of(one.action, "MADDPG")
        lifted = one_for_each_seat if cfg.policies == "own" else shared_by_seats
        self._policy = lifted(self.network.policy, one.number)
        self._groups = one.number if cfg.critics == "own" else 1
        self._critics = ensemble(self.network.critic, cfg.num_critics)  # of one group
        components: Components = {
            ("policy",): cfg.policy_optimizer,
            ("critics",): cfg.critics_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)

    def check_extras(self, extras: PyTree) -> None:
        """Raises a ValueError unless the extras are those of joint rows."""
        require_joint(extras, "MADDPG")

    def initial_params(self, rng_key: PRNGKey) -> DeterministicParams:
        """Returns newly initialised params of all policies and critics."""
        policy_key, critics_key = jax.random.split(rng_key)
        critics = jax.vmap(self._critics.init)(jax.random.split(critics_key, self._groups))
        return DeterministicParams(self._policy.init(policy_key), critics)

    def initial_learner_state(
        self, rng_key: PRNGKey, params: DeterministicParams
    ) -> MADDPGLearnerState:
        """Returns the optimizer's initial state, with the params as the target."""
        del rng_key
        return MADDPGLearnerState(self._optimizer.init(params), params)

    def initial_state(self, batch_size: int) -> Counts:
        """Returns the counts of steps and episodes of each game, ``[B]``, which are 0."""
        return initial_counts(batch_size)

    def actor_step(
        self, rng_key: PRNGKey, params: DeterministicParams, timestep: TimeStep, state: Counts
    ) -> tuple[DeterministicOutput, Counts]:
        """Chooses the actions ``[B, S, A]``; the exploration policy may add noise."""
        distribution = self.action_distribution(rng_key, params, timestep, state)
        action = self._bounds.from_unit(self.policy(rng_key, distribution, state))
        return DeterministicOutput(action), next_counts(state, timestep)

    def action_distribution(
        self, rng_key: PRNGKey, params: DeterministicParams, timestep: TimeStep, state: Counts
    ) -> distributions.Deterministic:
        """Returns the policies' actions, in [-1, 1], ``[B, S, A]``."""
        del rng_key, state
        return distributions.Deterministic(self.policy_action(params.policy, timestep))

    def policy_action(self, policy: Params, timestep: TimeStep) -> Array:
        """Returns the policies' actions in [-1, 1], ``[B, S, A]``."""
        return jnp.tanh(self._policy.apply(None, policy, timestep, ())[0])

    def critic_values(self, critics: Params, timestep: TimeStep, action: Array) -> Array:
        """Returns each critic's value of joint actions, ``[B, groups, num_critics]``.

        Args:
          critics: the params of the critics, ``[groups, num_critics, ...]``.
          timestep: ``[B, ...]``.
          action: ``[B, S, A]``, in [-1, 1].
        """

        def of_group(own: Params) -> Array:
            return self._values_of_group(own, timestep, action)

        return jax.vmap(of_group, out_axes=1)(critics)

    def _values_of_group(self, critics: Params, timestep: TimeStep, action: Array) -> Array:
        """Returns the values of the critics of one group, ``[B, num_critics]``."""
        seen = with_action(timestep, action.reshape((len(action), -1)))
        return self._critics.apply(None, critics, seen, ())[0]

    def compute_gradients(
        self, params: DeterministicParams, learner_state: MADDPGLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the mean ``|TD error|`` as priorities."""
        grads, (logs, priorities) = jax.grad(self.loss, has_aux=True)(
            params, learner_state.target_params, batch
        )
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, params: DeterministicParams, target_params: DeterministicParams, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of the critics' and the policies' losses, (logs, priorities ``[B]``).

        Each loss changes only its own part of the params. Importance weights apply to the critics
        only. Both are sums over seats, so that each seat learns as if it were alone. Priorities are
        the mean ``|TD error|``.
        """
        learned = self.transitions(batch)
        taken = self.critic_values(params.critics, learned.timestep, learned.action)
        end_action = self.policy_action(target_params.policy, learned.end)
        end_value = self.critic_values(target_params.critics, learned.end, end_action).min(-1)
        target = jax.lax.stop_gradient(learned.reward + learned.discount * end_value)
        td_errors = jnp.where(learned.valid[..., None], target[..., None] - taken, 0.0)
        critic_loss = jnp.mean(batch.weights * 0.5 * jnp.square(td_errors).sum((1, 2)))

        fixed = jax.lax.stop_gradient(params.critics)
        value = self.values_of_policies(params.policy, fixed, learned)
        alive = self.alive(learned.timestep) & learned.valid.any(axis=1)[:, None]
        policy_loss = -jnp.where(alive, value, 0.0).sum(axis=1).mean()
        errors = jnp.abs(td_errors).mean((1, 2))
        loss = critic_loss + policy_loss
        logs: Logs = {
            "loss": loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "value": jnp.mean(taken),
            "td_error": jnp.mean(errors),
        }
        return loss, (logs, errors)

    def transitions(self, batch: Batch) -> NStep:
        """Returns the transitions of the groups of critics: ``reward``, ``discount`` and ``valid``.

        These are ``[B, groups]``; actions are in [-1, 1]. A seat's discount is 0 from the step on
        in which it leaves the game.
        """
        trajectory = batch.trajectory
        one = n_step(trajectory, self.cfg.discount)
        if self.cfg.critics == "shared":
            found = one._replace(
                reward=one.reward[:, None], discount=one.discount[:, None], valid=one.valid[:, None]
            )
        else:
            timestep = trajectory.timestep
            alive = jnp.asarray(timestep.extras[ALIVE])
            discounts = jnp.asarray(timestep.discount)[..., None] * (alive > 0)

            def of_seat(reward: Array, discount: Array) -> tuple[Array, Array]:
                own = timestep._replace(reward=reward, discount=discount)
                of_own = n_step(trajectory._replace(timestep=own), self.cfg.discount)
                return of_own.reward, of_own.discount

            reward, discount = jax.vmap(of_seat, in_axes=2, out_axes=1)(
                jnp.asarray(timestep.extras[REWARDS]), discounts
            )
            valid = one.valid[:, None] & self.alive(one.timestep)
            found = one._replace(reward=reward, discount=discount, valid=valid)
        return found._replace(action=self._bounds.to_unit(found.action))

    def alive(self, timestep: TimeStep) -> Array:
        """Returns which seats are in the game, bool ``[B, S]``."""
        return jnp.asarray(timestep.extras[ALIVE]) > 0

    def values_of_policies(self, policy: Params, critics: Params, learned: NStep) -> Array:
        """Returns the value that each seat's policy gets where the others act as they did.

        Returns:
          ``[B, S]``, the smallest value of the seat's critics.
        """
        acts = self.policy_action(policy, learned.timestep)

        def of_seat(seat: Array, own: Params) -> Array:
            is_own = (jnp.arange(self._number) == seat)[:, None]
            action = jnp.where(is_own, acts, learned.action)
            return self._values_of_group(own, learned.timestep, action).min(-1)

        seats = jnp.arange(self._number)
        if self._groups == 1:
            one = jax.tree.map(lambda x: x[0], critics)
            return jax.vmap(of_seat, in_axes=(0, None), out_axes=1)(seats, one)
        return jax.vmap(of_seat, out_axes=1)(seats, critics)

    def update_learner_state(
        self,
        params: DeterministicParams,
        learner_state: MADDPGLearnerState,
        opt_state: optax.OptState,
    ) -> MADDPGLearnerState:
        """Stores the optimizer's state, and moves the targets."""
        target = moved_towards(params, learner_state.target_params, self.cfg.target_rate)
        return MADDPGLearnerState(opt_state, target)
