"""Builders of the environments of a game's agents, for pools: `PythonGame` and `SocketGame`.

With k agents, every k consecutive environments of a pool belong to one game: one environment per
agent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from rlstack.entity.inverted.environment import AgentEnv
from rlstack.entity.inverted.game import Game
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

    return _next_agent_env((id(factory), agents, repr(sorted(options.items()))), seed, start)


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

    return _next_agent_env((command, address, agents), seed, start)


class _OpenGames(threading.local):
    """Games that do not have all their environments yet, by the arguments that built them.

    Thread-local, because a pool builds all its environments in one thread.
    """

    def __init__(self) -> None:
        self.games: dict[Hashable, weakref.ref[SharedGame]] = {}


_OPEN = _OpenGames()


def _next_agent_env(key: Hashable, seed: int, start: Callable[[], SharedGame]) -> AgentEnv:
    """Returns the environment of the next agent, in the open game or else in a new one.

    Pools build their environments in order, so consecutive environments share a game.

    Args:
      key: equal for the environments of one pool.
      seed: seed of this environment.
      start: starts a new game with the seed of its first agent.
    """
    reference = _OPEN.games.pop(key, None)
    game = None if reference is None else reference()
    if game is None or not game.is_open or seed in game.seeds:
        game = start()
    env = AgentEnv(game, seed)
    if game.is_open:
        _OPEN.games[key] = weakref.ref(game)
    return env
