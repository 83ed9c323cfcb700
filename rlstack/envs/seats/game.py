"""Games in which all seats act at the same time, as rows of a pool: `SeatGame` and `Seats`.

A pool has one row for each seat, and the seats of one game are consecutive rows. `Seats` builds the
environment of each row from a class of games: ``SyncEnv(Seats(MyGame), 8)`` has four games of two
seats.

Every game has two more options, which `rlstack.envs.seats.showing` explains: ``seat_index`` tells
seats that share a policy which seat they are, and ``critic_state`` shows the state of the game, or
the observations of all seats, to the critic.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import dm_env

from rlstack.checks import EnvError
from rlstack.envs.nest import Nest, Tree
from rlstack.envs.seats.protocol import GameStep, SeatGame, step_types_of
from rlstack.envs.seats.showing import SHOWN, showing

__all__ = ["GameStep", "SeatEnv", "SeatGame", "Seats"]


class Seats:
    """Builds the environments of the seats of a game, one after the other; picklable.

    Attributes:
      game: builds a game.
      name: the name of the game, for errors.
      in_turn: whether the seats of these games act in turn.
    """

    in_turn: ClassVar[bool] = False

    def __init__(self, game: Callable[..., Any]) -> None:
        self.game = game
        self.name = getattr(game, "__name__", type(game).__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        """The options of the game and of all games; pools check whether they include ``seed``."""
        own = inspect.signature(self.game)
        found = list(own.parameters.values())
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in {"seed": 0, **SHOWN}.items()
            if name not in own.parameters
        ]
        kinds = [p.kind for p in found]
        rest = inspect.Parameter.VAR_KEYWORD
        at = kinds.index(rest) if rest in kinds else len(found)
        return own.replace(parameters=[*found[:at], *more, *found[at:]])

    def make(self, **options: Any) -> Any:
        """Returns a game whose seats see what the options ask for."""
        seen = {name: options.pop(name, default) for name, default in SHOWN.items()}
        return showing(self.game(**options), self.name, **seen, in_turn=self.in_turn)

    def table(self, game: Any) -> Table:
        """Returns the table that the environments of a game's seats share."""
        return _Table(game, self.name)

    def seat(self, table: Any, seed: int) -> Any:
        """Returns the environment of the next seat."""
        return SeatEnv(table, seed)

    def seats(self, **options: Any) -> tuple[str, ...]:
        """Returns the name of each seat of a game with these options."""
        game = self.make(**options)
        try:
            return tuple(game.seats)
        finally:
            getattr(game, "close", lambda: None)()

    def __call__(self, seed: int = 0, **options: Any) -> Any:
        """Returns the environment of the next seat; a game has the seed of its first seat."""
        key = (id(self.game), repr(sorted(options.items())))
        reference = _OPEN.tables.pop(key, None)
        table = None if reference is None else reference()
        if table is None or not table.waits_for(seed):
            seeded = "seed" in inspect.signature(self.game).parameters
            made = self.make(**options, seed=seed) if seeded else self.make(**options)
            table = self.table(made)
        env = self.seat(table, seed)
        if not table.is_full:
            _OPEN.tables[key] = weakref.ref(table)
        return env


class _OpenTables(threading.local):
    """Games that do not have all their environments yet.

    Thread-local, because a pool builds its environments in one thread, in order.
    """

    def __init__(self) -> None:
        self.tables: dict[tuple[int, str], weakref.ref[Table]] = {}


_OPEN = _OpenTables()
_FIRST, _LAST = int(dm_env.StepType.FIRST), int(dm_env.StepType.LAST)
_FIRST_DISCOUNT = 1.0


