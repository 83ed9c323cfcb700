"""A game that the environments of its agents share; starts and restarts the game's loop."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import weakref

from rlstack.checks import EnvError
from rlstack.entity.inverted.game import Game, GameClosed, GameError, GameLost
from rlstack.entity.inverted.loop import GameLoop
from rlstack.entity.validator import Validator
from rlstack.envs.process.restarts import RestartLimit

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of waiting and of restarts."""

    step_timeout: float = 60.0
    """Longest time in seconds between an answer and the game's next observation."""
    patience: float = 3600.0
    """Longest time in seconds that the game waits for an answer. Learning and evaluation happen
    during this wait; raise it if they take longer."""
    close_timeout: float = 5.0
    """Longest time in seconds that the loop may take to return after it is told to end."""
    max_restarts: int = 10
    """How often a lost game is started again within ``restart_window``."""
    restart_window: float = 300.0
    """Seconds of playing after which a restart is forgotten. Silence does not count as playing."""

    def __post_init__(self) -> None:
        for name in ("step_timeout", "patience", "close_timeout", "restart_window"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"Limits: {name} must be positive and finite seconds; "
                    f"got {getattr(self, name)}."
                )
        if self.max_restarts < 0:
            raise ValueError(f"Limits: max_restarts must be at least 0; got {self.max_restarts}.")


class SharedGame:
    """One game and its current `GameLoop`, used by the environments of all its agents.

    Attributes:
      game: the game.
      num_agents: number of its agents.
      name: name of the game in errors.
      limits: limits of waiting and of restarts.
      observe_timeout: seconds that an environment waits for an observation.
      seeds: seeds of the environments that use it already, by agent number.
    """

    def __init__(
        self, game: Game, num_agents: int, name: str, limits: Limits, observe_timeout: float = 0.0
    ):
        """Stores the game. The loop starts when an environment is reset.

        Args:
          game: the game.
          num_agents: number of the game's agents.
          name: name of the game in errors.
          limits: limits of waiting and of restarts.
          observe_timeout: longest time in seconds until a game that enforces ``step_timeout``
              itself raises an error; 0 for ``step_timeout``.

        Raises:
          ValueError: ``num_agents`` is less than 1.
        """
        if num_agents < 1:
            raise ValueError(f"{name}: agents must be at least 1; got {num_agents}.")
        self.game, self.num_agents, self.name, self.limits = game, num_agents, name, limits
        self.observe_timeout = observe_timeout or limits.step_timeout
        self.seeds: list[int] = []
        self._check = Validator(game.obs_space, game.action_space, name).check
        self._lock = threading.Lock()
        self._loops: list[GameLoop] = []  # at most one; a list, because the finalizer shares it
        self._closed = False
        self._restarts = RestartLimit(limits.max_restarts, limits.restart_window)
        self._played = 0.0  # seconds since the last restart
        # Also runs when the environments are garbage collected, and when the interpreter exits.
        self._finalizer = weakref.finalize(
            self, _finish, self._loops, game, name, limits.close_timeout
        )

    @property
    def is_open(self) -> bool:
        """Whether another agent can still get an environment."""
        return len(self.seeds) < self.num_agents and not self._loops and not self._closed

    def loop(self, replacing: GameLoop | None = None) -> GameLoop:
        """Returns the current loop; starts one if none runs.

        Args:
          replacing: a loop that the caller has finished with. If it is still the current one, it
            is ended and a new one starts.

        Raises:
          EnvError: an agent has no environment, or the game broke a rule of the interface.
          GameError: the game failed, or was lost too often.
          GameClosed: the environments were closed.
        """
        with self._lock:
            if self._closed:
                raise GameClosed(f"{self.name}: must be open; it was closed.")
            if len(self.seeds) < self.num_agents:
                raise EnvError(
                    f"{self.name}: has {self.num_agents} agents, so every {self.num_agents} "
                    f"consecutive environments are one game; got {len(self.seeds)}. Make the "
                    "pool's size a multiple of it, and in a process pool each worker's share."
                )
            current = self._loops[0] if self._loops else None
            if current is not None and current is not replacing:
                return current
            if current is not None:
                self._end(current)
            new = GameLoop(self.game, self.num_agents, self._check, self.name, self.limits.patience)
            self._loops[:] = [new]
            if self._closed:  # `interrupt` ran in another thread and has not seen the new loop
                new.interrupt()
            return new

    def _end(self, loop: GameLoop) -> None:
        """Ends a loop; raises if no new loop may be started."""
        self.raise_failure(loop)
        returned_at_once = not loop.has_shown and not loop.interrupted
        if not loop.stop(self.limits.close_timeout):
            raise GameError(
                f"{self.name}: the loop did not return within {self.limits.close_timeout:g} s "
                "after it was told to end. When an agent answers None, return from play at once."
            )
        self.raise_failure(loop)
        self._played += loop.worked
        if isinstance(loop.failure, GameLost):
            played, self._played = self._played, 0.0
            if not self._restarts.count(played):
                raise GameError(
                    f"{self.name}: there may be {self._restarts.text}; it was lost once more: "
                    f"{loop.failure}"
                ) from loop.failure
            number = self._restarts.total
            _log.warning("%s: restarted (%d so far): %s", self.name, number, loop.failure)
        elif returned_at_once:
            raise EnvError(
                f"{self.name}: play must ask its agents; it returned at once. Play at least one "
                "game in each call."
            )

    def raise_failure(self, loop: GameLoop) -> None:
        """Raises the failure of a loop, unless the game was lost and can be started again.

        Raises:
          EnvError: the game broke a rule of the interface.
          GameError: the game failed in another way.
        """
        failure = loop.failure
        if failure is None or isinstance(failure, GameLost):
            return
        if isinstance(failure, EnvError):
            raise EnvError(str(failure)) from failure
        text = f"{self.name}: the game raised {type(failure).__name__}: {failure}"
        raise GameError(text) from failure

    def interrupt(self) -> None:
        """Tells the game to end permanently and wakes all waiting threads; does not wait."""
        self._closed = True
        for loop in list(self._loops):
            loop.interrupt()

    def close(self) -> None:
        """Ends the game permanently; safe to call again."""
        self._closed = True
        self._finalizer()


def _finish(loops: list[GameLoop], game: Game, name: str, timeout: float) -> None:
    for loop in loops:
        if not loop.stop(timeout):
            _log.error("%s: the loop did not return in %g s; its thread goes on", name, timeout)
    loops.clear()
    getattr(game, "close", lambda: None)()
