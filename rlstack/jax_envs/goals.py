"""Environments in JAX whose goals are in the observation, in the form of Gymnasium-Robotics.

An observation is a dict of ``observation``, ``achieved_goal`` and ``desired_goal``. A step is
rewarded by 0 where the goal is achieved, and otherwise by -1. The functions of goals take arrays of
numpy or of JAX, ``(achieved_goal, desired_goal, info)``, with goals ``[N, ...]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome
from rlstack.types import Array, PRNGKey

TOLERANCE = 0.1  # the distance from a goal at which a point has reached it


class GoalState(NamedTuple):
    """The state of an environment with a goal."""

    place: Array  # [D] float32: bits, or a point
    goal: Array  # [D] float32
    time: Array  # [] int32


def has_bits(achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
    """Returns where bits are those of the goal, ``[N]`` bool."""
    del info
    return (achieved_goal == desired_goal).all(-1)


def bits_reward(achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
    """Returns 0 where bits are those of the goal, and otherwise -1."""
    return has_bits(achieved_goal, desired_goal, info) - 1.0


def point_reward(achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
    """Returns 0 where a point is within `TOLERANCE` of the goal, and otherwise -1."""
    del info
    squares = (achieved_goal - desired_goal) ** 2
    return (squares.sum(-1) <= TOLERANCE**2) - 1.0


class BitFlip:
    """Bits that should become equal to a goal; each action flips one of them.

    Bits and goal are drawn at random. An episode ends where they are equal, and is truncated after
    as many steps as there are bits. It is the bit-flipping environment of Andrychowicz et al.
    (2017), https://arxiv.org/abs/1707.01495, section 3.1. The best policy flips each wrong bit
    once, for a mean return of 1 - bits / 2 over episodes that do not begin at the goal.
    """

    def __init__(self, bits: int = 15):
        if bits < 1:
            raise ValueError(f"BitFlip: bits must be at least 1; got {bits}.")
        self._bits = bits

    def observation_spec(self) -> dict[str, specs.BoundedArray]:
        """Returns the specs of the bits, twice, and of the goal."""
        return _goal_specs(self._bits, 0.0, 1.0)

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the number of the bit to flip."""
        return specs.DiscreteArray(self._bits, np.int32, "bit")

    def reset(self, rng_key: PRNGKey) -> tuple[GoalState, dict[str, Array]]:
        """Draws the bits and the goal."""
        drawn = jax.random.bernoulli(rng_key, shape=(2, self._bits)).astype(jnp.float32)
        return _begin(drawn[0], drawn[1])

    def step(self, rng_key: PRNGKey, state: GoalState, action: Array) -> Outcome:
        """Flips a bit."""
        del rng_key
        flipped = jnp.arange(self._bits) == action
        place = jnp.where(flipped, 1.0 - state.place, state.place)
        after = GoalState(place, state.goal, state.time + 1)
        reward = bits_reward(place, state.goal, {})
        done = has_bits(place, state.goal, {})
        return Outcome(after, _seen(after), reward, done, after.time >= self._bits)


class Reach:
    """A point in a cube, from -1 to 1, moves to a goal; nothing shows it the way.

    An action moves it by up to 0.1 along each axis. It and the goal begin at random places. An
    episode is truncated after 50 steps, also at the goal, as in FetchReach of Gymnasium-Robotics.
    """

    def __init__(self, dimensions: int = 3):
        if dimensions < 1:
            raise ValueError(f"Reach: dimensions must be at least 1; got {dimensions}.")
        self._dimensions = dimensions

    def observation_spec(self) -> dict[str, specs.BoundedArray]:
        """Returns the specs of the place, twice, and of the goal."""
        return _goal_specs(self._dimensions, -1.0, 1.0)

    def action_spec(self) -> specs.BoundedArray:
        """Returns the spec of the move, in units of 0.1."""
        return specs.BoundedArray((self._dimensions,), np.float32, -1.0, 1.0, "move")

    def reset(self, rng_key: PRNGKey) -> tuple[GoalState, dict[str, Array]]:
        """Draws the place and the goal."""
        drawn = jax.random.uniform(rng_key, (2, self._dimensions), minval=-1.0, maxval=1.0)
        return _begin(drawn[0], drawn[1])

    def step(self, rng_key: PRNGKey, state: GoalState, action: Array) -> Outcome:
        """Moves."""
        del rng_key
        place = jnp.clip(state.place + 0.1 * jnp.clip(action, -1.0, 1.0), -1.0, 1.0)
        after = GoalState(place, state.goal, state.time + 1)
        reward = point_reward(place, state.goal, {})
        return Outcome(after, _seen(after), reward, False, after.time >= 50)


def _goal_specs(size: int, least: float, most: float) -> dict[str, specs.BoundedArray]:
    names = "observation", "achieved_goal", "desired_goal"
    return {name: specs.BoundedArray((size,), np.float32, least, most, name) for name in names}


def _begin(place: Array, goal: Array) -> tuple[GoalState, dict[str, Array]]:
    state = GoalState(place, goal, jnp.zeros((), jnp.int32))
    return state, _seen(state)


def _seen(state: GoalState) -> dict[str, Array]:
    return {
        "observation": state.place,
        "achieved_goal": state.place,
        "desired_goal": state.goal,
    }
