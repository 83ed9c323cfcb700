"""The environment of one agent of a game that owns its loop, and its builders for pools.

With k agents, every k consecutive environments of a pool belong to one game: one environment per
agent.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import dm_env
import numpy as np

from rlstack.entity.adapter import EntityEnv
from rlstack.entity.environment import Actions, Observation
from rlstack.entity.inverted.game import Game, GameLost
from rlstack.entity.inverted.loop import GameLoop, Shown
from rlstack.entity.inverted.remote_game import SEND_TIMEOUT, START_TIMEOUT, RemoteGame
from rlstack.entity.inverted.shared_game import Limits, SharedGame
from rlstack.envs.adapters import takes_seed
from rlstack.references import load_object


def PythonGame(  # noqa: N802 (a builder, named as what it builds)
    game: str | Callable[..., Game],
    agents: int = 1,
    seed: int = 0,
    step_timeout: float = Limits.step_timeout,
    patience: float = Limits.patience,
    close_timeout: float = Limits.close_timeout,
    extras: Sequence[str] = (),
    **options: Any,
) -> AgentEnv:
    """Builds the environment of one agent of a Python game, which runs in a thread.

    ``EnvConfig("rlstack.entity.inverted:PythonGame", options={"game": "my.module:MyGame"})``. With
    k agents, every k consecutive environments of a pool are the agents of one game.

    Args:
      game: builds the game, or "module:callable" that names such a builder. It is called with
        ``options``, and with ``seed`` if it has such a parameter.
      agents: number of agents of the game.
      seed: seed of this environment. The game gets the seed of its first agent's environment.
      step_timeout: see `Limits`.
      patience: see `Limits`.
      close_timeout: see `Limits`.
      extras: names of metrics to show as extras, see `rlstack.entity.as_dm_env`.
      **options: options of the game.

    Raises:
      ValueError: there is no such game, or a limit is out of range.
    """
    factory = load_object(game) if isinstance(game, str) else game
    limits = Limits(step_timeout, patience, close_timeout)
    name = getattr(factory, "__name__", type(factory).__name__)

    def start() -> SharedGame:
        seeded = {"seed": seed, **options} if takes_seed(factory) else options
        return SharedGame(factory(**seeded), agents, name, limits)

    key = id(factory), agents, repr(sorted(options.items())), repr(extras)
    return _next_agent_env(key, seed, start, extras)


def SocketGame(  # noqa: N802 (a builder, named as what it builds)
    command: str = "",
    address: str = "",
    agents: int = 1,
    seed: int = 0,
    step_timeout: float = Limits.step_timeout,
    start_timeout: float = START_TIMEOUT,
    patience: float = Limits.patience,
    max_restarts: int = Limits.max_restarts,
    restart_window: float = Limits.restart_window,
    extras: Sequence[str] = (),
) -> AgentEnv:
    """Builds the environment of one agent of a game that runs in another process.

    ``EnvConfig("rlstack.entity.inverted:SocketGame", options={"command": "./my_game --hard"})``.
    The game may be written in any language; docs/game_protocol.md describes the protocol. With k
    agents, every k consecutive environments of a pool are the agents of one game. If the connection
    to the game is lost, its episodes end as truncated and the game is started again.

    Args:
      command: starts one game. The environment variables RLSTACK_GAME_ADDRESS and
        RLSTACK_GAME_TOKEN tell it where to connect. Without a command, rlstack waits for games
        that connect on their own.
      address: the address to listen at, ``host:port`` or ``unix:path``; by default a free port of
        the loopback interface. There is no encryption: use other interfaces only in a network that
        you trust.
      agents: number of agents of the game.
      seed: seed of this environment. The game gets the seed of its first agent's environment.
      step_timeout: longest time in seconds between the actions and the game's next observation.
      start_timeout: longest time in seconds until the game connects.
      patience: see `Limits`.
      max_restarts: see `Limits`.
      restart_window: see `Limits`.
      extras: names of metrics to show as extras, see `rlstack.entity.as_dm_env`.

    Raises:
      EnvError, GameError, ValueError: see `RemoteGame`.
    """
    limits = Limits(
        step_timeout, patience, max_restarts=max_restarts, restart_window=restart_window
    )

    def start() -> SharedGame:
        game = RemoteGame(command, address, agents, seed, step_timeout, start_timeout)
        # A reset may restart the game several times before the first observation arrives.
        longest = (max_restarts + 1) * (step_timeout + start_timeout + 2 * SEND_TIMEOUT)
        return SharedGame(game, agents, game.name, limits, longest)

    return _next_agent_env((command, address, agents, repr(extras)), seed, start, extras)


class _OpenGames(threading.local):
    """Games that do not have all their environments yet, by the arguments that built them.

    Thread-local, because a pool builds all its environments in one thread.
    """

    def __init__(self) -> None:
        self.games: dict[Hashable, weakref.ref[SharedGame]] = {}


_OPEN = _OpenGames()


def _next_agent_env(
    key: Hashable, seed: int, start: Callable[[], SharedGame], extras: Sequence[str]
) -> AgentEnv:
    """Returns the environment of the next agent, in the open game or else in a new one.

    Pools build their environments in order, so consecutive environments share a game.

    Args:
      key: equal for the environments of one pool.
      seed: seed of this environment.
      start: starts a new game with the seed of its first agent.
      extras: names of metrics to show as extras.
    """
    reference = _OPEN.games.pop(key, None)
    game = None if reference is None else reference()
    if game is None or not game.is_open or seed in game.seeds:
        game = start()
    env = AgentEnv(game, seed, extras)
    if game.is_open:
        _OPEN.games[key] = weakref.ref(game)
    return env


class _State(enum.Enum):
    """The kind of step that the environment returned last."""

    NOTHING = enum.auto()
    ASKED = enum.auto()  # an observation; the game waits for the answer
    IDLE = enum.auto()  # an observation; the agent is not asked, an answer is ignored
    OVER = enum.auto()  # the last observation of a game


class AgentView:
    """A game as one of its agents sees it; an `rlstack.entity.Environment`.

    Attributes:
      announced: True if `announce` was called for the next step. The step then ignores the actions
        that it gets.
    """

    def __init__(self, shared: SharedGame, seed: int):
        """Registers as the environment of the game's next agent."""
        self.obs_space, self.action_space = shared.game.obs_space, shared.game.action_space
        self.announced = False
        self._shared, self._number = shared, len(shared.seeds)
        shared.seeds.append(seed)
        self._together = False
        self._loop: GameLoop | None = None  # where the newest observation came from
        self._state = _State.NOTHING
        self._newest = Observation(features={})
        self._repeat = False  # whether the next reset may return the same observation again
        self._answers_at_reset: int | None = None  # the game's answers, if it was just reset

    def __str__(self) -> str:
        """Returns the text of the game, which is the same for all agents."""
        return str(self._shared.game)

    def announce(self, actions: Actions | None, together: bool) -> None:
        """Receives the next step's actions, None for a reset, before any environment is stepped.

        Args:
          actions: the actions that `act` will receive.
          together: True if the next steps of all environments are already known, and all of them
              are made before any later step.
        """
        self.announced, self._together = True, together
        if actions is not None:
            if self._state is _State.ASKED and self._loop is not None:
                self._loop.answer(self._number, actions)
            return
        if self._state not in (_State.ASKED, _State.IDLE) or self._loop is None:
            return
        self._repeat = self._answers_at_reset == self._loop.num_answers
        if not self._repeat:  # the only way to reset a game is to end its loop
            self._state = _State.NOTHING
            self._shared.loop(replacing=self._loop)

    def reset(self) -> Observation:
        """Waits for the first observation of a game, and ends a game that is in progress.

        A game that was reset, and in which no agent has acted since, is not started again.
        """
        if not self.announced:
            self.announce(None, self._together)
        self.announced = False
        repeat, self._repeat = self._repeat, False
        loop = self._shared.loop()
        if repeat and loop is self._loop:
            return self._newest
        while (shown := self._next(loop)) is None:
            loop = self._shared.loop(replacing=loop)
        return self._take(loop, shown, is_first=True)

    def act(self, actions: Actions) -> Observation:
        """Gives the actions to the game and waits for its next observation."""
        if not self.announced:
            self.announce(actions, self._together)
        self.announced = False
        loop = self._loop or self._shared.loop()
        while (shown := self._next(loop)) is None:
            self._shared.raise_failure(loop)
            if isinstance(loop.failure, GameLost):
                self._state = _State.OVER
                return dataclasses.replace(
                    self._newest, actions={}, reward=0.0, metrics={}, truncated=True
                )
            loop = self._shared.loop(replacing=loop)
        return self._take(loop, shown, is_first=False)

    def _next(self, loop: GameLoop) -> Shown | None:
        return loop.next_observation(self._number, self._together, self._shared.observe_timeout)

    def _take(self, loop: GameLoop, shown: Shown, is_first: bool) -> Observation:
        self._loop, self._newest = loop, shown.observation
        self._answers_at_reset = loop.num_answers if is_first else None
        if shown.observation.over:
            self._state = _State.OVER
        else:
            self._state = _State.ASKED if shown.needs_answer else _State.IDLE
        return shown.observation

    def interrupt(self) -> None:
        """Makes waits in `reset` and `act` raise; the closing pool calls it from another thread."""
        self._shared.interrupt()

    def close(self) -> None:
        """Ends the game, for all its agents."""
        self._shared.close()


