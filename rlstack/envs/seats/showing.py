"""Adds entries to the observations of seats: the seat's number, and the state for the critic.

An observation then is a dict: the entries that the game shows, or ``observation`` if it shows no
dict, and these:

- ``seat``: the number of the seat, which networks see as one-hot. Seats that share a policy and
  whose observations do not tell them apart need it to play different parts.
- ``critic_state``: only the value of an actor-critic network sees it, so no action depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np
from dm_env import specs

from rlstack.envs.nest import Tree
from rlstack.envs.seats.protocol import GameStep, GameWithState, SeatGame
from rlstack.specs import ACTION_MASK, CRITIC_STATE, SEAT

CriticState = Literal["none", "joined", "game"]
SHOWN: dict[str, Any] = {"seat_index": False, "critic_state": "none"}  # the options, by default
JOINT = "joint"  # the option with which a row is a game, see `rlstack.envs.seats.joint`


def showing(
    game: Any,
    name: str,
    seat_index: bool = False,
    critic_state: CriticState = "none",
    *,
    in_turn: bool = False,
) -> Any:
    """Adds entries to the observations of a game's seats; without entries, returns the game itself.

    Args:
      game: a `rlstack.envs.seats.protocol.SeatGame`, or a `rlstack.envs.seats.turns.TurnGame`.
      name: the name of the game in errors.
      seat_index: whether a seat observes its own number.
      critic_state: what the critic sees: nothing more than the seat; the observations of all seats
          without their action masks, in a dict with an entry for each seat (joined); or the state
          of the game (game), for which the game must be a `GameWithState`. In a game of turns, a
          seat for which the game has ended is joined with its last observation.
      in_turn: whether the game's seats act in turn.

    Raises:
      ValueError: there is no such state, or the game already has an entry of this name.
    """
    if critic_state not in get_args(CriticState):
        raise ValueError(
            f"{name}: critic_state must be one of {', '.join(get_args(CriticState))}; got "
            f"{critic_state!r}."
        )
    if critic_state == "game" and not hasattr(game, "state_spec"):
        raise ValueError(
            f"{name}: critic_state=game needs a game with state() and state_spec; it has none. Use "
            "critic_state=joined, which shows the critic the observations of all seats."
        )
    if not seat_index and critic_state == "none":
        return game
    made = _ShowingInTurn if in_turn else _ShowingTogether
    return made(game, name, seat_index, critic_state)


def unwrapped(game: Any) -> Any:
    """Returns the game that `showing` was given."""
    return game.game if isinstance(game, _Showing) else game


class _Showing:
    """A game with more entries in its observations; everything else is that of the game."""

    def __init__(self, game: Any, name: str, seat_index: bool, critic_state: CriticState):
        self.game, self.seats = game, game.seats
        self.action_spec, self.extras_spec = game.action_spec, getattr(game, "extras_spec", ())
        self._seat_index, self._critic_state = seat_index, critic_state
        number = len(game.seats)
        more: dict[str, Tree] = {}
        if seat_index:
            more[SEAT] = specs.DiscreteArray(number, np.int32, SEAT)
        if critic_state == "game":
            more[CRITIC_STATE] = cast(GameWithState, game).state_spec
        elif critic_state == "joined":
            more[CRITIC_STATE] = _by_seat([_without_mask(game.observation_spec)] * number)
        shown = _entries(game.observation_spec)
        if twice := sorted(shown.keys() & more.keys()):
            raise ValueError(
                f"{name}: its observations already have an entry {', '.join(twice)}. Rename it in "
                "the game, or leave out seat_index and critic_state."
            )
        self.observation_spec = {**shown, **more}

    def extras(self, seat: int) -> Tree:
        """Returns the game's extras of a seat."""
        return self.game.extras(seat)

    def close(self) -> None:
        """Closes the game."""
        getattr(self.game, "close", lambda: None)()

    def _state(self, observations: Callable[[], Sequence[Tree]]) -> dict[str, Tree]:
        """Returns the entry for the critic; ``observations`` returns those of all seats."""
        if self._critic_state == "game":
            return {CRITIC_STATE: cast(GameWithState, self.game).state()}
        if self._critic_state == "joined":
            return {CRITIC_STATE: _by_seat([_without_mask(seen) for seen in observations()])}
        return {}

    def _shown(self, seat: int, observation: Tree, state: Mapping[str, Tree]) -> Tree:
        """Returns the observation of a seat with its entries."""
        number = {SEAT: np.int32(seat)} if self._seat_index else {}
        return {**_entries(observation), **state, **number}


class _ShowingTogether(_Showing):
    """A game in which all seats act at the same time."""

    game: SeatGame

    def reset(self) -> list[Tree]:
        """Starts a game and returns the observation of each seat."""
        return self._observe(self.game.reset())

    def step(self, actions: Sequence[Tree]) -> GameStep:
        """Takes the action of each seat."""
        outcome = self.game.step(actions)
        return outcome._replace(observations=self._observe(outcome.observations))

    def _observe(self, observations: Sequence[Tree]) -> list[Tree]:
        state = self._state(lambda: observations)
        return [self._shown(seat, seen, state) for seat, seen in enumerate(observations)]


class _ShowingInTurn(_Showing):
    """A game in which one seat acts at a time.

    Its methods are those of `rlstack.envs.seats.turns.TurnGame`. That module imports this one, so
    its named tuples are not named here.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last: dict[int, Tree] = {}  # the observations of seats for which the game has ended

    def reset(self) -> Any:
        """Starts a game."""
        self._last = {}
        return self._with_entries(self.game.reset())

    def observe(self, seat: int) -> Tree:
        """Returns what a seat for which the game has not ended sees now."""
        return self._shown(seat, self.game.observe(seat), self._state(self._observations))

    def step(self, action: Tree) -> Any:
        """Takes the action of the seat whose turn it is."""
        return self._with_entries(self.game.step(action))

    def _with_entries(self, turn: Any) -> Any:
        """Returns a turn, with the entries in the observations of seats whose game has ended."""
        self._last.update({seat: ending.observation for seat, ending in turn.ended.items()})
        self._last.pop(turn.seat, None)  # it has joined again
        if not turn.ended:
            return turn
        state = self._state(self._observations)
        ended = {
            seat: ending._replace(observation=self._shown(seat, ending.observation, state))
            for seat, ending in turn.ended.items()
        }
        return turn._replace(ended=ended)

    def _observations(self) -> list[Tree]:
        return [
            self._last[seat] if seat in self._last else self.game.observe(seat)
            for seat in range(len(self.seats))
        ]


def _entries(observation: Tree) -> Mapping[str, Tree]:
    return observation if isinstance(observation, Mapping) else {"observation": observation}


def _by_seat(observations: Sequence[Tree]) -> dict[str, Tree]:
    return {str(seat): seen for seat, seen in enumerate(observations)}


def _without_mask(observation: Tree) -> Tree:
    if isinstance(observation, Mapping) and ACTION_MASK in observation:
        return {name: seen for name, seen in observation.items() if name != ACTION_MASK}
    return observation
