"""Games that own their loop: they ask agents for actions, instead of being stepped.

The author of a game writes ``play(agents)``, which calls ``agent.act(observation)`` for actions and
``agent.game_over(observation)`` at the end of a game. The same loop plays with random agents, with
trained ones (``programs.run.game_agent``), or, through `PythonGame` and `SocketGame`, as the
environments of a pool. docs/game_protocol.md describes how games in other languages take part.
"""

from rlstack.entity.inverted.builders import PythonGame, SocketGame
from rlstack.entity.inverted.errors import GameClosed, GameError, GameLost, GameTimeout
from rlstack.entity.inverted.game import (
    EnvironmentGame,
    Game,
    GameAgent,
    RandomAgent,
    ScoredObservation,
    act_all,
)

__all__ = [
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
