"""Errors between a game and the program that chooses the actions of its agents."""

from __future__ import annotations


class GameError(RuntimeError):
    """The game failed. The exception that it raised is chained."""


class GameLost(GameError):  # noqa: N818 (the message has the error)
    """The connection to the game is lost, or the game no longer follows the protocol.

    Its episodes end as truncated, and the game is started again. Raised by a game, or by the proxy
    of a game that runs in another process.
    """


class GameTimeout(GameError):  # noqa: N818
    """The game, or an agent that the game waited for, took too long."""


class GameClosed(GameError):  # noqa: N818
    """The environment was closed during a wait."""
