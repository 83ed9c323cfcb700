"""What goes wrong between a game and whoever decides for its agents."""

from __future__ import annotations


class GameError(RuntimeError):
    """The game failed; what it raised is chained."""


class GameLost(GameError):  # noqa: N818 (it was lost; the message has the error)
    """The game is gone or no longer makes sense. Its episodes end as truncated; it may come back.

    A game raises it, or whoever plays for one that runs elsewhere.
    """


class GameTimeout(GameError):  # noqa: N818
    """Somebody waited too long."""


class GameClosed(GameError):  # noqa: N818
    """The environment was closed while somebody waited."""
