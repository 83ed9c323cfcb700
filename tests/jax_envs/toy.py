"""The environments of `tests.envs.toy`, with the same rules and options, written in JAX.

Their episodes are not those of the originals, because the random numbers differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.toy import Catch
from rlstack.types import Array, PRNGKey, PyTree

__all__ = ["Catch", "MaskedDict", "MemoryCue", "MultiDiscrete", "PointMass", "TruncatingChain"]


class CueState(NamedTuple):
    """The state of one episode: the cue to remember, and the number of steps so far."""

    cue: Array  # [] int32
    time: Array  # [] int32


class MemoryCue:
    """Shows a cue once, then no cue for ``delay`` steps, then asks for the cue.

    The right answer scores +1, a wrong one ``-1 / (num_cues - 1)``.
    """

    def __init__(self, delay: int = 3, num_cues: int = 2):
        if delay < 0 or num_cues < 2:
            raise ValueError(
                f"MemoryCue: delay must be at least 0 and num_cues at least 2; got {delay} and "
                f"{num_cues}."
            )
        self._delay, self._num_cues = delay, num_cues

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the cue and the flag that asks for the answer."""
        return specs.BoundedArray((self._num_cues + 1,), np.float32, 0.0, 1.0, "cue")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the answer."""
        return specs.DiscreteArray(self._num_cues, np.int32, "answer")

    def reset(self, rng_key: PRNGKey) -> tuple[CueState, Array]:
        """Starts an episode with a random cue."""
        cue = jax.random.randint(rng_key, (), 0, self._num_cues)
        return CueState(cue, jnp.int32(0)), self._show(cue)

    def step(self, rng_key: PRNGKey, state: CueState, action: Array) -> Outcome:
        """Waits, asks, or scores the answer."""
        del rng_key
        state = CueState(state.cue, state.time + 1)
        asks, over = state.time == self._delay + 1, state.time > self._delay + 1
        score = jnp.where(action == state.cue, 1.0, -1.0 / (self._num_cues - 1))
        shown = self._show(jnp.where(asks, self._num_cues, -1))
        return Outcome(state, shown, jnp.where(over, score, 0.0), over, False)

    def _show(self, entry: Array) -> Array:
        return jax.nn.one_hot(entry, self._num_cues + 1, dtype=jnp.float32)  # -1 is all zeros


class TruncatingChain:
    """Gives reward 1 at every step until a time limit of ``length`` steps truncates the episode.

    The observation is always ``[1.0]``, so the only consistent value is ``1 / (1 - discount)``.
    """

    def __init__(self, length: int = 10):
        if length < 1:
            raise ValueError(f"TruncatingChain: length must be at least 1; got {length}.")
        self._length = length

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of a constant."""
        return specs.BoundedArray((1,), np.float32, 0.0, 1.0, "constant")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of two actions without effect."""
        return specs.DiscreteArray(2, np.int32, "ignored")

    def reset(self, rng_key: PRNGKey) -> tuple[Array, Array]:
        """Starts counting steps."""
        del rng_key
        return jnp.int32(0), jnp.ones(1, jnp.float32)

    def step(self, rng_key: PRNGKey, state: Array, action: Array) -> Outcome:
        """Gives reward 1."""
        del rng_key, action
        time = state + 1
        return Outcome(time, jnp.ones(1, jnp.float32), 1.0, False, time >= self._length)


class PointState(NamedTuple):
    """The state of one episode: the point's position, and the number of steps so far."""

    position: Array  # [2] float32
    time: Array  # [] int32


