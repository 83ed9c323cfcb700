"""What agents that learn action values share: all but what the network says and the loss of it.

By config they learn doubly (van Hasselt et al. 2016, arXiv:1509.06461), from n-step targets (the
replay's ``unroll_length``), with prioritized replay (Schaul et al. 2016, arXiv:1511.05952: the
replay's sampler), with duelling networks (Wang et al. 2016, arXiv:1511.06581) and noisy ones
(Fortunato et al. 2018, arXiv:1706.10295: the network's choice). A truncated episode is bootstrapped
from its true last observation.

Noise on the network's weights is drawn anew at each acting step and, in learning, for the values
learned, those of the target network and those that choose the next action. An agent with the greedy
policy acts by the mean weights.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.checks import Checked
from rlstack.exploration import (
    Counts,
    EpsilonGreedy,
    Linear,
    Policy,
    explores,
    initial_counts,
    next_counts,
)
from rlstack.families.target_network import TargetLearnerState, TargetNetworkAgent
from rlstack.math.n_step import NStep, n_step
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import OptimizerConfig
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
class QLearningConfig(Checked):
    """Hyperparameters of all agents that learn action values."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    double: bool = True
    """Whether the online network chooses the action that the target network values."""
    target_period: int = 250
    """Updates between two copies of the params to the target; ignored with target_rate."""
    target_rate: float = 0.0
    """Share of the params that the target takes over at each update; 0 copies by period."""
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
        for field in ("discount", "target_rate", "epsilon_start", "epsilon_end"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        self.require_at_least(1, "target_period", "epsilon_frames")


class QOutput(NamedTuple):
    """What acting leaves for learning."""

    action: Array  # [B] int32


class ItemLosses(NamedTuple):
    """What learning from each item costs."""

    losses: Array  # [B] float32
    priorities: Array  # [B] float32
    values: Array  # [B] float32, of the actions taken; for the logs


class QLearning(TargetNetworkAgent):
    """An agent of action values; construct it as `rlstack.agent.Agent` says.

    Subclasses say how network outputs become values (`values`) and what to minimise
    (`item_losses`).
    """

    cfg: QLearningConfig

    def __init__(self, cfg: QLearningConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if jax.tree.leaves(self.network.initial_state(1)):
            raise ValueError(
                f"{type(self).__name__}: the network must be feed-forward, since transitions carry "
                "no recurrent state. Use --network.core none, or an agent of sequences such as ppo."
            )

    @abc.abstractmethod
    def values(self, outputs: Array) -> Array:
        """Turns what the network says of actions, ``[B, A, ...]``, into values ``[B, A]``."""

    @abc.abstractmethod
    def item_losses(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> ItemLosses:
        """Returns the loss of each item; gradients must not pass through its targets."""

    def outputs(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns what the network says of each action, ``[B, A, ...]``, with or without noise."""
        return self.network.apply(rng_key if noisy else None, params, timestep, ())[0]

    def initial_state(self, batch_size: int) -> Counts:
        """Returns how many steps and episodes each environment has had, ``[B]``: none."""
        return initial_counts(batch_size)

    def reset_state(self, state: Counts, first: Array) -> Counts:
        """Keeps the counts, by which exploration decays, from one episode to the next."""
        del first
        return state

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: Counts
    ) -> tuple[QOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps; the policy sees values as logits."""
        network_key, policy_key = jax.random.split(rng_key)
        outputs = self.outputs(network_key, params, timestep, noisy=explores(self.policy))
        preferences = self._preferences(outputs, timestep)
        action = self.policy(policy_key, preferences, state)
        return QOutput(action), next_counts(state, timestep)

    def best_actions(self, outputs: Array, timestep: TimeStep) -> Array:
        """Returns the legal actions of the largest value, ``[B]`` int32."""
        return self._preferences(outputs, timestep).mode()

    def bootstrap(
        self, rng_key: PRNGKey, params: Params, target_params: Params, end: TimeStep
    ) -> Array:
        """Returns what the target network says of the best action at ``end``, ``[B, ...]``."""
        target_key, choosing_key = jax.random.split(rng_key)
        outputs = choosing = self.outputs(target_key, target_params, end)
        if self.cfg.double:
            choosing = self.outputs(choosing_key, params, end)
        return jax.lax.stop_gradient(of_actions(outputs, self.best_actions(choosing, end)))

    def compute_gradients(
        self, params: Params, learner_state: TargetLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs and priorities."""
        loss_key = jax.random.split(learner_state.rng_key)[1]
        grads, (logs, priorities) = jax.grad(self.loss, argnums=1, has_aux=True)(
            loss_key, params, learner_state.target_params, batch
        )
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the weighted mean of the items' losses, (logs, priorities ``[B]``)."""
        transition = n_step(batch.trajectory, self.cfg.discount)
        items = self.item_losses(rng_key, params, target_params, transition)
        # An item that begins at the end of an episode holds no transition to learn from.
        losses, priorities = (
            jnp.where(transition.valid, x, 0.0) for x in (items.losses, items.priorities)
        )
        loss = (batch.weights * losses).mean()
        logs = {"loss": loss, "value": items.values.mean(), "priority": priorities.mean()}
        return loss, (logs, priorities)

    def update_learner_state(
        self, params: Params, learner_state: TargetLearnerState, opt_state: Any
    ) -> TargetLearnerState:
        """Moves the key on as well."""
        moved = super().update_learner_state(params, learner_state, opt_state)
        return moved._replace(rng_key=jax.random.split(learner_state.rng_key)[0])

    def _preferences(self, outputs: Array, timestep: TimeStep) -> distributions.Categorical:
        return distributions.categorical(self.values(outputs), action_mask(timestep.observation))


def of_actions(outputs: Array, actions: Array) -> Array:
    """Takes each row's action out of ``[B, A, ...]``, ``[B, ...]``."""
    return outputs[jnp.arange(len(actions)), actions]


def behaviour_policy(cfg: QLearningConfig, num_envs: int) -> Policy:
    """Returns epsilon-greedy, with an epsilon that falls over the frames of all environments.

    With noisy networks epsilon may be 0 from the start: the noise explores.
    """
    return EpsilonGreedy(
        Linear(cfg.epsilon_start, cfg.epsilon_end, cfg.epsilon_frames, num_envs=num_envs)
    )
