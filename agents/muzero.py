"""MuZero with Gumbel's search: planning in a learned model.

Schrittwieser et al. (2020), https://arxiv.org/abs/1911.08265, with the search and the policy's loss
of Danihelka et al. (2022), https://openreview.net/forum?id=bERaNdoegnO; `rlstack.families.planning`
has the search. An item of replay is a sequence: from its first step, ``num_unroll`` actions are
followed in the model, whose rewards, values and policies are compared with those of the steps.
Values are n-step returns that bootstrap from the values of the searches in acting. An item of
``num_unroll + n_step`` transitions has all of them; in a shorter one the last targets have fewer
steps. Rewards and values are distributions over atoms of h(x), and targets are divided between two
atoms (appendix F).

After an episode's end the model goes on with random actions, a reward and a value of 0, and no
policy. After a truncation nothing is known, so nothing is learned.

Continuous actions are those of Sampled MuZero, Hubert et al. (2021),
https://arxiv.org/abs/2104.06303: each node of a search has ``num_drawn`` actions of the policy, a
Gaussian squashed by tanh. They have equal logits, because the policy drew them, and replay keeps
those of the root with their improved probabilities, by which the policy learns them.

Deviations: two convolutions find the change of a latent image, and heads have no convolutions. The
priority is the error of the network's value at the first step instead of the search's, so that it
follows learning. The first drawn action of greedy policies is the policy's mode.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack import distributions
from rlstack.agents.registry import register
from rlstack.exploration import explores
from rlstack.families.planning import Edge, Node, PlanningAgent, PlanningConfig
from rlstack.math import returns
from rlstack.math.value_distributions import ScaledAtoms, categorical_kl
from rlstack.networks.latent_model import learned_model
from rlstack.networks.torsos import action_mask
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep, Trajectory


@dataclasses.dataclass(frozen=True)
class MuZeroConfig(PlanningConfig):
    """Hyperparameters of MuZero; the number of atoms is the network's (``num_atoms``)."""

    num_unroll: int = 5
    """Actions that are followed in the model, from the first step of an item."""
    max_value: float = 300.0
    """Largest absolute value and reward that the atoms represent; they are evenly spaced in h of
    it, h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x. Larger ones count as this one."""
    num_drawn: int = 20
    """Actions that the policy draws in each node of a search, if they are continuous."""
    entropy_cost: float = 0.005
    """Weight of the entropy of the policy of continuous actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "num_unroll")
        self.require_at_least(2, "num_drawn")
        self.require_at_least(0, "entropy_cost")
        self.require_finite("max_value", "entropy_cost")
        self.require("max_value", self.max_value > 0, "positive")


class Targets(NamedTuple):
    """What the model should predict of K actions; entry k is after k of them."""

    reward: Array  # [K, B], of entry 1 and later
    value: Array  # [K + 1, B]
    policy: Array  # [K + 1, B, A]
    drawn: Array | tuple[()]  # [K + 1, B, A, D], the continuous actions of the policy
    known: Array  # [K + 1, B] bool, whether reward and value are known
    acts: Array  # [K + 1, B] bool, whether there is an action, and so a policy


@register(MuZeroConfig, network=learned_model)
class MuZero(PlanningAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with a `LearnedModel`."""

    cfg: MuZeroConfig
    draws_actions = True
    reads_first_state = True

    def root(self, rng_key: PRNGKey, params: Params, timestep: TimeStep) -> tuple[Node, Array]:
        """Returns what the network predicts of ``[B, ...]`` steps, and the legal actions."""
        state = self.network.represent(params, timestep.observation)
        node = self.node(rng_key, params, state)
        mask = action_mask(timestep.observation) if self._bounds is None else None
        return node, distributions.categorical(node.logits, mask).legal()

    def expand(
        self, rng_key: PRNGKey, params: Params, state: Array, action: Array
    ) -> tuple[Edge, Node]:
        """Takes actions, ``[B]`` or ``[B, D]``, in latent states ``[B, ...]``."""
        after, reward = self.network.step(params, state, action)
        discount = jnp.full(len(state), self.cfg.discount, jnp.float32)
        return Edge(self.atoms.mean(reward), discount), self.node(rng_key, params, after)

    def node(self, rng_key: PRNGKey, params: Params, state: Array) -> Node:
        """Returns what the network predicts of latent states ``[B, ...]``; draws their actions."""
        predicted = self.network.predict(params, state)
        value = self.atoms.mean(predicted.value)
        if self._bounds is None:
            return Node(predicted.policy, value, state)
        drawn = self.drawn(rng_key, predicted.policy)
        return Node(jnp.zeros(drawn.shape[:2]), value, state, drawn)

    def drawn(self, rng_key: PRNGKey, parameters: Array) -> Array:
        """Returns actions ``[B, K, D]`` in [-1, 1] of policies with these parameters ``[B, N]``.

        In greedy policies all rows have the same noise, and none for their first action.
        """
        policy, searches = self.policy_of(parameters[:, None]), explores(self.policy)
        rows = len(parameters) if searches else 1
        shape = (rows, self.cfg.num_drawn, policy.mean.shape[-1])
        noise = jax.random.normal(rng_key, shape)
        if not searches:
            noise = noise.at[:, 0].set(0.0)
        return jnp.tanh(policy.mean + jnp.exp(policy.log_std) * noise)

    def policy_of(self, parameters: Array) -> distributions.TanhNormal:
        """Returns the policy of continuous actions in [-1, 1] with parameters ``[..., N]``."""
        assert self._bounds is not None
        unit = self._bounds.unit_spec()
        found = distributions.from_parameters(unit, parameters, squash=True)
        assert isinstance(found, distributions.TanhNormal)
        return found

    def loss(
        self, rng_key: PRNGKey, params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss, (logs, priorities ``[B]``).

        The loss is the weighted mean over items of the KL divergences from targets to predictions:
        those of the first step, plus the means over the ``num_unroll`` later ones. Of continuous
        actions, `policy_losses` are in their place. The logged parts are without weights.
        """
        targets, steps = self.targets(batch.trajectory), self.cfg.num_unroll
        actions = self.actions(rng_key, batch.trajectory, targets)
        first = jax.tree.map(lambda x: x[0], batch.trajectory.timestep.observation)
        rewards, policies, values = self.unrolled(params, first, actions)
        scale = jnp.full((steps + 1, 1), 1.0 / steps).at[0].set(1.0)

        def added(errors: Array, mask: Array, scale: Array) -> jax.Array:
            return jnp.where(mask, errors * scale, 0.0).sum(axis=0)  # [B]

        of_values = categorical_kl(self.atoms.probs(targets.value, values), values)
        of_rewards = categorical_kl(self.atoms.probs(targets.reward, rewards), rewards)
        value_loss = added(of_values, targets.known, scale)
        reward_loss = added(of_rewards, targets.known[1:], scale[1:])
        policy_loss = added(self.policy_losses(targets, policies), targets.acts, scale)
        losses = policy_loss + reward_loss + self.cfg.value_cost * value_loss
        loss = jnp.mean(batch.weights * losses)
        value = self.atoms.mean(values[0])
        priorities = jnp.where(targets.known[0], jnp.abs(value - targets.value[0]), 0.0)
        logs: Logs = {
            "loss": loss,
            "policy_loss": policy_loss.mean(),
            "reward_loss": reward_loss.mean(),
            "value_loss": value_loss.mean(),
            "value": jnp.mean(value),
            "priority": jnp.mean(priorities),
        }
        return loss, (logs, jax.lax.stop_gradient(priorities))

    def policy_losses(self, targets: Targets, policies: Array) -> Array:
        """Returns the losses ``[K + 1, B]`` of policies with parameters ``[K + 1, B, N]``.

        Of continuous actions the loss is the cross-entropy from the improved policy, which is that
        of the drawn actions, minus the policy's entropy by its cost.
        """
        if self._bounds is None:
            return categorical_kl(targets.policy, policies)
        likelihoods = self.policy_of(policies[..., None, :]).log_prob(jnp.asarray(targets.drawn))
        entropy = self.policy_of(policies).entropy()
        return -(targets.policy * likelihoods).sum(axis=-1) - self.cfg.entropy_cost * entropy

    def unrolled(
        self, params: Params, observation: Any, actions: Array
    ) -> tuple[Array, Array, Array]:
        """Follows actions ``[K, B, ...]`` in the model from observations ``[B, ...]``.

        Each step halves the gradient of the state before it (paper, appendix G).

        Returns:
          Logits of rewards ``[K, B, N]``, policies ``[K + 1, B, A]`` and values ``[K + 1, B, N]``.
        """

        def step(state: Array, action: Any) -> tuple[Array, tuple[Array, Array, Array]]:
            after, reward = self.network.step(params, halved_gradient(state), action)
            return after, (reward, *self.network.predict(params, after))

        state = self.network.represent(params, observation)
        first = self.network.predict(params, state)
        _, (rewards, policies, values) = jax.lax.scan(step, state, actions)
        policies = jnp.concatenate([first.policy[None], policies])
        return rewards, policies, jnp.concatenate([first.value[None], values])

    def targets(self, trajectory: Trajectory) -> Targets:
        """Returns the targets of items ``[T + 1, B, ...]``.

        Raises:
          ValueError: an item has fewer than ``num_unroll`` transitions.
        """
        timestep, stored = trajectory.timestep, trajectory.agent_output
        steps, length = self.cfg.num_unroll, timestep.step_type.shape[0] - 1
        if length < steps:
            raise ValueError(
                f"MuZero: num_unroll ({steps}) must be at most the item's {length} transitions. "
                f"Use --replay.unroll-length {steps + self.cfg.n_step}, or a smaller "
                "--agent.num-unroll."
            )
        after = jax.tree.map(lambda x: x[1:], timestep)
        discounts = after.discount * self.cfg.discount
        value = returns.n_step_returns(
            after.reward, discounts, stored.value, self.cfg.n_step, ~after.first()
        )
        value = jnp.concatenate([value, stored.value[-1:]])[: steps + 1]
        now = jax.tree.map(lambda x: x[: steps + 1], timestep)
        # Whether the next step is of another episode, or the seat is not in its game.
        breaks = jnp.concatenate([after.first(), jnp.zeros_like(after.first()[:1])])[: steps + 1]
        broken = jnp.cumsum(breaks, axis=0) - breaks > 0  # by an earlier step
        ends = now.last() & (now.discount == 0) & ~broken  # the end of the first step's episode
        absorbing = jnp.cumsum(ends, axis=0) - ends > 0
        absent = breaks & ~now.last()
        return Targets(
            jnp.where(absorbing, 0.0, now.reward)[1:],
            jnp.where(absorbing | ends, 0.0, value),
            stored.policy[: steps + 1],
            jax.tree.map(lambda x: x[: steps + 1], getattr(stored, "drawn", ())),
            absorbing | ~(broken | absent),
            ~(broken | breaks | now.last()),
        )

    def actions(self, rng_key: PRNGKey, trajectory: Trajectory, targets: Targets) -> Array:
        """Returns the actions to follow, ``[K, B, ...]``; random ones where there is none."""
        taken, acts = trajectory.agent_output.action[: self.cfg.num_unroll], targets.acts[:-1]
        if self._bounds is None:
            number = targets.policy.shape[-1]
            random = jax.random.randint(rng_key, taken.shape, 0, number, taken.dtype)
            return jnp.where(acts, taken, random)
        random = jax.random.uniform(rng_key, taken.shape, minval=-1.0, maxval=1.0)
        return jnp.where(acts[..., None], self._bounds.to_unit(taken), random)

    @property
    def atoms(self) -> ScaledAtoms:
        """The atoms of rewards and values."""
        return ScaledAtoms(returns.signed_hyperbolic, returns.signed_parabolic, self.cfg.max_value)


def halved_gradient(x: Array) -> Array:
    """Returns x; half of the gradient flows through it."""
    return 0.5 * x + jax.lax.stop_gradient(0.5 * x)
