"""An environment with a cost and the number of its level, in each form, and an agent for it.

An episode of level L lasts L + 3 steps. It is truncated if L is odd, and terminated otherwise. The
observation shows the time, the level and the last action (0 at first), so that a test can compute
the extras of every step by itself: the cost is the time plus half of the last action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import dm_env
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs
from gymnasium import spaces

from rlstack.agent import Agent
from rlstack.agents import register
from rlstack.envs.seats.game import Seats
from rlstack.envs.seats.protocol import GameStep
from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.game import GameOutcome
from rlstack.networks import actor_critic
from rlstack.types import LearnerOutput

LEVELS, ACTIONS = 5, 3
OBSERVATION = specs.Array((3,), np.float32)
ACTION = specs.DiscreteArray(ACTIONS)
EXTRAS = {"cost": specs.Array((), np.float32), "level": specs.DiscreteArray(LEVELS)}


class Level:
    """The rule of an episode."""

    def __init__(self, level: int):
        self.level, self.time, self.last_action = level, 0, 0

    def step(self, action: Any) -> None:
        self.time, self.last_action = self.time + 1, int(action)

    @property
    def seen(self) -> np.ndarray:
        return np.array([self.time, self.level, self.last_action], np.float32)

    @property
    def extras(self) -> dict[str, Any]:
        return {"cost": np.float32(self.time + 0.5 * self.last_action), "level": self.level}

    @property
    def over(self) -> bool:
        return self.time == self.level + 3


class Costly(gymnasium.Env):
    """With Gymnasium: extras are entries of info. Levels count from ``start`` on outside."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, start: int = 0, forgets: bool = False):
        self._start, self._forgets = start, forgets
        cost = spaces.Box(-np.inf, np.inf, (), np.float32)
        level = spaces.Discrete(LEVELS, start=start)
        self.extras_space = spaces.Dict({"cost": cost, "level": level})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._game = Level(int(self.np_random.integers(LEVELS)))
        return self._game.seen, self._info()

    def step(self, action):
        self._game.step(action)
        ends = self._game.over and self._game.level % 2 == 0, self._game.over
        return self._game.seen, 1.0, ends[0], ends[1] and not ends[0], self._info()

    def _info(self):
        shown = self._game.extras
        shown["level"] += self._start
        return {} if self._forgets and self._game.time else shown


class CostlyDm(dm_env.Environment):
    """With dm_env: extras are a method beside the step."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)

    def observation_spec(self):
        return OBSERVATION

    def action_spec(self):
        return ACTION

    def extras_spec(self):
        return EXTRAS

    def extras(self):
        return self._game.extras

    def reset(self):
        self._game = Level(int(self._rng.integers(LEVELS)))
        return dm_env.restart(self._game.seen)

    def step(self, action):
        self._game.step(action)
        if not self._game.over:
            return dm_env.transition(1.0, self._game.seen)
        ends = dm_env.truncation if self._game.level % 2 else dm_env.termination
        return ends(1.0, self._game.seen)


class CostlyGame:
    """A game of two seats. The cost in the extras of a seat depends on that seat's last action."""

    seats = ("one", "two")
    observation_spec, action_spec, extras_spec = OBSERVATION, ACTION, EXTRAS

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)

    def reset(self):
        level = int(self._rng.integers(LEVELS))
        self._seats = [Level(level), Level(level)]
        return [seat.seen for seat in self._seats]

    def step(self, actions):
        for seat, action in zip(self._seats, actions, strict=True):
            seat.step(action)
        over, even = self._seats[0].over, self._seats[0].level % 2 == 0
        seen = [seat.seen for seat in self._seats]
        return GameStep(seen, [1.0, 1.0], [0.0 if over and even else 1.0] * 2, over)

    def extras(self, seat):
        return self._seats[seat].extras


two_seats = Seats(CostlyGame)


class JaxCostly:
    """In JAX: extras are a function of the state. Two seats make it a game."""

    def observation_spec(self):
        return OBSERVATION

    def action_spec(self):
        return ACTION

    def extras_spec(self):
        return EXTRAS

    def extras(self, state):
        time, level, action = state
        return {"cost": time + 0.5 * action, "level": jnp.broadcast_to(level, action.shape)}

    def reset(self, rng_key):
        state = jnp.zeros((), jnp.int32), jax.random.randint(rng_key, (), 0, LEVELS), self._zeros()
        return state, self._seen(state)

    def step(self, rng_key, state, action):
        state = state[0] + 1, state[1], jnp.asarray(action, jnp.int32)
        over, even = state[0] == state[1] + 3, state[1] % 2 == 0
        return Outcome(state, self._seen(state), 1.0, over & even, over)

    def _zeros(self):
        return jnp.zeros((), jnp.int32)

    def _seen(self, state):
        time, level, action = (jnp.asarray(x, jnp.float32) for x in state)
        return jnp.stack(jnp.broadcast_arrays(time, level, action), -1)


class JaxCostlyGame(JaxCostly):
    """In JAX, with two seats."""

    seats = ("one", "two")

    def step(self, rng_key, state, action):
        out = super().step(rng_key, state, action)
        terminated = jnp.broadcast_to(out.terminated, (2,))
        return GameOutcome(out.state, out.observation, jnp.ones(2), terminated, out.truncated)

    def _zeros(self):
        return jnp.zeros(2, jnp.int32)


def differing(timestep) -> Any:
    """The number of extras in steps ``[...]`` that are not those that the environment made."""
    time, level, action = (timestep.observation[..., i] for i in range(3))
    cost = timestep.extras["cost"] != time + 0.5 * action
    return (cost | (timestep.extras["level"] != level)).sum()


@dataclass(frozen=True)
class CostConfig:
    learning_rate: float = 0.01


class CostOutput(NamedTuple):
    action: Any


@register(CostConfig, network=actor_critic)
class CostAgent(Agent):
    """Acts at random, and learns the cost as a linear function of the observation."""

    has_priorities = False

    def initial_params(self, rng_key):
        return jnp.zeros(3)

    def initial_learner_state(self, rng_key, params):
        return ()

    def actor_step(self, rng_key, params, timestep, state):
        rows = timestep.reward.shape[0]
        return CostOutput(jax.random.randint(rng_key, (rows,), 0, ACTIONS)), state

    def learner_step(self, params, learner_state, batch):
        timestep = batch.trajectory.timestep

        def loss(weights):
            return ((timestep.observation @ weights - timestep.extras["cost"]) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        first, last = timestep.first(), timestep.last()
        logs = {
            "loss": value,
            "grad_norm": jnp.abs(gradient).max(),
            "differing": differing(timestep).astype(jnp.float32),
            "firsts": first.mean(),
            "terminations": (last & (timestep.discount == 0)).mean(),
            "truncations": (last & (timestep.discount == 1)).mean(),
            "level": timestep.extras["level"].mean(),
        }
        return params - self.cfg.learning_rate * gradient, learner_state, LearnerOutput(logs)
