"""Base classes of agents with a policy and critics that learn off-policy from transitions.

`PolicyAndCriticsAgent` has the parts that all of them share (SAC, TD3, DDPG, MPO and theirs).
`SampledAgent` adds those of agents that draw actions (SAC, MPO, IQL, AWAC and theirs), and
`DeterministicAgent` those of agents with a deterministic policy (TD3, DDPG, D4PG). Each agent has
its own losses.

Networks with state or dropout are in training mode where they are learned: the critics on the
actions that were taken, and the policy on the same steps. They are in evaluation mode everywhere
else: in acting, in targets, and for the critics' values that the policy maximises.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from dm_env import specs

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.checks import Checked, WrongKindError
from rlstack.distributions.parameters import Bounds
from rlstack.exploration import (
    Counts,
    GaussianNoise,
    Policy,
    Sample,
    UniformNoise,
    WarmUp,
    initial_counts,
    next_counts,
)
from rlstack.math.n_step import NStep
from rlstack.networks import CriticInput, PolicyAndCritic, ensemble
from rlstack.optimizers import OptimizerConfig
from rlstack.stateful_params import has_state, training
from rlstack.types import Array, Batch, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class PolicyAndCriticsConfig(Checked):
    """Hyperparameters that all these agents share."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    num_critics: int = 2
    """Number of critics. The smallest of their values counts."""
    target_rate: float = 0.005
    """Fraction by which the target moves towards the params at each of its updates."""
    random_frames: int = 5_000
    """Number of frames with random actions at the start, in all environments together."""
    max_grad_norm: float = 0.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(eps=1e-8)
    """Optimizer of all components without their own optimizer; eps is that of the papers'
    programs."""
    policy_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy. None takes optimizer, as for all components; on the command line,
    options not given are those of optimizer."""
    critics_optimizer: OptimizerConfig | None = None
    """Optimizer of the critics; None takes optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("discount", 0 <= self.discount <= 1, "in [0, 1]")
        self.require_at_least(1, "num_critics")
        self.require("target_rate", 0 < self.target_rate <= 1, "in (0, 1]")
        self.require_at_least(0, "random_frames", "max_grad_norm")


class PolicyAndCriticsAgent(Agent):
    """Acts by a policy and values actions by an ensemble of critics; feed-forward networks only.

    Its acting state counts the steps and episodes of each environment; exploration may depend on
    these counts.
    """

    cfg: PolicyAndCriticsConfig
    has_priorities = True

    def __init__(self, cfg: PolicyAndCriticsConfig, *args: Any, **kwargs: Any) -> None:
        """Checks the networks.

        Raises:
          WrongKindError: the network factory did not return a `PolicyAndCritic`.
          ValueError: a network is recurrent.
        """
        super().__init__(cfg, *args, **kwargs)
        where = type(self).__name__
        if not isinstance(self.network, PolicyAndCritic):
            raise WrongKindError(
                f"{where}: the network factory must give a PolicyAndCritic; got "
                f"{type(self.network).__name__}. See rlstack.networks.policy_and_critic."
            )
        if any(jax.tree.leaves(network.initial_state(1)) for network in self.network):
            raise ValueError(
                f"{where}: the networks must be feed-forward, since transitions carry no recurrent "
                "state. Use an agent of sequences such as ppo."
            )
        self.critics = ensemble(self.network.critic, cfg.num_critics)

    def initial_state(self, batch_size: int) -> Counts:
        """Returns the counts of steps and episodes of each environment, ``[B]``, which are 0."""
        return initial_counts(batch_size)

    def update_network_state(self, params: Any, learner_state: Any, batch: Batch) -> Any:
        """Returns the params with the networks' states after a pass over the items' first steps."""
        if not has_state(self.network):
            return params
        learned = training(learner_state.rng_key, params)
        first = jax.tree.map(lambda x: x[:1], batch.trajectory)
        policy, critics = params.policy, params.critics
        if self.network.policy.new_state is not None:
            state = self.network.policy.new_state(learned.policy, first.timestep, ())
            policy = policy._replace(state=state)
        if self.critics.new_state is not None:
            seen = self.learned_by_critics(params, learner_state, batch)
            critics = critics._replace(state=self.critics.new_state(learned.critics, seen, ()))
        return params._replace(policy=policy, critics=critics)

    def learned_by_critics(self, params: Any, learner_state: Any, batch: Batch) -> TimeStep:
        """Returns the steps ``[1, B, ...]`` that the loss runs the critics on in training mode."""
        del params, learner_state
        first = jax.tree.map(lambda x: x[:1], batch.trajectory)
        return self.critic_input(first.timestep, first.agent_output.action)

    def critic_input(self, timestep: TimeStep, action: Array) -> TimeStep:
        """Returns the steps as the critics take them, with the actions that were taken."""
        return with_action(timestep, action)

    def critic_values(self, critics: Params, timestep: TimeStep, action: Array) -> Array:
        """Returns each critic's value of continuous actions, ``[B, N]``; see `critic_outputs`."""
        return self.means(self.critic_outputs(critics, timestep, action))

    def means(self, outputs: Array) -> Array:
        """Returns the values that outputs of the critics stand for; here the outputs themselves.

        Agents with distributional critics take the means over the last axis.
        """
        return outputs

    def critic_outputs(self, critics: Params, timestep: TimeStep, action: Array) -> Array:
        """Returns each critic's output for continuous actions, ``[B, N]`` or ``[B, N, atoms]``.

        Args:
          critics: the params of the critics.
          timestep: ``[B, ...]``.
          action: ``[B, D]``, in [-1, 1].
        """
        return self.critics.apply(None, critics, with_action(timestep, action), ())[0]


