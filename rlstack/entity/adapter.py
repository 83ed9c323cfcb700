"""Adapter from an entity environment to the ``dm_env.Environment`` that pools and actors take."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import dm_env
import numpy as np
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.entity.environment import Action, Environment, Observation
from rlstack.entity.padded import ActionContext, Padded, PaddedCodec
from rlstack.entity.validator import Validator

_log = logging.getLogger(__name__)

_MAX_RESETS = 100  # consecutive episodes that may be over at their first observation


@functools.cache  # once for each game
def _tell_of_two_ends(name: str) -> None:
    _log.warning(
        "%s: an observation has done and truncated, which counts as an end of the game: learners "
        "do not bootstrap from it. Where only a step limit ends an episode, set truncated alone.",
        name,
    )


class EntityEnv(dm_env.Environment):
    """A game with padded arrays as observations and actions; made by `as_dm_env`.

    Attributes:
      game: the adapted environment.
      name: the game's name in errors.
      codec: converts the game's observations and actions.
      last_observation: the newest observation of the game; None before the first reset.
      last_metrics: the metrics of that observation. Pools return the metrics of the last
        observation of each episode.
    """

    def __init__(self, game: Environment, name: str, validate: bool, extras: Sequence[str] = ()):
        self.game = game
        self.name = name or type(game).__name__
        self.codec = PaddedCodec(game.obs_space, game.action_space, self.name)
        self.last_observation: Observation | None = None
        self.last_metrics: Mapping[str, float] = {}
        self._validator = Validator(game.obs_space, game.action_space, self.name)
        self._validate = validate
        self._extras = [extras] if isinstance(extras, str) else list(extras)
        self._has_shown = False  # whether an observation has had metrics
        self._context: ActionContext | None = None  # None: the next step begins an episode

    def observation_spec(self) -> dict[str, dict[str, specs.Array]]:
        """Returns the specs of the padded arrays, see `rlstack.entity.padded`."""
        return self.codec.observation_spec

    def action_spec(self) -> dict[str, specs.BoundedArray]:
        """Returns the specs of the choices by action type, int32 [capacity]."""
        return self.codec.action_spec

    def extras_spec(self) -> dict[str, specs.Array] | tuple[()]:
        """Returns the specs of the metrics to show as extras, float32 []; () for none."""
        return {name: specs.Array((), np.float32, name) for name in self._extras} or ()

    def extras(self) -> dict[str, np.float32]:
        """Returns these metrics of the newest observation; 0 if it has no metrics at all.

        Raises:
          EnvError: it has others only, or a game has ended and no observation had any.
        """
        metrics, names = self.last_metrics, self._extras
        self._has_shown |= bool(metrics)
        over = self.last_observation is not None and self.last_observation.done
        if (metrics or (over and not self._has_shown)) and not metrics.keys() >= set(names):
            raise EnvError(
                f"{self.name}: an observation must have the metrics that extras names, "
                f"{', '.join(names)}; got {', '.join(metrics) or 'none'}. Add them in the game, or "
                "change extras."
            )
        return {name: np.float32(metrics.get(name, 0)) for name in names}

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode. Episodes that are over at their first observation are skipped.

        Raises:
          EnvError: the game returned an invalid observation, or too many consecutive episodes were
              over at their first observation.
        """
        return self._begin(self.game.reset)

    def reset_with_index(self, index: int) -> dm_env.TimeStep:
        """Begins episode ``index`` by the game's own ``reset_with_index``.

        A game without that method begins an ordinary episode.

        Raises:
          EnvError: see `reset`.
        """
        start = getattr(self.game, "reset_with_index", None)
        return self._begin(self.game.reset if start is None else functools.partial(start, index))

    def _begin(self, start: Callable[[], Observation]) -> dm_env.TimeStep:
        self._context = None
        for _ in range(_MAX_RESETS):
            observation, start = start(), self.game.reset
            padded, context = self._encode(observation)
            if not observation.over:
                self._context = context
                return dm_env.restart(padded)
        raise EnvError(
            f"{self.name}: reset: must begin an episode that is not done; got {_MAX_RESETS} in a "
            "row that were. Choose another start in reset when nothing is left to do."
        )

    def step(self, action: Mapping[str, np.ndarray]) -> dm_env.TimeStep:
        """Plays one step, or begins an episode and ignores ``action`` if none is in progress.

        The last step of an episode has discount 0 if the game has ended, also in the step of its
        limit, and 1 if only the limit ended it.

        Raises:
          EnvError: the game returned an invalid observation, or a choice is not legal.
        """
        if self._context is None:
            return self.reset()
        if self._validate:
            self.codec.check_choices(self._context, action)
        actions = self.codec.decode(self._context, action)
        self._context = None  # if the game raises, the next step begins an episode
        observation = self.game.act(actions)
        padded, context = self._encode(observation)
        reward = float(observation.reward)
        if observation.done:
            if observation.truncated:
                _tell_of_two_ends(self.name)
            return dm_env.termination(reward, padded)
        if observation.truncated:
            return dm_env.truncation(reward, padded, discount=1.0)
        self._context = context
        return dm_env.transition(reward, padded)

    def to_actions(self, action: Mapping[str, np.ndarray]) -> dict[str, Action]:
        """Returns the actions, with ids and labels, that `step` would pass to the game.

        Raises:
          ValueError: no episode is in progress.
        """
        if self._context is None:
            raise ValueError(
                f"{self.name}: to_actions: an episode must be in progress. Call reset."
            )
        return self.codec.decode(self._context, action)

    def close(self) -> None:
        """Closes the game, if it has a ``close`` method."""
        getattr(self.game, "close", lambda: None)()

    def _encode(self, observation: Observation) -> tuple[Padded, ActionContext]:
        if self._validate:
            self._validator.check(observation)
        self.last_observation, self.last_metrics = observation, observation.metrics
        return self.codec.encode(observation)


def as_dm_env(
    environment: Environment, name: str = "", validate: bool = True, extras: Sequence[str] = ()
) -> EntityEnv:
    """Returns a game as a ``dm_env.Environment`` with arrays of fixed shapes.

    Args:
      environment: the game.
      name: the game's name in errors; by default the name of its class.
      validate: True to check every observation and every choice. False makes steps faster, but
        errors of the game go unnoticed.
      extras: names of metrics to show in `rlstack.types.TimeStep.extras`, as numbers. An
        observation without metrics shows 0.

    Raises:
      ValueError: the spaces have no action type, or have one that no entity can take.
    """
    return EntityEnv(environment, name, validate, extras)
