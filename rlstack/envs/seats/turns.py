"""Games whose seats act in turn, as rows of a pool: `TurnGame` and `Turns`.

In an asynchronous pool a seat is in a batch only when it is its turn or when its game is over for
it. So a seat that waits makes no transition, and the reward of a transition is the sum of the
seat's rewards from one of its turns to the next: ``AsyncEnv(Turns(MyGame), 8, wait_num=4)`` has
four games of two seats, and one seat of each game is in every batch. Threads wait for the turns of
seats, so the pool needs as many threads as rows.

In a synchronous pool, such as that of an evaluation, the rows of seats that wait repeat the newest
observation, with reward 0, discount 1 and the first action as the only legal one; their actions are
ignored. Returns of whole episodes are the same. A seat for which the game has ended is LAST in that
step, and FIRST until the next game: it makes no transition.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import dm_env
import numpy as np

from rlstack.checks import EnvError
from rlstack.envs.nest import Nest, Tree
from rlstack.envs.seats.game import EnvOfSeat, Seats, Table
from rlstack.envs.seats.showing import unwrapped
from rlstack.specs import ACTION_MASK


class Ending(NamedTuple):
    """The end of a game for one seat."""

    observation: Tree
    reward: float  # the sum of its rewards since its last turn
    discount: float = 0.0  # 1 if it was only truncated
    info: Mapping[str, Any] = MappingProxyType({})


class Turn(NamedTuple):
    """The result of an action in a game of turns."""

    seat: int | None  # the seat that acts next; None if the game is over
    reward: float = 0.0  # the sum of this seat's rewards since its last turn
    ended: Mapping[int, Ending] = MappingProxyType(
        {}
    )  # the seats for which the game has just ended


class TurnGame(Protocol):
    """A game in which one seat acts at a time, in any order. It is over once it has ended for all.

    People see it as a `rlstack.envs.seats.protocol.SeatGame`.
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

    def reset(self) -> Turn:
        """Starts a game."""

    # A property ``extras_spec`` and ``extras(seat)`` are as those of a `SeatGame`. A seat's extras
    # are asked for when it gets a step: at its turn, and when the game has ended for it.

    # A game whose seats may join later also has ``plays(seat)``, whether a seat takes part now.

    def observe(self, seat: int) -> Tree:
        """Returns what a seat for which the game has not ended sees now."""

    def step(self, action: Tree) -> Turn:
        """Takes the action of the seat whose turn it is."""


class Turns(Seats):
    """Builds the environments of the seats of a `TurnGame`, one after the other; picklable."""

    in_turn: ClassVar[bool] = True

    def table(self, game: Any) -> Any:
        """Returns the table of a game."""
        return _TurnTable(game, self.name)

    def seat(self, table: Any, seed: int) -> Any:
        """Returns the environment of the next seat."""
        return TurnEnv(table, seed)


