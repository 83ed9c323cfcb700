"""Games that own their loop: the game asks agents for actions, instead of being stepped.

The author of a game writes ``play(agents)``, which calls ``agent.act(observation)`` for actions and
``agent.game_over(observation)`` at the end of a game. The same loop works with random agents, with
trained ones (``rlstack.programs.tools.game_agent``), and, through `PythonGame` and `SocketGame`,
as the environments of a pool. docs/game_protocol.md describes how games in other languages connect.
"""

from rlstack.entity.inverted.builders import PythonGame, SocketGame
from rlstack.entity.inverted.game import (
    EnvironmentGame,
    Game,
    GameAgent,
    GameClosed,
    GameError,
    GameLost,
    GameTimeout,
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
