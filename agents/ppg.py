"""Phasic policy gradient, Cobbe et al. (2021), https://arxiv.org/abs/2009.04416.

PPO with separate networks, in which the policy's network also learns from values, but seldom: after
``aux_period`` updates by PPO, an auxiliary phase makes ``aux_epochs`` passes over the steps of
these updates. It fits a value head on the policy's torso and the network of values to the targets,
and keeps the policy as it was by a KL divergence (algorithm 1).

Deviations: the steps are kept in the learner's state, the newest ``aux_steps`` of them, with their
observations as they were normalised; one optimizer serves both phases, and gradients are clipped.
Feed-forward networks only. Others as in PPO.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.agents.registry import register
from rlstack.families.epochs import EpochRows
from rlstack.families.policy_gradient import masked_mean
from rlstack.math import shuffle
from rlstack.networks import phasic_actor_critic
from rlstack.networks.base import dummy_timestep
from rlstack.stateful_params import training, weight_gradients
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class PPGConfig(PPOConfig):
    """Hyperparameters of PPG, with the paper's values."""

    num_epochs: int = 1
    """Number of passes over a batch in the policy phase."""
    num_minibatches: int = 8
    """Number of gradient steps per pass."""
    aux_period: int = 32
    """Updates by PPO for each auxiliary phase."""
    aux_steps: int = 65_536
    """Number of the newest steps that an auxiliary phase learns from: aux_period times the steps of
    a batch keep all. Their observations are in the learner's memory."""
    aux_epochs: int = 6
    """Number of passes over these steps."""
    aux_minibatches: int = 16
    """Number of gradient steps per pass of an auxiliary phase."""
    clone_cost: float = 1.0
    """Weight of the KL divergence from the policy before the auxiliary phase."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "aux_period", "aux_epochs", "aux_minibatches")
        rule = f"at least aux_minibatches ({self.aux_minibatches})"
        self.require("aux_steps", self.aux_steps >= self.aux_minibatches, rule)
        self.require_at_least(0, "clone_cost")


class PPGMemory(NamedTuple):
    """Steps for the auxiliary phase; a ring of ``aux_steps`` rows."""

    timestep: TimeStep  # [R, ...]
    target: Array  # [R] float32
    mask: Array  # [R] bool, False where there is no transition, or no step yet


class PPGState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    rng_key: PRNGKey
    num_updates: Array  # [] int32, optimizer steps so far
    memory: PPGMemory
    batches: Array  # [] int32, batches since the last auxiliary phase


@register(PPGConfig, network=phasic_actor_critic, compares_with_acting=True)
class PPG(PPO):
    """The agent; construct it with a `phasic_actor_critic` network."""

    cfg: PPGConfig
    reads_first_state = True

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> Any:
        """Returns the optimizer's initial state, the learner's key and an empty memory."""
        rows = self.cfg.aux_steps
        timestep = dummy_timestep(self.obs_spec, rows)
        memory = PPGMemory(timestep, jnp.zeros(rows), jnp.zeros(rows, bool))
        state = super().initial_learner_state(rng_key, params)
        return PPGState(*state, memory, jnp.zeros((), jnp.int32))

    def prepare(
        self, params: Params, learner_state: Any, batch: Batch
    ) -> tuple[Any, EpochRows, Array]:
        """Prepares PPO's rows, and stores them for the auxiliary phase.

        Raises:
          ValueError: the memory is smaller than a batch.
        """
        learner_state, rows, schedule = super().prepare(params, learner_state, batch)
        count, size = rows.mask.shape[0], self.cfg.aux_steps
        if count > size:
            raise ValueError(
                f"PPG: aux_steps must be at least the {count} steps of a batch; got {size}. The "
                f"paper keeps those of aux_period batches, {count * self.cfg.aux_period}."
            )
        begin = learner_state.batches * count
        place = (begin + jnp.arange(count)) % size
        timestep = rows.timestep._replace(extras=())  # the phase reads observations alone
        new = PPGMemory(timestep, rows.target, rows.mask)
        memory = jax.tree.map(
            lambda old, x: old.at[place].set(jnp.asarray(x, old.dtype)), learner_state.memory, new
        )
        return learner_state._replace(memory=memory), rows, schedule

    def finish(self, params: Params, learner_state: Any) -> tuple[Params, Any]:
        """Ends the batch; after each ``aux_period`` of them runs the auxiliary phase."""
        learner_state = learner_state._replace(batches=learner_state.batches + 1)
        due = learner_state.batches == self.cfg.aux_period
        return jax.lax.cond(due, self._auxiliary_phase, lambda *same: same, params, learner_state)

    def _auxiliary_phase(self, params: Params, learner_state: Any) -> tuple[Params, Any]:
        cfg, memory, before = self.cfg, learner_state.memory, params
        rng_key, shuffle_key = jax.random.split(learner_state.rng_key)
        learner_state = learner_state._replace(rng_key=rng_key)
        schedule = shuffle.permutations(shuffle_key, cfg.aux_epochs, cfg.aux_steps)
        size = cfg.aux_steps // cfg.aux_minibatches
        schedule = schedule[:, : size * cfg.aux_minibatches].reshape((-1, size))

        def update(carry: Any, indices: Any) -> tuple[Any, None]:
            params, state = carry
            rows = jax.tree.map(lambda x: x[indices], memory)
            learned = training(state.rng_key, params, state.num_updates)
            grads, _ = weight_gradients(lambda x: self.auxiliary_loss(x, before, rows), learned)
            params = self.update_network_state(params, state, rows)
            params, opt_state, _ = self.apply_gradients(params, state, grads)
            return (params, self.update_learner_state(params, state, opt_state)), None

        (params, learner_state), _ = jax.lax.scan(update, (params, learner_state), schedule)
        none = jnp.zeros_like(memory.mask)
        state = learner_state._replace(
            memory=memory._replace(mask=none), batches=jnp.zeros_like(learner_state.batches)
        )
        return params, state

    def auxiliary_loss(self, params: Params, before: Params, rows: PPGMemory) -> tuple[Array, Logs]:
        """Returns the joint loss and the loss of the values (section 2 of the paper), and logs."""
        output, _ = self.network.apply(None, params, rows.timestep, ())
        fixed = jax.lax.stop_gradient(before)
        old = self.distribution(
            self.network.apply(None, fixed, rows.timestep, ())[0], rows.timestep
        )
        kl = masked_mean(old.kl(self.distribution(output, rows.timestep)), rows.mask)
        auxiliary, value = (
            0.5 * masked_mean(jnp.square(x - rows.target), rows.mask)
            for x in (output.auxiliary_value, output.value)
        )
        loss = auxiliary + self.cfg.clone_cost * kl + value
        return loss, {"auxiliary_value_loss": auxiliary, "value_loss": value, "kl": kl}
