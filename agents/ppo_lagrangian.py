"""PPO-Lagrangian, Ray, Achiam and Amodei (2019), "Benchmarking Safe Exploration in Deep RL".

It maximises returns under a limit on the mean cost of an episode (section 4 of the paper,
https://cdn.openai.com/safexp-short.pdf; the authors' program is
https://github.com/openai/safety-starter-agents). The cost of a step is an entry of
`TimeStep.extras`, has a value of its own, and PPO learns from the advantage

    (advantage of rewards - multiplier x advantage of costs) / (1 + multiplier)

The multiplier is the softplus of a number whose loss for an episode is
``-number x (cost of the episode - cost_limit)``, as in the authors' program. It makes one step of
its optimizer for each batch, before the policy.

What an episode has cost so far is acting state, ``[B]``, because unrolls are shorter than most
episodes and reach the learner in any order. So each episode's cost is exact, and counts once: in
the batch that has its last step. The gradient is the sum over these episodes per environment, and
no mean. A mean over the few episodes of one batch would give short episodes, of which many end
together, too little weight. Batches in which none ends have a gradient of 0.

The value of the cost is in the learner's state: params, evaluations and exports are those of PPO.

Deviations: one clipped ratio for the combined advantage, which PPO then standardises
(``normalise_advantages``), while the authors standardise and clip only that of rewards; an
optimizer with steps by minibatch for the value of the cost, whose network has a torso of its own
without memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack.agent import Agent
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.agents.registry import register
from rlstack.configs.network import NetworkConfig, Torso
from rlstack.families.policy_gradient import masked_mean
from rlstack.families.two_streams import (
    StreamRows,
    TwoStreams,
    network_outputs,
    require_arrays,
)
from rlstack.math import returns
from rlstack.networks import actor_critic
from rlstack.networks.novelty import value_network
from rlstack.optimizers import OptimizerConfig, component_optimizer, optimizer_step
from rlstack.types import (
    ActionDistribution,
    AgentOut,
    AgentState,
    Array,
    Batch,
    LearnerState,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
)


@dataclasses.dataclass(frozen=True)
class PPOLagrangianConfig(PPOConfig):
    """Hyperparameters of PPO-Lagrangian: those of PPO, and those of the cost."""

    cost: str = "cost"
    """Entry of the extras with the cost of a step, one number; docs/extras.md says how an
    environment shows it."""
    cost_limit: float = 25.0
    """Largest mean of the undiscounted cost of an episode."""
    initial_multiplier: float = 1.0
    """Multiplier of the cost at the start."""
    multiplier: OptimizerConfig = OptimizerConfig(learning_rate=0.05)
    """Optimizer of the multiplier, with one step for each batch. Lower its learning rate if cost
    and multiplier swing."""
    cost_discount: float = 0.99
    """Discount of future costs, per step."""
    cost_gae_lambda: float = 0.95
    """Trace decay of the advantage estimator of costs."""
    cost_torso: Torso = "mlp"
    """Layers of the cost's value; see network.torso."""
    cost_sizes: tuple[int, ...] = (64, 64)
    """Sizes of their dense layers."""
    cost_value: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    """Optimizer of the cost's value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("initial_multiplier", self.initial_multiplier > 0, "positive")
        for name in ("cost_discount", "cost_gae_lambda"):
            self.require(name, 0 <= getattr(self, name) <= 1, "in [0, 1]")


class CostState(NamedTuple):
    """What the learner knows of costs."""

    value: Params
    value_opt_state: optax.OptState
    number: Array  # [] float32; the multiplier is its softplus
    number_opt_state: optax.OptState
    episode_cost: Array  # [] float32, mean of the newest batch with an end; 0 before


class LagrangianLearnerState(NamedTuple):
    """The learner's state."""

    agent: LearnerState
    cost: CostState


class LagrangianState(NamedTuple):
    """The acting state."""

    agent: AgentState
    episode_cost: Array  # [B] float32, up to the previous step


class CostRows(NamedTuple):
    """Transitions that the cost's value learns from."""

    observation: PyTree  # before the action
    target: Array
    mask: Array


