"""A game's matches, one after the other, shared by the environments of its agents."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import weakref
from typing import Any

from rlstack.entity.inverted.agents import Game
from rlstack.entity.inverted.errors import GameClosed, GameError, GameLost
from rlstack.entity.inverted.match import Match
from rlstack.entity.validator import Validator
from rlstack.envs.adapters import EnvError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long is waited, and how often is tried again."""

    step_timeout: float = 60.0
    """Seconds that the game may take from an answer to the next observation."""
    patience: float = 3600.0
    """Seconds that the game waits for an answer: learning and evaluation happen meanwhile."""
    close_timeout: float = 5.0
    """Seconds that the loop may take to return when it is told to."""
    max_restarts: int = 10
    """How often a game that was lost is started again."""

    def __post_init__(self) -> None:
        for name in ("step_timeout", "patience", "close_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"Limits: {name} must be positive and finite seconds; "
                    f"got {getattr(self, name)}."
                )
        if self.max_restarts < 0:
            raise ValueError(f"Limits: max_restarts must be at least 0; got {self.max_restarts}.")


class Session:
    """Starts a game, and starts it again.

    Attributes:
      game: the game.
      num_agents: how many agents it is given.
      name: how messages call it.
      limits: of waiting.
      watch_timeout: seconds that an environment waits for an observation.
      seeds: of the environments that belong to it so far.
    """

    def __init__(
        self, game: Game, num_agents: int, name: str, limits: Limits, watch_timeout: float = 0.0
    ):
        """Prepares; nothing is started before an environment is reset.

        Args:
          game: the game.
          num_agents: how many agents it is given.
          name: how messages call it.
          limits: of waiting.
          watch_timeout: where the game itself keeps to ``step_timeout``, how long it may take at
            most to say so; else 0.
        """
        if num_agents < 1:
            raise ValueError(f"{name}: agents must be at least 1; got {num_agents}.")
        self.game, self.num_agents, self.name, self.limits = game, num_agents, name, limits
        self.watch_timeout = watch_timeout or limits.step_timeout
        self.seeds: list[int] = []
        self._check = Validator(game.obs_space, game.action_space, name).check
        self._lock = threading.Lock()
        self._match: list[Match] = []  # at most one; the finalizer shares it
        self._closed = False
        self._restarts = 0
        # Also runs when the environments are forgotten, and at the end of the interpreter.
        self._finalizer = weakref.finalize(
            self, _finish, self._match, game, name, limits.close_timeout
        )

    @property
    def is_open(self) -> bool:
        """Whether there is room for another agent's environment."""
        return len(self.seeds) < self.num_agents and not self._match and not self._closed

    def match(self, instead_of: Match | None = None) -> Match:
        """Returns the match under way, which is another one than ``instead_of``.

        The first who asks instead of a match replaces it; others are given what it started.

        Raises:
          EnvError: agents lack an environment, or the game breaks the rules.
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
            old = self._match[0] if self._match else None
            if old is not None and old is not instead_of:
                return old
            if old is not None:
                self._end(old)
            new = Match(self.game, self.num_agents, self._check, self.name, self.limits.patience)
            self._match[:] = [new]
            if self._closed:  # by another thread, which has not seen the new one
                new.interrupt()
            return new

    def _end(self, match: Match) -> None:
        """Ends a match; raises if there must be no other."""
        self.raise_failure(match)
        returned_at_once = not match.has_asked and not match.interrupted
        if not match.stop(self.limits.close_timeout):
            raise GameError(
                f"{self.name}: the loop did not return within {self.limits.close_timeout:g} s of "
                "being told to. When an agent answers None, return from play at once."
            )
        self.raise_failure(match)
        if isinstance(match.failure, GameLost):
            self._restarts += 1
            if self._restarts > self.limits.max_restarts:
                raise GameError(
                    f"{self.name}: was lost more than {self.limits.max_restarts} times. The last "
                    f"time: {match.failure}"
                ) from match.failure
            _log.warning("%s: is started again: %s", self.name, match.failure)
        elif returned_at_once:
            raise EnvError(
                f"{self.name}: play must ask its agents; got a return at once. Play at least one "
                "game in each call."
            )

    def raise_failure(self, match: Match) -> None:
        """Raises what the game raised, unless it was lost and may come back.

        Raises:
          EnvError: it broke the rules.
          GameError: anything else.
        """
        failure = match.failure
        if failure is None or isinstance(failure, GameLost):
            return
        if isinstance(failure, EnvError):
            raise EnvError(str(failure)) from failure
        text = f"{self.name}: the game raised {type(failure).__name__}: {failure}"
        raise GameError(text) from failure

    def interrupt(self) -> None:
        """Tells the game to end for good, and wakes whoever waits; does not wait itself."""
        self._closed = True
        for match in list(self._match):
            match.interrupt()

    def close(self) -> None:
        """Ends the game for good; safe to call again."""
        self._closed = True
        self._finalizer()


def _finish(matches: list[Match], game: Any, name: str, timeout: float) -> None:
    for match in matches:
        if not match.stop(timeout):
            _log.error("%s: the loop does not return and is left behind", name)
    matches.clear()
    getattr(game, "close", lambda: None)()
