"""V-MPO, Song et al. (2020), https://arxiv.org/abs/1909.12238: on-policy MPO with a value baseline.

The better half of the steps of a batch, by advantage, are weighted by exp(advantage / temperature),
and the policy is fitted to them within a bound on its KL divergence from the policy before the
update (equations 3 to 6). Temperature and multipliers of the bounds are learned. The policy before
the update takes the part of the paper's target network: an update's number of minibatches is the
paper's period of the target. A policy over one continuous action has bounds of its own for mean and
standard deviation (section 4.1); any other policy has one bound.

Deviations: advantages by GAE (``gae_lambda`` of 1 is the paper's sum of rewards); no PopArt, so
scale rewards (``--normalisation.rewards return``). A truncated episode is bootstrapped from its
true last observation; LAST -> FIRST pairs of steps, which are not transitions, are left out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from dm_env import specs

from rlstack.agents.registry import register
from rlstack.families.epochs import EpochPolicyGradient, EpochRows, EpochsConfig
from rlstack.families.policy_gradient import PolicyGradientState, masked_mean
from rlstack.math import constraints
from rlstack.networks import ActorCriticOutput, Network, actor_critic
from rlstack.networks.base import Apply
from rlstack.optimizers import Components, OptimizerConfig
from rlstack.stateful_params import training
from rlstack.types import AgentState, Array, Logs, Params, PRNGKey, PyTree, TimeStep, Trajectory


@dataclasses.dataclass(frozen=True)
class VMPOConfig(EpochsConfig):
    """Hyperparameters of V-MPO."""

    gae_lambda: float = 1.0
    """Trace decay of the advantage estimator (the paper's 1)."""
    epsilon: float = 0.01
    """Bound on the KL divergence of the weighted steps from the acting policy (the paper's)."""
    epsilon_policy: float = 0.01
    """Bound on the KL divergence of the policy from the one before the update; for one continuous
    action, by the policy's mean and for each of its numbers."""
    epsilon_std: float = 5e-5
    """The same for the standard deviation of a continuous action."""
    temperature: float = 1.0
    """Initial temperature of the weights, in units of advantage (the paper's)."""
    entropy_cost: float = 0.0
    """Weight of the entropy bonus, which the paper does not have."""
    max_grad_norm: float = 0.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    """Optimizer of all components without their own optimizer (the paper's rate)."""
    duals_optimizer: OptimizerConfig | None = None
    """Optimizer of the temperature and the multipliers; None takes optimizer, as the paper does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("epsilon", "epsilon_policy", "epsilon_std", "temperature"):
            self.require(field, 0 < getattr(self, field) < math.inf, "positive and finite")

    def components(self) -> Components:
        """Returns the optimizers of components, by the names of their modules."""
        return {("duals",): self.duals_optimizer, **super().components()}


class VMPOParams(NamedTuple):
    """The params that the learner publishes."""

    network: Params
    duals: dict[str, Array]  # before softplus


@register(VMPOConfig, network=actor_critic, compares_with_acting=True)
class VMPO(EpochPolicyGradient):
    """The agent; construct it as `rlstack.agent.Agent` says, with an actor-critic network."""

    cfg: VMPOConfig
    reads_first_state = True

    def __init__(self, cfg: VMPOConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        spec = self.action_spec
        self._is_continuous = isinstance(spec, specs.Array) and spec.dtype.kind == "f"
        initial: dict[str, tuple[float, tuple[int, ...]]] = {"temperature": (cfg.temperature, ())}
        if self._is_continuous:
            initial |= {"alpha_mean": (1.0, spec.shape), "alpha_std": (1.0, spec.shape)}
        else:
            initial["alpha"] = 5.0, ()
        self.network = _with_duals(self.network, initial)

    def completed(
        self,
        params: VMPOParams,
        learner_state: PolicyGradientState,
        trajectory: Trajectory,
        rows: EpochRows,
    ) -> EpochRows:
        """Returns the rows, with the policy before the update."""
        del learner_state
        state = jax.tree.map(lambda x: x[0], trajectory.agent_state)
        output, _ = self.network.unroll(None, params, trajectory.timestep, state)
        return rows._replace(old_policy=output.policy)

    def loss(self, params: VMPOParams, rows: EpochRows) -> tuple[Array, Logs]:
        """Returns the sum of the losses of policy, value and duals (equations 3 to 6)."""
        cfg, duals = self.cfg, params.duals
        output, rows = self.outputs(params, rows)
        distribution: Any = self.distribution(output, rows.timestep)
        before: Any = rows.old_policy
        old: Any = self.distribution(ActorCriticOutput(before, output.value), rows.timestep)

        middle = jnp.nanmedian(jnp.where(rows.mask, rows.advantage, jnp.nan))
        better = rows.mask & (rows.advantage >= middle)
        temperature = constraints.dual(duals["temperature"])
        scores = jnp.where(better, rows.advantage / temperature, -jnp.inf)
        # A batch without a transition teaches nothing.
        scores = jnp.where(better.any(), scores, 0.0)
        weights = jax.lax.stop_gradient(jnp.where(better, jax.nn.softmax(scores, axis=None), 0.0))
        log_mean = jax.nn.logsumexp(scores) - jnp.log(jnp.maximum(better.sum(), 1))
        temperature_loss = constraints.temperature_loss(log_mean, temperature, cfg.epsilon)
        policy_loss = -(weights * distribution.log_prob(rows.output.action)).sum()

        divergences: dict[str, tuple[Array, float]] = {}
        if self._is_continuous:
            of_mean, of_std = old.decoupled_kl(distribution)
            divergences["alpha_mean"] = of_mean, cfg.epsilon_policy
            divergences["alpha_std"] = of_std, cfg.epsilon_std
        else:
            divergences["alpha"] = old.kl(distribution), cfg.epsilon_policy
        dual_loss = jnp.where(better.any(), temperature_loss, 0.0)
        for name, (kl, bound) in divergences.items():
            axes = tuple(range(rows.mask.ndim))
            mask = rows.mask.reshape((*rows.mask.shape, *(1,) * (kl.ndim - rows.mask.ndim)))
            mean = jnp.where(mask, kl, 0.0).sum(axes) / jnp.maximum(rows.mask.sum(), 1)
            penalty, alpha_loss = constraints.kl_losses(mean, constraints.dual(duals[name]), bound)
            policy_loss, dual_loss = policy_loss + penalty, dual_loss + alpha_loss

        value_loss = 0.5 * masked_mean(jnp.square(output.value - rows.target), rows.mask)
        entropy = masked_mean(distribution.entropy(), rows.mask)
        loss = policy_loss + dual_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": masked_mean(old.kl(distribution), rows.mask),
            "temperature": temperature,
        }

    def update_network_state(
        self, params: VMPOParams, learner_state: PolicyGradientState, batch: EpochRows
    ) -> VMPOParams:
        """Returns the params with the network's state after a pass over the minibatch."""
        if self.network.new_state is None:
            return params
        learned = training(learner_state.rng_key, params, learner_state.num_updates)
        state = self.network.new_state(learned, *self.learned_steps(batch))
        return params._replace(network=params.network._replace(state=state))


def _with_duals(network: Network, initial: dict[str, tuple[float, tuple[int, ...]]]) -> Network:
    """Returns the network with params that have duals beside its own."""

    def init(rng_key: PRNGKey) -> VMPOParams:
        duals: dict[str, Array] = {
            name: jnp.full(shape, constraints.raw_dual(value), jnp.float32)
            for name, (value, shape) in initial.items()
        }
        return VMPOParams(network.init(rng_key), duals)

    def inside(run: Apply) -> Apply:
        def call(
            rng_key: PRNGKey | None, params: VMPOParams, timestep: TimeStep, state: AgentState
        ) -> tuple[PyTree, AgentState]:
            return run(rng_key, params.network, timestep, state)

        return call

    def new_state(params: VMPOParams, timestep: TimeStep, state: AgentState) -> PyTree:
        assert network.new_state is not None
        return network.new_state(params.network, timestep, state)

    return network._replace(
        init=init,
        apply=inside(network.apply),
        unroll=inside(network.unroll),
        new_state=new_state if network.new_state else None,
    )
