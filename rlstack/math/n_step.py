"""The n-step transition at the start of a replayed item, for agents that learn by bootstrapping."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstack.types import Array, PyTree, TimeStep, Trajectory


class NStep(NamedTuple):
    """The n-step transition that each item of a batch begins with."""

    timestep: TimeStep  # [B, ...] the step that it begins at
    action: PyTree  # [B, ...] the action taken there
    reward: Array  # [B] float32, discounted sum of the rewards up to its end
    discount: Array  # [B] float32, what the value of its end is worth; 0 after a termination
    end: TimeStep  # [B, ...] the step that is bootstrapped from
    valid: Array  # [B] bool, False where the item begins at the end of an episode


def n_step(trajectory: Trajectory, discount: float) -> NStep:
    """Takes the n-step transition from the start of each item, ``[T+1, B, ...]``.

    The sum of rewards ends where the item does, or at the end of the episode inside it; the value
    of that step alone is bootstrapped from, so that networks are run on it alone.
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
        valid=~first.timestep.last(),
    )