class Lagrangian(TwoStreams):
    """A PPO with a limit on the cost of episodes; the class of its config is its name."""

    def __init__(self, agent: PPO) -> None:
        """Wraps an agent with a `PPOLagrangianConfig`.

        Raises:
          ValueError: observations are of entities, or do not fit the torso.
        """
        super().__init__(agent)
        cfg = self.cfg
        require_arrays("PPOLagrangian", agent, "a value of the cost")
        network = NetworkConfig(
            torso=cfg.cost_torso, hidden_sizes=cfg.cost_sizes, activation="tanh"
        )
        self._value = value_network(agent.obs_spec, network, "all")
        self._value_optimizer = component_optimizer(cfg.cost_value, {}, 0.0)
        self._number_optimizer = component_optimizer(cfg.multiplier, {}, 0.0)

    def check_extras(self, extras: PyTree) -> None:
        """Raises a ValueError unless the extras have the cost, one number."""
        entry, cost = self.cfg.cost, None
        if isinstance(extras, Mapping):
            cost = extras.get(entry)
        if getattr(cost, "shape", None) != ():
            shown = ", ".join(map(str, extras)) if isinstance(extras, Mapping) else ""
            raise ValueError(
                f"PPOLagrangian: the environment must show an extra {entry!r}, one number for the "
                f"cost of a step; its extras are {shown or 'none'}. Declare it as docs/extras.md "
                "says, or name another entry with --agent.cost."
            )

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> LagrangianLearnerState:
        """Returns PPO's initial state, a new value of the cost, and the first multiplier."""
        agent_key, value_key = jax.random.split(rng_key)
        value = self._value.init(value_key)
        number = jnp.float32(math.log(math.expm1(self.cfg.initial_multiplier)))
        cost = CostState(
            value,
            self._value_optimizer.init(value),
            number,
            self._number_optimizer.init(number),
            jnp.zeros(()),
        )
        return LagrangianLearnerState(self.agent.initial_learner_state(agent_key, params), cost)

    def initial_state(self, batch_size: int) -> LagrangianState:
        """Returns PPO's initial state, and costs of 0."""
        return LagrangianState(self.agent.initial_state(batch_size), jnp.zeros(batch_size))

    def reset_state(self, state: LagrangianState, first: Array) -> LagrangianState:
        """Resets PPO's state and the costs of these rows."""
        return LagrangianState(
            self.agent.reset_state(state.agent, first), jnp.where(first, 0.0, state.episode_cost)
        )

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: LagrangianState
    ) -> ActionDistribution | None:
        """Returns PPO's distribution."""
        return self.agent.action_distribution(rng_key, params, timestep, state.agent)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: LagrangianState
    ) -> tuple[AgentOut, LagrangianState]:
        """Acts as PPO on ``[B, ...]`` steps, and adds up their costs, 0 without extras."""
        output, agent_state = self.agent.actor_step(rng_key, params, timestep, state.agent)
        total = state.episode_cost
        if timestep.extras:
            total = total + self._costs(timestep)
        return output, LagrangianState(agent_state, total)

    def _costs(self, timestep: TimeStep) -> Array:
        """Returns the costs of steps ``[..., B]``; 0 at FIRST, which no action led to."""
        cost = jnp.asarray(timestep.extras[self.cfg.cost], jnp.float32)
        return jnp.where(timestep.first(), 0.0, cost)

    def prepare(
        self, params: Params, learner_state: LagrangianLearnerState, batch: Batch
    ) -> tuple[LagrangianLearnerState, StreamRows, Array]:
        """Makes the multiplier's step, and combines the advantages of both streams.

        Raises:
          ValueError: the steps have no such cost.
        """
        cfg, trajectory = self.cfg, batch.trajectory
        timestep = trajectory.timestep
        if not isinstance(timestep.extras, Mapping) or cfg.cost not in timestep.extras:
            self.check_extras(())
        costs = self._costs(timestep)
        totals = trajectory.agent_state.episode_cost + costs
        # The first step of an unroll is the last one of the unroll before.
        state = self.step_multiplier(learner_state.cost, totals[1:], timestep.last()[1:])
        trajectory = trajectory._replace(agent_state=trajectory.agent_state.agent)
        agent_state, rows, schedule = self.agent.prepare(
            params, learner_state.agent, batch._replace(trajectory=trajectory)
        )
        after = jax.tree.map(lambda x: x[1:], timestep)
        values = network_outputs(
            self._value, state.value, timestep.observation, timestep.step_type.shape
        )
        mask = ~after.first()
        advantage, target = returns.gae(
            rewards=costs[1:],
            discounts=after.discount * cfg.cost_discount,
            values=values,
            gae_lambda=cfg.cost_gae_lambda,
            mask=mask,
        )
        before = jax.tree.map(lambda x: x[:-1], timestep.observation)
        multiplier = jax.nn.softplus(state.number)
        weights = 1 / (1 + multiplier), -multiplier / (1 + multiplier)
        joined = self.join(rows, CostRows(before, target, mask), advantage, weights)
        return LagrangianLearnerState(agent_state, state), joined, schedule

    def step_multiplier(self, state: CostState, totals: Array, ends: Array) -> CostState:
        """Returns the state after one step of the multiplier's optimizer.

        Args:
          state: the state before.
          totals: ``[T, B]``, costs of episodes up to each step, and with it.
          ends: ``[T, B]`` bool, True at the last steps of episodes.
        """
        excess = jnp.where(ends, totals - self.cfg.cost_limit, 0.0)
        number, opt_state, _ = optimizer_step(
            self._number_optimizer,
            state.number,
            state.number_opt_state,
            -excess.sum() / ends.shape[1],
        )
        episode_cost = jnp.where(ends.any(), masked_mean(totals, ends), state.episode_cost)
        return state._replace(number=number, number_opt_state=opt_state, episode_cost=episode_cost)

    def learn_stream(self, state: CostState, rows: CostRows) -> tuple[CostState, Logs]:
        """Makes a gradient step of the cost's value."""

        def loss(value: Params) -> Array:
            found = network_outputs(self._value, value, rows.observation, rows.mask.shape)
            return 0.5 * masked_mean(jnp.square(found - rows.target), rows.mask)

        cost_value_loss, grads = jax.value_and_grad(loss)(state.value)
        value, opt_state, _ = optimizer_step(
            self._value_optimizer, state.value, state.value_opt_state, grads
        )
        logs = {
            "cost_value_loss": cost_value_loss,
            "episode_cost": state.episode_cost,
            "multiplier": jax.nn.softplus(state.number),
        }
        return state._replace(value=value, value_opt_state=opt_state), logs


@register(PPOLagrangianConfig, network=actor_critic, compares_with_acting=True)
class PPOLagrangian(PPO):
    """Makes a PPO and puts it into the wrapper."""

    def __new__(cls, cfg: PPOLagrangianConfig, *parts: Any) -> Agent:  # type: ignore[misc]
        """Returns the wrapped agent."""
        return Lagrangian(PPO(cfg, *parts))