def with_action(timestep: TimeStep, action: Array) -> TimeStep:
    """Returns the steps ``[B, ...]`` as critics take them, with continuous actions as they are."""
    return timestep._replace(observation=CriticInput(timestep.observation, action))


class SampledAgent(PolicyAndCriticsAgent):
    """Acts by drawing from its policy; the actions are discrete, or continuous with bounds.

    For discrete actions the critics take the observation and give outputs of all actions.
    """

    def __init__(self, cfg: PolicyAndCriticsConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._bounds: Bounds | None = None  # None for discrete actions
        if not isinstance(self.action_spec, specs.DiscreteArray):
            self._bounds = distributions.bounds_of(self.action_spec, type(self).__name__)

    def unit_action(self, action: Array) -> Array:
        """Returns the environment's actions as the networks see them: continuous in [-1, 1]."""
        return action if self._bounds is None else self._bounds.to_unit(action)

    def draw(self, rng_key: PRNGKey, distribution: Any, state: Counts) -> Array:
        """Returns the environment's actions that the exploration policy takes, ``[B, ...]``."""
        action = self.policy(rng_key, distribution, state)
        return action if self._bounds is None else self._bounds.from_unit(action)

    def critic_input(self, timestep: TimeStep, action: Array) -> TimeStep:
        """Returns the steps, with continuous actions scaled to [-1, 1]."""
        if self._bounds is None:
            return timestep
        return super().critic_input(timestep, self.unit_action(action))

    def outputs_of(self, critics: Params, timestep: TimeStep, action: Array) -> Array:
        """Returns each critic's output for actions of `unit_action`, ``[B, N, ...]``."""
        if self._bounds is not None:
            return self.critic_outputs(critics, timestep, action)
        outputs = self.critics.apply(None, critics, timestep, ())[0]
        index = action.reshape((-1, *(1,) * (outputs.ndim - 1)))
        return jnp.take_along_axis(outputs, index, axis=2).squeeze(2)

    def outputs_taken(self, critics: Params, transition: NStep) -> Array:
        """Returns each critic's output for the action that was taken, ``[B, N, ...]``."""
        action = self.unit_action(transition.action)
        return self.outputs_of(critics, transition.timestep, action)


class CriticLosses(NamedTuple):
    """What the critics learn from a batch; 0 where there is no transition."""

    losses: Array  # [B], the sum over critics
    errors: Array  # [B], at least 0, the priorities
    values: Array  # [B, N], the values of the actions that were taken


def squared_errors(target: Array, taken: Array, valid: Array) -> CriticLosses:
    """Returns the squared TD errors of critics.

    Args:
      target: ``[B]``; it gets no gradient.
      taken: ``[B, N]``, the values of the actions that were taken.
      valid: ``[B]``. An item that begins at the last step of an episode has no transition.
    """
    difference = jax.lax.stop_gradient(target)[:, None] - taken
    td_errors = jnp.where(valid[:, None], difference, 0.0)
    losses = 0.5 * jnp.square(td_errors).sum(-1)
    return CriticLosses(losses, jnp.abs(td_errors).mean(-1), taken)


@dataclasses.dataclass(frozen=True)
class AtomsConfig(Checked):
    """The range of the atoms, for critics of distributions. The network sets their number."""

    min_value: float = -10.0
    """The smallest atom, a discounted return. A return beyond the atoms counts as the outermost
    one, so choose both for the task, or scale its rewards."""
    max_value: float = 10.0
    """The largest atom."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("min_value", "max_value")
        below = self.min_value < self.max_value
        self.require("min_value", below, f"below max_value ({self.max_value})")

    def atoms(self, outputs: Array) -> Array:
        """Returns the return of each atom, ``[M]``, for outputs ``[..., M]``."""
        return jnp.linspace(self.min_value, self.max_value, outputs.shape[-1])


def of_least(outputs: Array, values: Array) -> Array:
    """Returns the outputs ``[B, ..., M]`` of the critic with the smallest value.

    Args:
      outputs: ``[B, N, ..., M]``, of N critics.
      values: ``[B, N, ...]``, the values that they stand for.
    """
    least = jnp.argmin(values, axis=1, keepdims=True)[..., None]
    return jnp.take_along_axis(outputs, least, axis=1).squeeze(1)


@dataclasses.dataclass(frozen=True)
class DeterministicConfig(PolicyAndCriticsConfig):
    """Hyperparameters of agents with a deterministic policy."""

    noise: Literal["gaussian", "uniform"] = "gaussian"
    """Distribution of the exploration noise."""
    noise_scale: float = 0.1
    """Standard deviation (gaussian) or largest value (uniform) of the noise, in half-ranges."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "noise_scale")


class DeterministicOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B, D] float32, within the spec's bounds


