"""Games that own their loop: they ask agents for actions, instead of being stepped.

A game's author writes ``play(agents)``, which calls ``agent.act(observation)`` and
``agent.game_over(observation)`` where it suits the game. The same loop then runs with random
agents, with a trained one (``programs.run.game_agent``), or, by `PythonGame` and `SocketGame`, as
the environments that everything else here trains on. docs/game_protocol.md is for games in other
languages.
"""

from rlstack.entity.inverted.agents import (
    Actions,
    EnvironmentGame,
    Game,
    GameAgent,
    RandomAgent,
    ScoredObservation,
    act_all,
)
from rlstack.entity.inverted.errors import GameClosed, GameError, GameLost, GameTimeout
from rlstack.entity.inverted.python_game import PythonGame
from rlstack.entity.inverted.socket_game import SocketGame

__all__ = [
    "Actions",
    "EnvironmentGame",
    "Game",
    "GameAgent",
    "GameClosed",
    "GameError",
    "GameLost",
    "GameTimeout",
    "PythonGame",
    "RandomAgent",
    "ScoredObservation",
    "SocketGame",
    "act_all",
]
