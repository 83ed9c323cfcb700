"""The n-step transition at the start of a replay item, for agents that bootstrap."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstack.types import Array, PyTree, TimeStep, Trajectory


class NStep(NamedTuple):
    """The n-step transition at the start of each item of a batch."""

    timestep: TimeStep  # [B, ...] the first step
    action: PyTree  # [B, ...] the action taken at the first step
    reward: Array  # [B] float32, discounted sum of the rewards
    discount: Array  # [B] float32, factor of the value of `end`; 0 after a termination
    end: TimeStep  # [B, ...] the step to bootstrap from
    valid: Array  # [B] bool, False where no transition begins the item: at LAST, or before FIRST


def n_step(trajectory: Trajectory, discount: float) -> NStep:
    """Returns the n-step transition at the start of each item.

    Sutton and Barto (2018), "Reinforcement learning", equation 7.1. The sum of rewards ends at the
    end of the item, or of the episode if that comes first. Only this step is bootstrapped from, so
    networks need not be evaluated on the steps before it.

    Args:
      trajectory: ``[T+1, B, ...]``.
      discount: the agent's discount per step.
    """
    first = jax.tree.map(lambda x: x[0], trajectory)
    after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
    num_steps, batch_size = after.reward.shape
    last = jnp.asarray(after.last()).at[-1].set(True)
    index = jnp.argmax(last, axis=0)
    inside = jnp.arange(num_steps)[:, None] <= index
    worth = jnp.cumprod(jnp.where(inside, after.discount * discount, 1.0), axis=0)
    before = jnp.concatenate([jnp.ones((1, batch_size)), worth[:-1]])
    return NStep(
        timestep=first.timestep,
        action=first.agent_output.action,
        reward=jnp.where(inside, before * after.reward, 0.0).sum(axis=0),
        discount=worth[-1],
        end=jax.tree.map(lambda x: x[index, jnp.arange(batch_size)], after),
        valid=~(first.timestep.last() | after.first()[0]),
    )
