"""Parallelised Q-network (PQN), Gallici et al. (2024), https://arxiv.org/abs/2407.04811.

Q-learning on the newest steps of many environments at once, without replay and without a target
network: algorithm 1 of the paper. The target of an action is its Q(lambda) return,

    G_t = r_t + discount ((1 - lambda) max_a Q(s_{t+1}, a) + lambda G_{t+1}),

with the values of the network that acted. The loss is half the squared distance to it, in several
epochs of shuffled minibatches. Layer norm keeps the values bounded, as a target network does
elsewhere (paper, section 3), so set the network's ``norm`` to layer.

Discrete actions, also masked; feed-forward or recurrent networks, run from the stored state of the
unroll's first step. Deviations from the paper: a truncated episode is bootstrapped from its true
last observation, and LAST -> FIRST pairs of steps, which are not transitions, are left out. PQN
assumes on-policy data. If actors run ahead of the learner, set the replay's ``max_staleness``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.agent import EpochAgent
from rlstack.agents.registry import register
from rlstack.checks import Checked
from rlstack.exploration import (
    Counts,
    initial_counts,
    next_counts,
)
from rlstack.families.policy_gradient import masked_mean
from rlstack.families.q_learning import behaviour_policy, preferences, values_of
from rlstack.math import returns, shuffle
from rlstack.networks import q_network_without_noise
from rlstack.optimizers import OptimizerConfig, component_optimizer
from rlstack.optimizers.components import Components
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
    Trajectory,
    merge_leading_dims,
)


@dataclasses.dataclass(frozen=True)
class PQNConfig(Checked):
    """Hyperparameters of PQN."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    return_lambda: float = 0.65
    """Mixture of one-step targets (0) and returns of the whole unroll (1)."""
    num_epochs: int = 2
    """Number of passes over a batch."""
    num_minibatches: int = 32
    """Number of gradient steps per pass. A recurrent network splits the batch by environment."""
    max_grad_norm: float = 10.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig("radam")
    """Optimizer of all components without their own optimizer."""
    torso_optimizer: OptimizerConfig | None = None
    """Optimizer of all layers before the heads. None takes optimizer, as for all components; on the
    command line, options not given are those of optimizer."""
    value_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the heads, which give the actions' values; None takes optimizer."""
    epsilon_start: float = 1.0
    """Probability of a random action at the first frame."""
    epsilon_end: float = 0.05
    """Probability of a random action after epsilon_frames."""
    epsilon_frames: int = 100_000
    """Frames of all environments together over which the probability falls linearly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("discount", "return_lambda", "epsilon_start", "epsilon_end"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        self.require_at_least(0, "max_grad_norm")
        self.require_at_least(1, "num_epochs", "num_minibatches", "epsilon_frames")


class PQNOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B] int32
    value: Array  # [B] float32, of the best legal action, by the acting network


class PQNState(NamedTuple):
    """The acting state of each environment."""

    counts: Counts  # kept from one episode to the next
    core: AgentState  # [B, ...] the recurrent core's state, or ()


class PQNLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    rng_key: PRNGKey
    num_updates: Array  # [] int32, optimizer steps so far


class PQNRows(NamedTuple):
    """Rows of a batch to learn from; feed-forward ``[N, ...]``, recurrent ``[B, T, ...]``."""

    timestep: TimeStep
    action: Array
    target: Array
    mask: Array  # False where there is no transition
    core: AgentState  # [B, ...] at the first step; () without recurrence


@register(PQNConfig, network=q_network_without_noise, policy=behaviour_policy)
class PQN(EpochAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values.

    `EpochAgent` goes over a batch: `prepare` makes rows of it, and each minibatch of rows is one
    gradient step on `loss`.
    """

    cfg: PQNConfig
    has_priorities = False
    reads_first_state = True

    def __init__(self, cfg: PQNConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._is_recurrent = bool(jax.tree.leaves(self.network.initial_state(1)))
        own: Components = {
            ("torso", "core"): cfg.torso_optimizer,
            ("value_head", "state_value_head"): cfg.value_head_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, own, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns newly initialised network parameters."""
        return self.network.init(rng_key)

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> PQNLearnerState:
        """Returns the optimizer's initial state and the learner's key."""
        return PQNLearnerState(self._optimizer.init(params), rng_key, jnp.zeros((), jnp.int32))

    def initial_state(self, batch_size: int) -> PQNState:
        """Returns counts of 0 and the core's initial state, ``[B, ...]``."""
        return PQNState(initial_counts(batch_size), self.network.initial_state(batch_size))

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: PQNState
    ) -> tuple[PQNOutput, PQNState]:
        """Chooses actions for ``[B, ...]`` steps; the policy sees values as logits."""
        values, core = self.network.apply(None, params, timestep, state.core)
        legal = preferences(values, timestep)
        output = PQNOutput(
            self.policy(rng_key, legal, state.counts), values_of(values, legal.mode())
        )
        return output, PQNState(next_counts(state.counts, timestep), core)

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: PQNState
    ) -> distributions.Categorical:
        """Returns the legal choices, with their values as logits."""
        del rng_key
        return preferences(self.network.apply(None, params, timestep, state.core)[0], timestep)

    def prepare(
        self, params: Params, learner_state: PQNLearnerState, batch: Batch
    ) -> tuple[PQNLearnerState, PQNRows, Array]:
        """Computes the targets and shuffles; see `rlstack.agent.EpochAgent`."""
        del params  # the values of acting are those of the paper
        rows = self._rows(batch.trajectory)
        num_rows = rows.mask.shape[0]
        size = num_rows // self.cfg.num_minibatches
        if size < 1:
            raise ValueError(
                f"PQN: num_minibatches must be at most the {num_rows} rows of a batch "
                f"({'environments' if self._is_recurrent else 'steps'}); "
                f"got {self.cfg.num_minibatches}."
            )
        rng_key, shuffle_key = jax.random.split(learner_state.rng_key)
        schedule = shuffle.permutations(shuffle_key, self.cfg.num_epochs, num_rows)
        # Rows that do not fill a whole minibatch are left out, in each epoch different ones.
        schedule = schedule[:, : size * self.cfg.num_minibatches].reshape((-1, size))
        return learner_state._replace(rng_key=rng_key), rows, schedule

    def targets(self, trajectory: Trajectory) -> Array:
        """Returns the Q(lambda) returns of a trajectory ``[T+1, B, ...]``, ``[T, B]``."""
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        return returns.lambda_returns(
            rewards=after.reward,
            discounts=after.discount * self.cfg.discount,
            values=trajectory.agent_output.value,
            lambda_=self.cfg.return_lambda,
            mask=~after.first(),
        )

    def _rows(self, trajectory: Trajectory) -> PQNRows:
        before = jax.tree.map(lambda x: x[:-1], trajectory)
        rows = PQNRows(
            before.timestep,
            before.agent_output.action,
            self.targets(trajectory),
            mask=~trajectory.timestep.first()[1:],
            core=(),
        )
        if self._is_recurrent:
            core = jax.tree.map(lambda x: x[0], trajectory.agent_state.core)
            return _swap_axes(rows)._replace(core=core)
        return merge_leading_dims(rows)

    def lay_out_rows(self, minibatch: PQNRows) -> PQNRows:
        """Lays out the steps; see `rlstack.agent.Agent.lay_out`."""
        if self._is_recurrent:
            return minibatch
        return minibatch._replace(timestep=self.lay_out(minibatch.timestep))

    def compute_gradients(
        self, params: Params, learner_state: PQNLearnerState, batch: PQNRows
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss` with respect to the weights, and its logs."""
        learned = training(learner_state.rng_key, params, learner_state.num_updates)
        grads, logs = weight_gradients(lambda params: self.loss(params, batch), learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)})

    def loss(self, params: Params, rows: PQNRows) -> tuple[Array, Logs]:
        """Returns half the mean squared error of the values of the actions taken, and logs."""
        if self._is_recurrent:
            core, rows = rows.core, _swap_axes(rows._replace(core=()))
            values, _ = self.network.unroll(None, params, rows.timestep, core)
        else:
            values, _ = self.network.apply(None, params, rows.timestep, ())
        taken = values_of(values, rows.action)
        error = rows.target - taken
        loss = 0.5 * masked_mean(error**2, rows.mask)
        return loss, {
            "loss": loss,
            "value": masked_mean(taken, rows.mask),
            "td_error": masked_mean(jnp.abs(error), rows.mask),
        }

    def update_network_state(
        self, params: Params, learner_state: PQNLearnerState, batch: PQNRows
    ) -> Params:
        """Returns the params with the state after a pass over the minibatch."""
        if self.network.new_state is None:
            return params
        learned = training(learner_state.rng_key, params, learner_state.num_updates)
        if self._is_recurrent:
            steps = _swap_axes(batch.timestep), batch.core
        else:
            steps = jax.tree.map(lambda x: x[None], batch.timestep), ()
        return params._replace(state=self.network.new_state(learned, *steps))

    def update_learner_state(
        self, params: Params, learner_state: PQNLearnerState, opt_state: optax.OptState
    ) -> PQNLearnerState:
        """Stores the optimizer's state and counts the update."""
        del params
        num_updates = learner_state.num_updates + 1
        return learner_state._replace(opt_state=opt_state, num_updates=num_updates)


def _swap_axes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