class DeterministicParams(NamedTuple):
    """The params that the learner publishes."""

    policy: Params
    critics: Params  # [N, ...]


class DeterministicAgent(PolicyAndCriticsAgent):
    """Acts by a deterministic policy, with `deterministic_policy_and_critic` networks."""

    cfg: DeterministicConfig

    def __init__(self, cfg: DeterministicConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.bounds = distributions.bounds_of(self.action_spec, type(self).__name__)

    def initial_params(self, rng_key: PRNGKey) -> DeterministicParams:
        """Returns newly initialised params of both networks."""
        policy_key, critics_key = jax.random.split(rng_key)
        return DeterministicParams(
            self.network.policy.init(policy_key), self.critics.init(critics_key)
        )

    def critic_input(self, timestep: TimeStep, action: Array) -> TimeStep:
        """Returns the steps with the actions, scaled to [-1, 1]."""
        return super().critic_input(timestep, self.bounds.to_unit(action))

    def policy_action(self, policy: Params, timestep: TimeStep) -> Array:
        """Returns the policy's action in [-1, 1], ``[B, D]``."""
        return jnp.tanh(self.network.policy.apply(None, policy, timestep, ())[0])

    def action_distribution(
        self, rng_key: PRNGKey, params: DeterministicParams, timestep: TimeStep, state: Counts
    ) -> distributions.Deterministic:
        """Returns the policy's action, in [-1, 1]."""
        del rng_key, state
        return distributions.Deterministic(self.policy_action(params.policy, timestep))

    def actor_step(
        self, rng_key: PRNGKey, params: DeterministicParams, timestep: TimeStep, state: Counts
    ) -> tuple[DeterministicOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps; the exploration policy may add noise."""
        distribution = self.action_distribution(rng_key, params, timestep, state)
        action = self.bounds.from_unit(self.policy(rng_key, distribution, state))
        return DeterministicOutput(action), next_counts(state, timestep)


def sampling_policy(cfg: PolicyAndCriticsConfig, num_envs: int) -> Policy:
    """Returns a policy that samples, after random actions at the start."""
    return WarmUp(Sample(), cfg.random_frames, num_envs)


def behaviour_policy(cfg: DeterministicConfig, num_envs: int) -> Policy:
    """Returns a policy that adds noise to the actions, after random actions at the start."""
    kinds = {"gaussian": GaussianNoise, "uniform": UniformNoise}
    noise = kinds[cfg.noise](cfg.noise_scale, minimum=-1.0, maximum=1.0)
    return WarmUp(noise, cfg.random_frames, num_envs)
