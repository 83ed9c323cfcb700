"""The common parts of agents that plan: acting by a tree search, and what learning needs of it.

The search is Gumbel MuZero's, Danihelka et al. (2022), https://openreview.net/forum?id=bERaNdoegnO,
as the library mctx has it (the extra ``planning``). At the root it tries the actions with the
largest sums of Gumbel noise and logits, and halves their number again and again. Deeper it follows
the policy improved by the values found. Its results are the action, an improved policy, which the
network learns to imitate, and the value of the root. Acting stores the last two with each step, and
n-step returns bootstrap from the stored values.

In training the search's own noise makes its action a draw from the improved policy, so the policy
``sample`` takes that action. Other policies, such as softmax with a temperature, draw from the
improved policy. The greedy policy searches without noise, and needs no random numbers.

Of continuous actions each node of a search has some, which the network's policy draws: Sampled
MuZero, Hubert et al. (2021), https://arxiv.org/abs/2104.06303. The improved policy has a
probability for each of them.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from dm_env import specs

from rlstack import distributions
from rlstack.checks import ActionKindError, Checked
from rlstack.exploration import Counts, Sample, explores, initial_counts, next_counts
from rlstack.families.q_learning import TargetLearnerState, TargetNetworkAgent
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
    Trajectory,
    merge_leading_dims,
)


@dataclasses.dataclass(frozen=True)
class PlanningConfig(Checked):
    """Hyperparameters of all agents that plan; the search's are those of its paper."""

    discount: float = 0.997
    """Discount of future rewards, per step."""
    num_simulations: int = 32
    """Simulations of a search. Each evaluates the network once for each environment."""
    max_considered_actions: int = 16
    """Largest number of actions that a search tries at its root."""
    value_scale: float = 0.1
    """Weight of values in the improved policy (c_scale). Raise it for a stronger improvement."""
    visit_offset: float = 50.0
    """Added to the largest number of visits, by which values are weighted too (c_visit)."""
    n_step: int = 10
    """Number of transitions before a target bootstraps from the value of a search."""
    value_cost: float = 0.25
    """Weight of the loss of values."""
    reanalyse_share: float = 0.0
    """Share of a batch whose stored policies and values are replaced by those of a new search with
    the target params, in each update."""
    target_period: int = 200
    """Updates between two copies of the params to the target. Ignored if target_rate is above 0, or
    if reanalyse_share is 0."""
    target_rate: float = 0.0
    """Fraction by which the target moves towards the params at each update. 0: copies every
    target_period."""
    max_grad_norm: float = 5.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(eps=1e-8)
    """Optimizer of all components."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("discount", "target_rate", "reanalyse_share"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        self.require_at_least(1, "num_simulations", "max_considered_actions", "n_step")
        self.require_at_least(1, "target_period")
        self.require_at_least(0, "value_scale", "visit_offset", "value_cost", "max_grad_norm")
        self.require_finite("value_scale", "visit_offset", "value_cost")


class PlanOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B] int32
    policy: Array  # [B, A] float32, the probabilities of the improved policy
    value: Array  # [B] float32, the value of the root


class DrawnPlanOutput(NamedTuple):
    """The same, of continuous actions."""

    action: Array  # [B, D] float32, within the spec's bounds; of a search the number, [B] int32
    policy: Array  # [B, A] float32, the probabilities of the improved policy
    value: Array  # [B] float32, the value of the root
    drawn: Array  # [B, A, D] float32 in [-1, 1], the actions that the policy is of


class Node(NamedTuple):
    """What a search needs to know of a state."""

    logits: Array  # [B, A] of the policy
    value: Array  # [B]
    state: PyTree  # [B, ...], from which the model goes on
    drawn: Array | tuple[()] = ()  # [B, A, D] in [-1, 1], the continuous actions of the logits


class Edge(NamedTuple):
    """What a model predicts of an action, besides the state that it leads to."""

    reward: Array  # [B]
    discount: Array  # [B], of the value of the next state; 0 where the episode ends


class PlanningAgent(TargetNetworkAgent):
    """An agent that acts by a search in a model; a subclass has the model and the loss.

    Its acting state counts the steps and episodes of each environment, on which exploration may
    depend. A subclass defines `root`, `expand` and `loss`.
    """

    cfg: PlanningConfig
    draws_actions = False  # whether its nodes can have drawn actions, of a continuous spec

    def __init__(self, cfg: PlanningConfig, *args: Any, **kwargs: Any) -> None:
        """Checks what the search needs.

        Raises:
          ActionKindError: the action is not one discrete choice, nor a continuous action with
            finite bounds if the agent draws actions.
          ValueError: mctx is not installed.
        """
        name = type(self).__name__
        if importlib.util.find_spec("mctx") is None:
            raise ValueError(
                f"{name}: the package mctx must be installed; it is not. "
                "pip install 'rlstack[planning]'."
            )
        super().__init__(cfg, *args, **kwargs)
        self._bounds: distributions.Bounds | None = None
        if isinstance(self.action_spec, specs.DiscreteArray):
            return
        if not self.draws_actions:
            raise ActionKindError(
                f"{name}: the action must be one discrete choice; got {self.action_spec}. Use an "
                "agent without a search, such as sac, for other actions."
            )
        self._bounds = distributions.bounds_of(
            self.action_spec, f"{name}, if it is not one discrete choice"
        )

    @abc.abstractmethod
    def root(self, rng_key: PRNGKey, params: Params, timestep: TimeStep) -> tuple[Node, Array]:
        """Returns where the searches of ``[B, ...]`` steps begin, and the legal actions ``[B, A]``.

        Values and rewards are those of whose turn it is.
        """

    @abc.abstractmethod
    def expand(
        self, rng_key: PRNGKey, params: Params, state: PyTree, action: Array
    ) -> tuple[Edge, Node]:
        """Takes actions, ``[B]`` or drawn ones ``[B, D]``, in states of the model ``[B, ...]``."""

    @abc.abstractmethod
    def loss(
        self, rng_key: PRNGKey, params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss, (logs, priorities ``[B]``)."""

    def initial_state(self, batch_size: int) -> Counts:
        """Returns the counts of steps and episodes of each environment, ``[B]``, which are 0."""
        return initial_counts(batch_size)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: Counts
    ) -> tuple[PlanOutput | DrawnPlanOutput, Counts]:
        """Searches from ``[B, ...]`` steps, and chooses the actions."""
        search_key, policy_key = jax.random.split(rng_key)
        output, legal = self.search(search_key, params, timestep, noise=explores(self.policy))
        if not isinstance(self.policy, Sample):
            action = self.policy(policy_key, self.improved(output, legal), state)
            output = output._replace(action=action)
        if self._bounds is not None:
            chosen = _chosen(output.drawn, output.action)
            output = output._replace(action=self._bounds.from_unit(chosen))
        return output, next_counts(state, timestep)

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: Counts
    ) -> distributions.Distribution:
        """Returns the improved policy; its mode is the search's action if the policy is greedy.

        Of continuous actions it is a Gaussian with the deviations of the improved policy, around
        its mean or, if the policy is greedy, around the search's action.
        """
        del state
        noise = explores(self.policy)
        output, legal = self.search(rng_key, params, timestep, noise=noise)
        if self._bounds is None:
            return self.improved(output, legal)
        drawn, weights = jnp.asarray(output.drawn), output.policy[..., None]
        mean = (weights * drawn).sum(axis=1)
        spread = jnp.sqrt((weights * jnp.square(drawn - mean[:, None])).sum(axis=1))
        half = 0.5 * (self._bounds.maximum - self._bounds.minimum)
        centre = mean if noise else _chosen(drawn, output.action)
        return distributions.Normal(
            self._bounds.from_unit(centre), jnp.log(half * jnp.maximum(spread, 1e-3))
        )

    def improved(
        self, output: PlanOutput | DrawnPlanOutput, legal: Array
    ) -> distributions.Categorical:
        """Returns the improved policy of a search over the legal actions ``[B, A]``."""
        logits = jnp.log(jnp.maximum(output.policy, jnp.finfo(jnp.float32).tiny))
        if not explores(self.policy):
            # The search takes one of the actions that it visited most. Another one may have a
            # larger probability, by an estimate of fewer visits or of none.
            chosen = jax.nn.one_hot(output.action, logits.shape[-1], dtype=bool)
            logits = jnp.where(chosen, logits.max(axis=-1, keepdims=True) + 1e-3, logits)
        return distributions.categorical(logits, legal)

    def search(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noise: bool
    ) -> tuple[Any, Array]:
        """Searches from steps ``[B, ...]``; without noise the key is not used.

        Returns:
          A `PlanOutput` or `DrawnPlanOutput` with the numbers of actions ``[B]``, and the legal
          actions ``[B, A]``.
        """
        root_key, search_key = jax.random.split(key_of(rng_key, noise))
        root, legal = self.root(root_key, params, timestep)
        return self.searched(search_key, params, root, legal, noise=noise), legal

    def searched(
        self, rng_key: PRNGKey, params: Params, root: Node, legal: Array, *, noise: bool
    ) -> Any:
        """Searches from the roots ``[B, ...]`` with the legal actions ``[B, A]``.

        Without noise the key is not used. The action of the results is a number, ``[B]``.
        """
        import mctx

        cfg = self.cfg

        def recurrent(params: Params, key: PRNGKey, action: Array, node: Any) -> Any:
            state, drawn = node
            edge, after = self.expand(key, params, state, _chosen(drawn, action))
            output = mctx.RecurrentFnOutput(
                reward=edge.reward,
                discount=edge.discount,
                prior_logits=after.logits,
                value=after.value,
            )
            return output, (after.state, after.drawn)

        start = root.state, root.drawn
        found = mctx.gumbel_muzero_policy(
            params,
            key_of(rng_key, noise),
            mctx.RootFnOutput(prior_logits=root.logits, value=root.value, embedding=start),
            recurrent,
            cfg.num_simulations,
            ~legal,
            qtransform=functools.partial(
                mctx.qtransform_completed_by_mix_value,
                value_scale=cfg.value_scale,
                maxvisit_init=cfg.visit_offset,
            ),
            max_num_considered_actions=cfg.max_considered_actions,
            gumbel_scale=1.0 if noise else 0.0,
        )
        value = found.search_tree.summary().value
        results = found.action, found.action_weights, value
        if self._bounds is None:
            return PlanOutput(*results)
        return DrawnPlanOutput(*results, jnp.asarray(root.drawn))

    def reanalysed(self, rng_key: PRNGKey, params: Params, trajectory: Trajectory) -> Trajectory:
        """Returns a trajectory whose first items have policies and values of a new search.

        Reanalyse, Schrittwieser et al. (2021), arXiv:2104.06294: the actions and rewards stay.

        Args:
          rng_key: the key of the search.
          params: the params to search with.
          trajectory: ``[T+1, B, ...]``; of the B items ``reanalyse_share`` are replaced.
        """
        stored = trajectory.agent_output
        number = round(self.cfg.reanalyse_share * stored.value.shape[1])
        if not number:
            return trajectory
        steps = jax.tree.map(lambda x: x[:, :number], trajectory.timestep)
        rows = merge_leading_dims(steps)
        new, _ = self.search(rng_key, params, rows, noise=True)

        def replaced(new: Array, old: Array) -> Array:
            found = new.reshape((len(old), number, *new.shape[1:]))
            return jnp.concatenate([found, old[:, number:]], axis=1)

        found = jax.tree.map(replaced, tuple(new[1:]), tuple(stored[1:]))
        return trajectory._replace(agent_output=type(stored)(stored.action, *found))

    def compute_gradients(
        self, params: Params, learner_state: TargetLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the items' new priorities."""
        _, search_key, loss_key = jax.random.split(learner_state.rng_key, 3)
        target = learner_state.target_params
        batch = batch._replace(trajectory=self.reanalysed(search_key, target, batch.trajectory))

        def loss(params: Params) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(loss_key, params, batch)

        grads, (logs, priorities) = jax.grad(loss, has_aux=True)(params)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def update_learner_state(
        self, params: Params, learner_state: TargetLearnerState, opt_state: optax.OptState
    ) -> TargetLearnerState:
        """Also replaces the key."""
        moved = super().update_learner_state(params, learner_state, opt_state)
        return moved._replace(rng_key=jax.random.split(learner_state.rng_key, 3)[0])


def _chosen(drawn: Array | tuple[()], number: Array) -> Array:
    """Returns the actions with these numbers ``[B]``: ``[B, D]`` of drawn ones, or the numbers."""
    return number if isinstance(drawn, tuple) else drawn[jnp.arange(len(number)), number]


def key_of(rng_key: PRNGKey, noise: bool) -> PRNGKey:
    """Returns the key of a search: without noise it is always the same.

    Greedy policies are then the same functions of a step at any time, and need no random numbers.
    """
    return rng_key if noise else jax.random.PRNGKey(0)