class _TurnTable(Table):
    """One game, and the steps that its seats have not taken yet.

    Attributes:
      turn: the seat that acts next; None if the game is over.
      infos: numbers to log, by seat, for the seats whose game has ended.
      extras: the extras of the newest step that each seat has taken; empty if the game has none.
    """

    def __init__(self, game: TurnGame, name: str) -> None:
        super().__init__(game, name)
        self._changed = threading.Condition()
        self._number = len(game.seats)
        self._plays = getattr(unwrapped(game), "plays", lambda seat: True)
        self.turn: int | None = None
        self._playing: set[int] = set()  # seats that have had a turn and for which it goes on
        self._ended: dict[int, float] = {}  # seats for which the game has ended, with discounts
        self._waiting = set[int]()  # seats that want a new game
        self._failure: BaseException | None = None  # of a step in a synchronous pool
        self._due: dict[int, dm_env.TimeStep] = {}
        self._shows = bool(Nest(getattr(game, "extras_spec", ())).leaves)
        self._extras_due: dict[int, Tree] = {}  # those of the steps that are due
        self.extras: dict[int, Tree] = {}
        self._announced: dict[int, Tree | None] = {}  # next actions by seat, in a synchronous pool
        self._returns = [0.0] * self._number
        self._seen: dict[int, Tree] = {}  # the last observations of seats that have ended
        self.infos: dict[int, Mapping[str, Any]] = {}

    def announce(self, seat: int, action: Tree | None, together: bool) -> None:
        """Takes the next action of a seat, None for a new game."""
        with self._changed:
            if together:
                self._announced[seat] = action
            elif action is not None:
                self._take(self.game.step(action))
            else:
                self._waiting.add(seat)
                if len(self._waiting) == self._number:
                    self._begin()

    def next_step(self, seat: int) -> dm_env.TimeStep:
        """Waits for the seat's next step and returns it.

        Raises:
          EnvError: the pool was closed, or in a synchronous pool not all seats have announced.
        """
        with self._changed:
            if self._announced and seat not in self._due and self._failure is None:
                try:
                    self._step_together()
                except BaseException as error:
                    self._failure = error
                    self._changed.notify_all()
            self._changed.wait_for(lambda: seat in self._due or self._closed or self._failure)
            if self._failure is not None:  # the seats that wait for this step must not hang
                raise self._failure
            if self._closed:
                raise EnvError(f"{self.name}: the pool was closed while a seat waited.")
            if self._shows:
                self.extras[seat] = self._extras_due.pop(seat)
            return self._due.pop(seat)

    def returns(self, seat: int) -> dict[str, float]:
        """Returns the undiscounted sums of rewards so far, of the seat and of all seats."""
        named = f"return_of_{self.game.seats[seat]}"
        return {"team_return": sum(self._returns), named: self._returns[seat]}

    def interrupt(self) -> None:
        """Makes waits raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        self.interrupt()
        with self._changed:
            if self.seeds:  # the first seat to close
                self.seeds = []
                getattr(self.game, "close", lambda: None)()

    def _begin(self) -> Turn:
        """Starts a game; the seats get their FIRST steps with their first turns."""
        self._playing, self._ended, self._seen, self._due = set(), {}, {}, {}
        self._returns = [0.0] * self._number
        turn = self.game.reset()
        self._take(turn)
        return turn

    def _take(self, turn: Turn) -> None:
        """Makes the steps of the seats for which something has happened."""
        for seat, ending in turn.ended.items():
            self._returns[seat] += ending.reward
            self._ended[seat], self._seen[seat] = ending.discount, ending.observation
            self.infos[seat] = ending.info
        due: dict[int, dm_env.TimeStep] = {}
        for seat, ending in turn.ended.items():
            if seat in self._playing:  # otherwise it made no decision, and waits for the next game
                self._playing.discard(seat)
                seen = playable(ending.observation)
                due[seat] = dm_env.TimeStep(
                    dm_env.StepType.LAST, ending.reward, ending.discount, seen
                )
        self.turn = turn.seat
        if turn.seat is not None:
            self._ended.pop(turn.seat, None)  # it has joined again
            self._returns[turn.seat] += turn.reward
            seen = self.game.observe(turn.seat)
            if turn.seat in self._playing:
                due[turn.seat] = dm_env.transition(turn.reward, seen, 1.0)
            else:
                self._playing.add(turn.seat)
                self._waiting.discard(turn.seat)
                due[turn.seat] = dm_env.restart(seen)
        self._give(due)
        self._changed.notify_all()

    def _give(self, due: Mapping[int, dm_env.TimeStep]) -> None:
        """Keeps steps for their seats, with the extras of now: others may move on before."""
        self._due.update(due)
        if self._shows:
            self._extras_due.update({seat: self.game.extras(seat) for seat in due})

    def _step_together(self) -> None:
        """Makes the next steps of all rows of a synchronous pool."""
        if len(self._announced) < self._number:
            raise EnvError(
                f"{self.name}: its {self._number} seats share a game, so every {self._number} "
                f"consecutive environments of a pool are one game; {len(self._announced)} act. "
                f"Make the number of environments a multiple of {self._number}, in a process pool "
                "each worker's share too."
            )
        actions, self._announced = self._announced, {}
        if self.turn is None or all(action is None for action in actions.values()):
            self._begin()
            steps = [dm_env.restart(self._look(seat)) for seat in range(self._number)]
        elif any(actions[seat] is None for seat in actions if seat not in self._ended):
            raise EnvError(f"{self.name}: a seat began a new game while others play on.")
        else:
            before = list(self._returns)
            away = {seat for seat in range(self._number) if not self._plays(seat)}
            gone = away | set(self._ended)
            self._take(self.game.step(actions[self.turn]))
            steps = [
                dm_env.restart(self._look(seat))
                if seat in gone
                else dm_env.TimeStep(
                    dm_env.StepType.LAST
                    if seat in self._ended or self.turn is None
                    else dm_env.StepType.MID,
                    self._returns[seat] - before[seat],
                    self._ended.get(seat, 1.0),
                    self._look(seat),
                )
                for seat in range(self._number)
            ]
        self._give(dict(enumerate(steps)))
        self._playing = set(range(self._number)) - set(self._ended)

    def _look(self, seat: int) -> Tree:
        """Returns what a row of a synchronous pool sees."""
        if seat == self.turn:
            return self.game.observe(seat)
        seen = self._seen[seat] if seat in self._ended else self.game.observe(seat)
        return playable(seen, waits=True)


class TurnEnv(EnvOfSeat):
    """The environment of one seat of a `TurnGame`."""

    def __init__(self, table: _TurnTable, seed: int) -> None:
        """Takes the next free seat."""
        super().__init__(table, seed)
        self._table = table

    def announce(self, action: Tree | None, together: bool) -> None:
        """Takes the next action, None for a new game, before any environment steps."""
        self._table.announce(self.seat, action, together)

    @property
    def turn(self) -> int | None:
        """The number of the seat that acts next; None if the game is over."""
        return self._table.turn

    def interrupt(self) -> None:
        """Makes a step in progress raise, because the pool is closed."""
        self._table.interrupt()

    def reset(self) -> dm_env.TimeStep:
        """Waits for the seat's first turn in a new game."""
        return self._table.next_step(self.seat)

    def step(self, action: Tree) -> dm_env.TimeStep:
        """Waits for the seat's next turn, or for the end of the game."""
        del action  # announced
        step = self._table.next_step(self.seat)
        if step.last():
            infos = self._table.infos.get(self.seat, {})
            self.last_metrics = {**infos, **self._table.returns(self.seat)}
        return step

    def extras_spec(self) -> Tree:
        """Returns the spec of one seat's extras; () if the game has none."""
        return getattr(self.game, "extras_spec", ())

    def extras(self) -> Tree:
        """Returns the extras of this seat at its newest step."""
        return self._table.extras[self.seat]

    def close(self) -> None:
        """Closes the game, for all its seats."""
        self._table.close()


def playable(observation: Tree, waits: bool = False) -> Tree:
    """Returns an observation with at least one legal action, so that a policy can read it.

    Games often mark no action as legal where a seat cannot act.

    Args:
      observation: the observation of a seat.
      waits: whether to mark only the first action as legal.
    """
    if not isinstance(observation, Mapping) or ACTION_MASK not in observation:
        return observation
    mask = np.array(observation[ACTION_MASK])
    if waits:
        mask[...] = 0
    if not mask.any():
        mask[..., 0] = 1
    return {**observation, ACTION_MASK: mask}
