"""The environment of one agent of a game that owns its loop."""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import dm_env

from rlstack.entity.adapter import EntityEnv
from rlstack.entity.environment import Action, Observation
from rlstack.entity.inverted.errors import GameLost
from rlstack.entity.inverted.match import Match, Watched
from rlstack.entity.inverted.session import Session


class _Held(enum.Enum):
    """What the environment has shown last."""

    NOTHING = enum.auto()
    ASKED = enum.auto()  # the game waits for the answer
    IDLE = enum.auto()  # the agent is not asked; an answer is ignored
    OVER = enum.auto()


class Counterpart:
    """What a game shows one of its agents, as an ``rlstack.entity.Environment``.

    Attributes:
      announced: whether the next step is known, so that what it is given is ignored.
    """

    def __init__(self, session: Session, seed: int):
        """Takes the session's next seat."""
        self.obs_space, self.action_space = session.game.obs_space, session.game.action_space
        self.announced = False
        self._session, self._number = session, len(session.seeds)
        session.seeds.append(seed)
        self._together = False
        self._match: Match | None = None  # where what is held came from
        self._held = _Held.NOTHING
        self._shown = Observation(features={})
        self._again = False  # whether the next reset may show the same once more
        self._answers: int | None = None  # of the match, when a game's first row was shown

    def announce(self, actions: Mapping[str, Action] | None, together: bool) -> None:
        """Takes the next step's actions, None for a reset, before any environment is stepped.

        Args:
          actions: what ``act`` will be given.
          together: whether the next steps of all environments are known by now, and none of
            those after before all of these have been made.
        """
        self.announced, self._together = True, together
        if actions is not None:
            if self._held is _Held.ASKED and self._match is not None:
                self._match.answer(self._number, actions)
            return
        if self._held not in (_Held.ASKED, _Held.IDLE) or self._match is None:
            return
        self._again = self._answers == self._match.answers
        if not self._again:  # the game has no way to begin anew but to end
            self._held = _Held.NOTHING
            self._session.match(instead_of=self._match)

    def reset(self) -> Observation:
        """Waits for the first observation of a game; ends one that is under way.

        A game that has been reset, but in which nobody has acted, is not begun again.
        """
        if not self.announced:
            self.announce(None, self._together)
        self.announced = False
        again, self._again = self._again, False
        match = self._session.match()
        if again and match is self._match:
            return self._shown
        while (watched := self._watch(match)) is None:
            match = self._session.match(instead_of=match)
        return self._take(match, watched, is_first=True)

    def act(self, actions: Mapping[str, Action]) -> Observation:
        """Answers the game and waits for its next observation."""
        if not self.announced:
            self.announce(actions, self._together)
        self.announced = False
        match = self._match or self._session.match()
        while (watched := self._watch(match)) is None:
            self._session.raise_failure(match)
            if isinstance(match.failure, GameLost):
                self._held = _Held.OVER
                return dataclasses.replace(
                    self._shown, actions={}, reward=0.0, metrics={}, done=True, truncated=True
                )
            match = self._session.match(instead_of=match)
        return self._take(match, watched, is_first=False)

    def _watch(self, match: Match) -> Watched | None:
        return match.watch(self._number, self._together, self._session.watch_timeout)

    def _take(self, match: Match, watched: Watched, is_first: bool) -> Observation:
        self._match, self._shown = match, watched.observation
        self._answers = match.answers if is_first else None
        if watched.observation.done:
            self._held = _Held.OVER
        else:
            self._held = _Held.ASKED if watched.is_asked else _Held.IDLE
        return watched.observation

    def interrupt(self) -> None:
        """Wakes whoever waits here, from another thread, because the pool is closed."""
        self._session.interrupt()

    def close(self) -> None:
        """Ends the game, for all its agents."""
        self._session.close()


class AgentEnv(EntityEnv):
    """The ``dm_env.Environment`` of one agent.

    A pool tells it of each step beforehand (``announce``), so that the agents of one game can be
    environments of one pool, whatever its type: no game goes on before all its agents' actions are
    known, and none waits for a step that its pool has not come to yet.
    """

    game: Counterpart

    def __init__(self, session: Session, seed: int):
        # The game's thread checks what it shows, where the mistake was made.
        super().__init__(Counterpart(session, seed), session.name, validate=False)

    def announce(self, action: Mapping[str, Any] | None, together: bool) -> None:
        """Takes the next step's action, None for a reset.

        Raises:
          EnvError: a choice that is not legal.
        """
        if action is None or self._roster is None:
            self.game.announce(None, together)
            return
        self.table.check_choices(self._roster, action)
        self.game.announce(self.to_actions(action), together)

    def step(self, action: Mapping[str, Any]) -> dm_env.TimeStep:
        """Plays one step; begins an episode where none is under way.

        Raises:
          EnvError: a choice that is not legal, or what the game showed was wrong.
          GameError: the game failed.
        """
        if self._roster is not None and not self.game.announced:
            self.table.check_choices(self._roster, action)
        return super().step(action)

    def interrupt(self) -> None:
        """Makes steps in progress raise, because the pool is closed."""
        self.game.interrupt()


class _Pending(threading.local):
    """Games that still lack environments, by what they were built from.

    By thread: a pool builds all its environments in one.
    """

    def __init__(self) -> None:
        self.sessions: dict[Hashable, Any] = {}


_PENDING = _Pending()


def seat(key: Hashable, seed: int, make: Callable[[], Session]) -> AgentEnv:
    """Returns the environment of the next agent, of the next game once the last one is full.

    Pools build their environments in order, so that consecutive ones share a game.

    Args:
      key: equal for environments of one pool.
      seed: of this environment.
      make: starts the next game; its seed is the first agent's.
    """
    pending = _PENDING.sessions.pop(key, None)
    session = None if pending is None else pending()
    if session is None or not session.is_open or seed in session.seeds:
        session = make()
    env = AgentEnv(session, seed)
    if session.is_open:
        _PENDING.sessions[key] = weakref.ref(session)
    return env
