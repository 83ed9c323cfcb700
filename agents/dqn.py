"""Deep Q-learning, Mnih et al. (2015), https://doi.org/10.1038/nature14236, with its refinements.

By config: double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461), n-step targets (the
replay's ``unroll_length``), prioritized replay (Schaul et al. 2016, arXiv:1511.05952: the replay's
sampler); the duelling network (Wang et al. 2016, arXiv:1511.06581) is the network's choice. A
truncated episode is bootstrapped from its true last observation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions, returns
from rlstack.agent import Agent
from rlstack.exploration import (
    Counts,
    EpsilonGreedy,
    Linear,
    Policy,
    initial_counts,
    next_counts,
)
from rlstack.networks.torsos import action_mask
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
    Trajectory,
)


@dataclasses.dataclass(frozen=True)
class DQNConfig:
    """Hyperparameters of DQN."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    double: bool = True
    """Whether the online network chooses the action that the target network values."""
    target_period: int = 250
    """Updates between two copies of the params to the target; ignored with target_rate."""
    target_rate: float = 0.0
    """Share of the params that the target takes over at each update; 0 copies by period."""
    huber_delta: float = 1.0
    """TD error beyond which the loss is linear; 0 squares all errors."""
    max_grad_norm: float = 10.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    epsilon_start: float = 1.0
    """Chance of a random action at the first frame."""
    epsilon_end: float = 0.05
    """Chance of a random action after epsilon_frames."""
    epsilon_frames: int = 10_000
    """Frames, of all environments together, over which the chance falls linearly."""

    def __post_init__(self) -> None:
        if not (0 <= self.discount <= 1 and 0 <= self.target_rate <= 1):
            raise ValueError(
                "DQNConfig: discount and target_rate must lie in [0, 1]; "
                f"got {self.discount} and {self.target_rate}."
            )
        if self.target_period < 1:
            raise ValueError(
                f"DQNConfig: target_period must be at least 1; got {self.target_period}."
            )


class DQNOutput(NamedTuple):
    """What acting leaves for learning."""

    action: Array  # [B] int32


class DQNLearnerState(NamedTuple):
    """What the learner keeps."""

    opt_state: Any
    target_params: Params
    num_updates: Array  # [] int32
    rng_key: PRNGKey


class DQN(Agent):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values."""

    cfg: DQNConfig

    def __init__(self, cfg: DQNConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if jax.tree.leaves(self.network.initial_state(1)):
            raise ValueError(
                "DQN: the network must be feed-forward, since transitions carry no recurrent "
                "state. Use --network.core none, or an agent of sequences such as ppo."
            )
        self._optimizer = component_optimizer(cfg.optimizer, {}, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns fresh network parameters."""
        return self.network.init(rng_key)

    def initial_state(self, batch_size: int) -> Counts:
        """Returns how many steps and episodes each environment has had, ``[B]``: none."""
        return initial_counts(batch_size)

    def reset_state(self, state: Counts, first: Array) -> Counts:
        """Keeps the counts, by which exploration decays, from one episode to the next."""
        del first
        return state

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> DQNLearnerState:
        """Returns the optimizer's initial state, with the params as target."""
        return DQNLearnerState(
            self._optimizer.init(params), params, jnp.zeros((), jnp.int32), rng_key
        )

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: Counts
    ) -> tuple[DQNOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps; the policy sees values as logits."""
        values, _ = self.network.apply(None, params, timestep, ())
        preferences = distributions.categorical(values, action_mask(timestep.observation))
        action = self.policy(rng_key, preferences, state)
        return DQNOutput(action), next_counts(state, timestep)

    def compute_gradients(
        self, params: Params, learner_state: DQNLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and ``|TD error|`` as priorities."""
        grads, (logs, priorities) = jax.grad(self.loss, has_aux=True)(
            params, learner_state.target_params, batch
        )
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the weighted mean of Huber losses of the TD errors, (logs, |TD errors| [B])."""
        first = jax.tree.map(lambda x: x[0], batch.trajectory)
        values, _ = self.network.apply(None, params, first.timestep, ())
        action = first.agent_output.action
        chosen = jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]
        target = jax.lax.stop_gradient(self.targets(params, target_params, batch.trajectory))
        # An item that begins at the end of an episode holds no transition to learn from.
        td_error = jnp.where(first.timestep.last(), 0.0, target - chosen)
        if self.cfg.huber_delta:
            losses = optax.losses.huber_loss(td_error, delta=self.cfg.huber_delta)
        else:
            losses = 0.5 * td_error**2
        loss = (batch.weights * losses).mean()
        logs = {"loss": loss, "value": chosen.mean(), "td_error": jnp.abs(td_error).mean()}
        return loss, (logs, jnp.abs(td_error))

    def targets(self, params: Params, target_params: Params, trajectory: Trajectory) -> Array:
        """Returns the n-step target of each item's first action, ``[B]``.

        The sum of rewards ends where the item does, or at the end of the episode inside it; the
        value of that step alone is bootstrapped from, so that the network is run on it alone.
        """
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        num_steps, batch_size = after.reward.shape
        last = jnp.asarray(after.last()).at[-1].set(True)
        index = jnp.argmax(last, axis=0)
        columns = jnp.arange(batch_size)
        end = jax.tree.map(lambda x: x[index, columns], after)
        mask = action_mask(end.observation)
        target_values, _ = self.network.apply(None, target_params, end, ())
        choosing_values = target_values
        if self.cfg.double:
            choosing_values, _ = self.network.apply(None, params, end, ())
        best = distributions.categorical(choosing_values, mask).mode()
        value = jnp.take_along_axis(target_values, best[:, None], axis=-1)[:, 0]
        values = jnp.zeros((num_steps + 1, batch_size)).at[index + 1, columns].set(value)
        return returns.discounted_returns(
            rewards=after.reward,
            discounts=after.discount * self.cfg.discount,
            values=values,
            mask=~after.first(),
        )[0]

    def apply_gradients(
        self, params: Params, learner_state: DQNLearnerState, grads: PyTree
    ) -> tuple[Params, Any, Logs]:
        """Applies the optimizer."""
        updates, opt_state = self._optimizer.update(grads, learner_state.opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    def update_learner_state(
        self, params: Params, learner_state: DQNLearnerState, opt_state: Any
    ) -> DQNLearnerState:
        """Keeps the optimizer's state and moves the target params."""
        num_updates = learner_state.num_updates + 1
        old = learner_state.target_params
        if self.cfg.target_rate:
            target = optax.incremental_update(params, old, self.cfg.target_rate)
        else:
            target = optax.periodic_update(params, old, num_updates, self.cfg.target_period)
        return learner_state._replace(
            opt_state=opt_state, target_params=target, num_updates=num_updates
        )


def behaviour_policy(cfg: DQNConfig, num_envs: int) -> Policy:
    """Returns epsilon-greedy, with an epsilon that falls over the frames of all environments."""
    return EpsilonGreedy(
        Linear(cfg.epsilon_start, cfg.epsilon_end, cfg.epsilon_frames, num_envs=num_envs)
    )
