"""Agents that have to cover landmarks: a cooperative game of several seats in JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.game import GameOutcome
from rlstack.types import Array, PRNGKey, PyTree

_MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float32)
_STEP = 0.15  # length of a move, in the units of the square [-1, 1]^2
_NEAR = 0.3  # agents that are nearer to each other than this collide


class CoverState(NamedTuple):
    """The state of one episode: places, and the number of steps so far."""

    agents: Array  # [S, 2] float32
    landmarks: Array  # [S, 2] float32
    time: Array  # [] int32


class Cover:
    """Agents in the square [-1, 1]^2 should each cover a different one of as many landmarks.

    It is a task like simple_spread of Lowe et al. (2017, arXiv:1706.02275), without momentum.
    Agents and landmarks begin at random places. An action stays, or moves by 0.15 in one of four
    directions; with ``continuous`` it moves by at most 0.15 along each axis. The reward of every
    agent is minus the sum over landmarks of the distance to the nearest agent; an agent that is
    nearer than 0.3 to others pays 1 for each of them. Episodes are truncated after ``length``
    steps.

    Observation: ``[4 * agents]`` float32: the agent's place, then the landmarks and the other
    agents relative to it. State for a critic: all places, ``[4 * agents]``.
    """

    def __init__(self, agents: int = 3, length: int = 25, continuous: bool = False) -> None:
        if agents < 2 or length < 1:
            raise ValueError(
                f"Cover: agents must be at least 2, and length at least 1; got {agents}, {length}."
            )
        self.seats = tuple(f"agent_{i}" for i in range(agents))
        self._length, self._continuous = length, continuous

    def observation_spec(self) -> specs.Array:
        """Returns the spec of the places that an agent sees."""
        return specs.Array((4 * len(self.seats),), np.float32, "seen")

    def action_spec(self) -> specs.Array:
        """Returns the spec of the move: stay, left, right, down, up; or a vector."""
        if self._continuous:
            return specs.BoundedArray((2,), np.float32, -1.0, 1.0, "move")
        return specs.DiscreteArray(len(_MOVES), np.int32, "move")

    def state_spec(self) -> specs.Array:
        """Returns the spec of all places."""
        return specs.Array((4 * len(self.seats),), np.float32, "places")

    def critic_state(self, state: CoverState) -> Array:
        """Returns all places."""
        return jnp.concatenate([state.agents.ravel(), state.landmarks.ravel()])

    def reset(self, rng_key: PRNGKey) -> tuple[CoverState, PyTree]:
        """Draws the places."""
        shape = (2, len(self.seats), 2)
        agents, landmarks = jax.random.uniform(rng_key, shape, jnp.float32, -1.0, 1.0)
        state = CoverState(agents, landmarks, jnp.int32(0))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: CoverState, action: Array) -> GameOutcome:
        """Moves all agents."""
        del rng_key
        move = action if self._continuous else jnp.asarray(_MOVES)[action]
        agents = jnp.clip(state.agents + _STEP * move, -1.0, 1.0)
        after = CoverState(agents, state.landmarks, state.time + 1)
        number = len(self.seats)
        to_landmarks = _distances(state.landmarks, agents)  # [landmarks, agents]
        between = _distances(agents, agents) + 2 * _NEAR * jnp.eye(number)  # not to itself
        collisions = (between < _NEAR).sum(axis=1)
        reward = -to_landmarks.min(axis=1).sum() - collisions.astype(jnp.float32)
        return GameOutcome(
            after,
            self._observe(after),
            reward,
            jnp.zeros(number, bool),
            after.time >= self._length,
        )

    def _observe(self, state: CoverState) -> Array:
        def seen_by(seat: Array) -> Array:
            place = state.agents[seat]
            others = jnp.roll(state.agents, -seat, axis=0)[1:] - place
            return jnp.concatenate([place, (state.landmarks - place).ravel(), others.ravel()])

        return jax.vmap(seen_by)(jnp.arange(len(self.seats)))


def _distances(a: Array, b: Array) -> Array:
    """Returns the distances ``[N, M]`` between places ``[N, 2]`` and ``[M, 2]``."""
    return jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=-1))
