"""An entity environment as a ``dm_env.Environment``, which pools and actors take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dm_env

from rlstack.entity.environment import Action, Environment, Observation
from rlstack.entity.tables import Roster, Table
from rlstack.entity.validator import Validator
from rlstack.envs.adapters import EnvError

_MAX_RESETS = 100  # episodes in a row that are over as they begin


class EntityEnv(dm_env.Environment):
    """A game whose observations and actions are padded arrays; ``as_dm_env`` makes it.

    Attributes:
      game: the environment within.
      name: how messages call it.
      table: how its entities are laid out.
      last_observation: what the game showed last, None before the first reset.
      last_metrics: the metrics of that.
    """

    def __init__(self, game: Environment, name: str, validate: bool):
        self.game = game
        self.name = name or type(game).__name__
        self.table = Table(game.obs_space, game.action_space, self.name)
        self.last_observation: Observation | None = None
        self.last_metrics: Mapping[str, float] = {}
        self._validator = Validator(game.obs_space, game.action_space, self.name)
        self._validate = validate
        self._roster: Roster | None = None  # None when the next step begins an episode

    def observation_spec(self) -> dict[str, Any]:
        """Returns the specs of the padded arrays (see ``rlstack.entity.tables``)."""
        return self.table.observation_spec

    def action_spec(self) -> dict[str, Any]:
        """Returns the specs of the choices by action, int32 [capacity]."""
        return self.table.action_spec

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode that is not over at once.

        Raises:
          EnvError: a wrong observation, or all of many episodes were over at once.
        """
        self._roster = None
        for _ in range(_MAX_RESETS):
            observation = self.game.reset()
            padded, roster = self._padded(observation)
            if not (observation.done or observation.truncated):
                self._roster = roster
                return dm_env.restart(padded)
        raise EnvError(
            f"{self.name}: reset: must begin an episode that is not over; got {_MAX_RESETS} in a "
            "row that were. Begin anew within reset where a start leaves nothing to do."
        )

    def step(self, action: Mapping[str, Any]) -> dm_env.TimeStep:
        """Plays one step; begins an episode where none is under way, whatever the action.

        A truncated episode ends with discount 1, one that is done for another reason with 0.

        Raises:
          EnvError: a wrong observation, or a choice that is not legal.
        """
        if self._roster is None:
            return self.reset()
        if self._validate:
            self.table.check_choices(self._roster, action)
        actions = self.table.act(self._roster, action)
        self._roster = None  # should the game fail, the next step begins an episode
        observation = self.game.act(actions)
        padded, roster = self._padded(observation)
        reward = float(observation.reward)
        if observation.truncated:
            return dm_env.truncation(reward, padded, discount=1.0)
        if observation.done:
            return dm_env.termination(reward, padded)
        self._roster = roster
        return dm_env.transition(reward, padded)

    def to_actions(self, action: Mapping[str, Any]) -> dict[str, Action]:
        """Returns what the game would be told by ``step``, with ids and labels.

        Raises:
          ValueError: no episode is under way.
        """
        if self._roster is None:
            raise ValueError(f"{self.name}: to_actions: an episode must be under way. Reset first.")
        return self.table.act(self._roster, action)

    def close(self) -> None:
        """Closes the game, if it has a ``close``."""
        getattr(self.game, "close", lambda: None)()

    def _padded(self, observation: Observation) -> tuple[dict[str, Any], Roster]:
        if self._validate:
            self._validator.check(observation)
        self.last_observation, self.last_metrics = observation, observation.metrics
        return self.table.observe(observation)


def as_dm_env(environment: Environment, name: str = "", validate: bool = True) -> EntityEnv:
    """Returns a game as a ``dm_env.Environment`` of fixed shapes.

    Args:
      environment: the game.
      name: how messages call it; its class by default.
      validate: whether every observation and every choice is checked. Without, each step is faster
        and a wrong one goes unnoticed.

    Raises:
      ValueError: its spaces leave nobody to act.
    """
    return EntityEnv(environment, name, validate)