class PointMass:
    """A point in the square [-1, 1]^2 moves by ``0.1 * action`` and should reach the origin.

    The reward is minus the distance to the origin after the move; truncated after ``length`` steps.
    """

    def __init__(self, length: int = 20):
        self._length = length

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the position."""
        return specs.BoundedArray((2,), np.float32, -1.0, 1.0, "position")

    def action_spec(self) -> specs.BoundedArray:
        """Returns the spec of the move."""
        return specs.BoundedArray((2,), np.float32, -1.0, 1.0, "move")

    def reset(self, rng_key: PRNGKey) -> tuple[PointState, Array]:
        """Draws a random position."""
        position = jax.random.uniform(rng_key, (2,), jnp.float32, -1.0, 1.0)
        return PointState(position, jnp.int32(0)), position

    def step(self, rng_key: PRNGKey, state: PointState, action: Array) -> Outcome:
        """Moves the point."""
        del rng_key
        position = jnp.clip(state.position + 0.1 * jnp.clip(action, -1.0, 1.0), -1.0, 1.0)
        time = state.time + 1
        reward = -jnp.sqrt((position**2).sum())
        return Outcome(PointState(position, time), position, reward, False, time >= self._length)


class MaskedState(NamedTuple):
    """The state of one episode: the observed values, and the number of steps so far."""

    target: Array  # [] int32
    mask: Array  # [num_actions] int8
    time: Array  # [] int32


class MaskedDict:
    """Shows a target action; at each step some other actions are illegal.

    The target scores 1, another legal action 0, an illegal one -1.
    """

    def __init__(self, num_actions: int = 4, length: int = 8):
        if num_actions < 2:
            raise ValueError(f"MaskedDict: num_actions must be at least 2; got {num_actions}.")
        self._num_actions, self._length = num_actions, length

    def observation_spec(self) -> PyTree:
        """Returns the specs of the target and of the mask of legal actions."""
        shape = (self._num_actions,)
        return {
            "target": specs.BoundedArray(shape, np.float32, 0.0, 1.0, "target"),
            "action_mask": specs.BoundedArray(shape, np.int8, 0, 1, "action_mask"),
        }

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the action."""
        return specs.DiscreteArray(self._num_actions, np.int32, "action")

    def reset(self, rng_key: PRNGKey) -> tuple[MaskedState, PyTree]:
        """Draws the first mask and target."""
        state = self._draw(rng_key, jnp.int32(0))
        return state, self._show(state)

    def step(self, rng_key: PRNGKey, state: MaskedState, action: Array) -> Outcome:
        """Scores the action and draws the next mask and target."""
        legal = state.mask[action] == 1
        reward = jnp.where(legal, (action == state.target).astype(jnp.float32), -1.0)
        after = self._draw(rng_key, state.time + 1)
        return Outcome(after, self._show(after), reward, after.time >= self._length, False)

    def _draw(self, rng_key: PRNGKey, time: Array) -> MaskedState:
        target_key, mask_key = jax.random.split(rng_key)
        target = jax.random.randint(target_key, (), 0, self._num_actions)
        mask = jax.random.bernoulli(mask_key, 0.5, (self._num_actions,)).astype(jnp.int8)
        return MaskedState(target, mask.at[target].set(1), time)

    def _show(self, state: MaskedState) -> PyTree:
        target = jax.nn.one_hot(state.target, self._num_actions, dtype=jnp.float32)
        return {"target": target, "action_mask": state.mask}


class NumbersState(NamedTuple):
    """The state of one episode: the observed values, and the number of steps so far."""

    numbers: Array  # [k] int32
    time: Array  # [] int32


class MultiDiscrete:
    """Shows several numbers; the reward is the fraction of them that the action repeats.

    Steps are independent. An episode terminates after ``length`` steps.
    """

    def __init__(self, sizes: tuple[int, ...] = (3, 2, 4), length: int = 5):
        self._sizes, self._length = np.asarray(sizes, np.int32), length

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the numbers, each divided by the size of its range."""
        return specs.BoundedArray(self._sizes.shape, np.float32, 0.0, 1.0, "numbers")

    def action_spec(self) -> specs.BoundedArray:
        """Returns the spec of the repeated numbers."""
        return specs.BoundedArray(self._sizes.shape, np.int32, 0, self._sizes - 1, "repeated")

    def reset(self, rng_key: PRNGKey) -> tuple[NumbersState, Array]:
        """Draws the first numbers."""
        state = NumbersState(self._draw(rng_key), jnp.int32(0))
        return state, self._show(state)

    def step(self, rng_key: PRNGKey, state: NumbersState, action: Array) -> Outcome:
        """Scores the action and draws the next numbers."""
        reward = jnp.mean((action == state.numbers).astype(jnp.float32))
        after = NumbersState(self._draw(rng_key), state.time + 1)
        return Outcome(after, self._show(after), reward, after.time >= self._length, False)

    def _draw(self, rng_key: PRNGKey) -> Any:
        return jax.random.randint(rng_key, self._sizes.shape, 0, self._sizes)

    def _show(self, state: NumbersState) -> Array:
        return (state.numbers / self._sizes).astype(jnp.float32)
