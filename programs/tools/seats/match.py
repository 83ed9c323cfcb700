"""Plays a game of several seats, each by a player of its own: a policy, or a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from rlstack.programs.build.policies.policy import Policy, Prediction
from rlstack.programs.pictures.stage import Stage
from rlstack.types import Array, PyTree, TimeStep


class Player(Protocol):
    """What plays a seat."""

    @property
    def sees_waits(self) -> bool:
        """Whether the player also acts when the game ignores it, as in the turns of others."""

    def begin(self) -> None:
        """Begins an episode with the next observation."""

    def predict(self, observation: PyTree, reward: float) -> Prediction:
        """Acts at one step; the reward is the sum since it acted last."""


class PolicyPlayer:
    """A policy as a player, which acts at the steps at which it acted in training."""

    def __init__(self, policy: Policy) -> None:
        """Stores the policy, which has a state: no other player may use it."""
        self._policy = policy

    @property
    def sees_waits(self) -> bool:
        """Whether the policy was trained in a pool in which seats that wait act too."""
        return self._policy.experiment.env.wait_num == 0

    def begin(self) -> None:
        """Resets the state of the policy."""
        self._policy.reset()

    def predict(self, observation: PyTree, reward: float) -> Prediction:
        """Acts."""
        return self._policy.predict(observation, reward)


class Moment(NamedTuple):
    """A step of a game."""

    timestep: TimeStep  # [seats, ...]
    step: int  # number of the step, from 0
    returns: Array  # [seats], undiscounted returns so far
    choices: Sequence[Prediction | None]  # by seat; None for seats whose action is ignored
    is_last: bool  # whether nothing follows


class Game(NamedTuple):
    """A game that was played."""

    returns: tuple[float, ...]  # undiscounted return of each seat
    length: int  # number of steps
    cut: bool  # True if a step limit stopped the game before its end
    moves: tuple[bytes, ...]  # the actions of each step


def play_game(
    stage: Stage,
    players: Sequence[Player],
    max_steps: int,
    show: Callable[[Moment], None] = lambda moment: None,
) -> Game:
    """Plays a new game.

    A seat that is not in the game, because it has left or joins later, does not act.

    Args:
      stage: the game.
      players: the players, one for each seat.
      max_steps: number of steps after which the game is cut.
      show: called at each step before the players' actions are applied, and once at the end; may
        raise.
    """
    number = len(players)
    timestep = stage.pool.reset()
    returns, since = np.zeros(number), np.zeros(number)
    away = np.zeros(number, bool)  # seats that leave the game or are not in it
    over = False
    moves: list[bytes] = []
    while True:
        is_last = over or len(moves) >= max_steps
        ignored = np.ones(number, bool) if is_last else _ignored(stage, timestep) | away
        found = [None] * number if is_last else _predictions(players, timestep, since, ignored)
        choices = [None if ignored[seat] else one for seat, one in enumerate(found)]
        show(Moment(timestep, len(moves), returns.copy(), choices, is_last))
        if is_last:
            seats = tuple(float(total) for total in returns)
            return Game(seats, len(moves), not over, tuple(moves))
        since[[one is not None for one in found]] = 0.0
        actions = [_nothing(stage) if one is None else one.action for one in found]
        moves.append(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(actions)))
        timestep = stage.pool.step(jax.tree.map(lambda *rows: np.stack(rows), *actions))
        reward = np.asarray(timestep.reward, np.float64)
        returns += reward
        since += reward
        last = np.asarray(timestep.last())
        away = last | np.asarray(timestep.first())
        over = bool(away.all() and last.any())


def _ignored(stage: Stage, timestep: TimeStep) -> Array:
    """Returns the seats whose actions the game ignores at a step, bool ``[seats]``."""
    over = (np.asarray(timestep.discount) == 0.0) & ~np.asarray(timestep.first())
    turn = stage.turn
    return over if turn is None else over | (np.arange(len(over)) != turn)


def _predictions(
    players: Sequence[Player], timestep: TimeStep, since: Array, ignored: Array
) -> list[Prediction | None]:
    """Returns each player's action and estimates; None for players that do not see this step.

    Args:
      players: the players, one for each seat.
      timestep: the step.
      since: ``[seats]``, the sum of rewards since each player's last action.
      ignored: ``[seats]``, True for the seats whose actions the game ignores.
    """
    first = timestep.first()
    found: list[Prediction | None] = []
    for seat, player in enumerate(players):
        if first[seat]:
            player.begin()
        if ignored[seat] and not player.sees_waits:
            found.append(None)
            continue
        observation = seen_by(timestep, seat)
        found.append(player.predict(observation, float(since[seat])))
    return found


def seen_by(timestep: TimeStep, seat: int) -> PyTree:
    """Returns the observation of one seat."""
    return jax.tree.map(lambda x: np.asarray(x)[seat], timestep.observation)


def _nothing(stage: Stage) -> PyTree:
    """Returns the action of a seat that waits for its turn, which the game ignores."""
    return jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), stage.spec.action)