class Table:
    """A game that the environments of its seats share.

    Attributes:
      game: the game.
      name: the name of the game, for errors.
      seeds: the seeds of the environments added so far, in the order of the seats.
    """

    def __init__(self, game: Any, name: str) -> None:
        """Starts without seats; each seat's environment is added later."""
        self.game, self.name = game, name
        self.seeds: list[int] = []
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether all seats have their environments."""
        return len(self.seeds) >= len(self.game.seats)

    def waits_for(self, seed: int) -> bool:
        """Returns whether the next environment of a pool, with this seed, is a seat of this game.

        It is not if the game's own pool is closed, such as one that was made to read the specs:
        the garbage collector may free such a game late.
        """
        return not (self._closed or self.is_full or seed in self.seeds)


class _Table(Table):
    """One game, and the actions that its seats have announced for its next step."""

    def __init__(self, game: SeatGame, name: str) -> None:
        super().__init__(game, name)
        self._lock = threading.Lock()
        self._announced: dict[int, Tree | None] = {}
        self._outcome: GameStep | None = None  # result of the step that seats take now
        self._kinds = [0] * len(game.seats)  # the step types of the seats in it
        self._untaken: set[int] = set()  # seats that have not taken it
        self._left: set[int] = set()  # seats that are not in the game any more
        self._over = True
        self._failure: BaseException | None = None  # of a step or a reset
        self._returns = [0.0] * len(game.seats)  # returns of the seats in the episode in progress

    def announce(self, seat: int, action: Tree | None) -> None:
        """Takes the next action of a seat, None for a new game."""
        with self._lock:
            self._announced[seat] = action

    def take(self, seat: int) -> tuple[int, GameStep]:
        """Returns the step of the game that all seats have announced, and the seat's step type."""
        with self._lock:
            if self._failure is not None:  # the cause, also where other seats learn of it first
                raise self._failure
            if seat not in self._untaken:
                try:
                    self._step()
                except BaseException as error:
                    self._failure = error
                    raise
            self._untaken.discard(seat)
            assert self._outcome is not None
            return self._kinds[seat], self._outcome

    def _step(self) -> None:
        number = len(self.game.seats)
        if len(self._announced) < number:
            raise EnvError(
                f"{self.name}: all of its {number} seats act at the same time, so every {number} "
                f"consecutive environments of a pool are one game and step together; "
                f"{len(self._announced)} act. Make the number of environments a multiple of "
                f"{number}, in a process pool each worker's share too, and use no wait_num."
            )
        actions = [self._announced[seat] for seat in range(number)]
        self._announced.clear()
        if self._over or all(action is None for action in actions):
            ones = [_FIRST_DISCOUNT] * number
            self._outcome = GameStep(self.game.reset(), [0.0] * number, ones)
            self._kinds, self._left = [_FIRST] * number, set()
            self._returns = [0.0] * number
        elif any(actions[seat] is None and self._kinds[seat] != _LAST for seat in range(number)):
            raise EnvError(f"{self.name}: a seat began a new game while others play on.")
        else:
            acts = [self._ignored if action is None else action for action in actions]
            self._outcome = self.game.step(acts)
            before, found = self._kinds, step_types_of(self._outcome, self._left)
            self._kinds = [
                _FIRST if kind == _LAST else new for kind, new in zip(before, found, strict=True)
            ]
            for seat, reward in enumerate(self._outcome.rewards):
                self._returns[seat] += float(reward) if self._kinds[seat] != _FIRST else 0.0
        self._over = self._outcome.last
        self._untaken = set(range(number))

    @functools.cached_property
    def _ignored(self) -> Tree:
        """The action that the game gets, and ignores, from a seat that has left."""
        actions = Nest(self.game.action_spec)
        return actions.unflatten([spec.generate_value() for spec in actions.leaves])

    def returns(self, seat: int) -> dict[str, float]:
        """Returns the undiscounted sums of rewards so far, of the seat and of all seats."""
        named = f"return_of_{self.game.seats[seat]}"
        return {"team_return": sum(self._returns), named: self._returns[seat]}

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                getattr(self.game, "close", lambda: None)()


class EnvOfSeat(dm_env.Environment):
    """The environment of one seat of any game, for the pools of this package.

    Attributes:
      game: the game, which all its seats share.
      seat: the number of this seat.
      last_metrics: the numbers of the newest step, which pools log at the end of an episode.
    """

    def __init__(self, table: Table, seed: int) -> None:
        """Takes the next free seat."""
        self.game, self.seat = table.game, len(table.seeds)
        self.last_metrics: Mapping[str, Any] = {}
        table.seeds.append(seed)

    def observation_spec(self) -> Tree:
        """Returns the spec of one seat's observation."""
        return self.game.observation_spec

    def action_spec(self) -> Tree:
        """Returns the spec of one seat's action."""
        return self.game.action_spec


class SeatEnv(EnvOfSeat):
    """The environment of one seat of a `SeatGame`.

    A pool calls `announce` for all its environments before it steps any of them, so the first seat
    to step finds the actions of all.
    """

    def __init__(self, table: _Table, seed: int) -> None:
        """Takes the next free seat."""
        super().__init__(table, seed)
        self._table = table

    def announce(self, action: Tree | None, together: bool) -> None:
        """Takes the next action, None for a new game, before any environment steps."""
        del together  # checked in `_Table`: a seat that steps alone lacks the actions of others
        self._table.announce(self.seat, action)

    def interrupt(self) -> None:
        """Does nothing: a step never waits for another seat."""

    def reset(self) -> dm_env.TimeStep:
        """Starts a game.

        Raises:
          EnvError: the other seats did not announce that they do too.
        """
        _, outcome = self._table.take(self.seat)
        return dm_env.restart(outcome.observations[self.seat])

    def step(self, action: Tree) -> dm_env.TimeStep:
        """Takes the step that all seats announced; FIRST while the seat is not in the game.

        Raises:
          EnvError: some seat announced none.
        """
        del action  # announced
        kind, outcome = self._table.take(self.seat)
        if kind == _FIRST:
            return dm_env.restart(outcome.observations[self.seat])
        self.last_metrics = outcome.infos[self.seat] if outcome.infos else {}
        if kind == _LAST and len(self.game.seats) > 1:
            returns = self._table.returns(self.seat)
            if not outcome.last:
                del returns["team_return"]  # the others play on
            self.last_metrics = {**self.last_metrics, **returns}
        return dm_env.TimeStep(
            dm_env.StepType(kind),
            float(outcome.rewards[self.seat]),
            float(outcome.discounts[self.seat]),
            outcome.observations[self.seat],
        )

    def extras_spec(self) -> Tree:
        """Returns the spec of one seat's extras; () if the game has none."""
        return getattr(self.game, "extras_spec", ())

    def extras(self) -> Tree:
        """Returns the extras of this seat at its newest step."""
        return self.game.extras(self.seat)

    def close(self) -> None:
        """Closes the game, for all its seats."""
        self._table.close()
