"""The protocol of games of several seats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rlstack.envs.auto_reset import FIRST, LAST, MID
from rlstack.envs.nest import Tree


class GameStep(NamedTuple):
    """The result of one step of a game; sequences have one entry for each seat."""

    observations: Sequence[Tree]
    rewards: Sequence[float]
    # 0 where the future of a seat is worth nothing: it leaves the game; otherwise 1.
    discounts: Sequence[float]
    last: bool = False  # whether the game is over, for all seats
    infos: Sequence[Mapping[str, float]] = ()  # numbers to log, those of the last step by default
    # The values of `rlstack.types.StepType`: LAST for a seat that leaves, FIRST for one that is not
    # in the game or joins it. By default a seat leaves with discount 0, and joins with a new game.
    step_types: Sequence[int] = ()


def step_types_of(step: GameStep, left: set[int]) -> list[int]:
    """Returns the step type of each seat, and adds to ``left`` those that leave the game.

    Args:
      step: the step of the game.
      left: the seats that are not in the game before the step.
    """
    found = list(step.step_types)
    if not found:
        ends = [step.last or discount == 0 for discount in step.discounts]
        found = [FIRST if seat in left else LAST if end else MID for seat, end in enumerate(ends)]
    left.update(seat for seat, kind in enumerate(found) if kind == LAST)
    return found


class SeatGame(Protocol):
    """A game in which all seats act at the same time.

    People see ``str(game)``, if the class defines ``__str__``, and the names in ``action_names``,
    if it has one for each action. ``render()`` may return a picture, uint8 ``[H, W, 3]``, or None.
    A property ``extras_spec``, the spec of one seat's extras, and ``extras(seat)`` may show further
    signals of the newest step, such as a cost; see `rlstack.types.TimeStep`.
    """

    @property
    def seats(self) -> Sequence[str]:
        """A name for each seat, such as its role; names may repeat."""

    @property
    def observation_spec(self) -> Tree:
        """The spec of one seat's observation, the same for all seats."""

    @property
    def action_spec(self) -> Tree:
        """The spec of one seat's action, the same for all seats."""

    def reset(self) -> Sequence[Tree]:
        """Starts a game and returns the observation of each seat."""

    def step(self, actions: Sequence[Tree]) -> GameStep:
        """Takes the action of each seat."""


class GameWithState(SeatGame, Protocol):
    """A game that can also show its whole state, for a critic that sees more than any seat does."""

    @property
    def state_spec(self) -> Tree:
        """The spec of the state."""

    def state(self) -> Tree:
        """Returns the state that belongs to the newest observations."""