class AgentEnv(EntityEnv):
    """The ``dm_env.Environment`` of one agent.

    A pool calls `announce` for all its environments before it steps any of them. So the agents of
    one game can be environments of any kind of pool: the game continues once all actions are known,
    and no agent waits for a step that its pool has not reached yet.
    """

    game: AgentView

    def __init__(self, shared: SharedGame, seed: int, extras: Sequence[str] = ()):
        # The game's own thread validates observations, so that tracebacks show where they were
        # made.
        super().__init__(AgentView(shared, seed), shared.name, validate=False, extras=extras)

    def announce(self, action: Mapping[str, np.ndarray] | None, together: bool) -> None:
        """Receives the next step's action, None for a reset.

        Raises:
          EnvError: a choice is not legal.
        """
        if action is None or self._context is None:
            self.game.announce(None, together)
            return
        self.codec.check_choices(self._context, action)
        self.game.announce(self.to_actions(action), together)

    def step(self, action: Mapping[str, np.ndarray]) -> dm_env.TimeStep:
        """Plays one step, or begins an episode if none is in progress.

        Raises:
          EnvError: a choice is not legal, or the game showed an invalid observation.
          GameError: the game failed.
        """
        if self._context is not None and not self.game.announced:
            self.codec.check_choices(self._context, action)
        return super().step(action)

    def interrupt(self) -> None:
        """Makes steps in progress raise, because the pool is closed."""
        self.game.interrupt()
