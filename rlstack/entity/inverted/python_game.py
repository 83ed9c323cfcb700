"""Games of this process as environments of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstack.entity.inverted.agents import Game
from rlstack.entity.inverted.environment import AgentEnv, seat
from rlstack.entity.inverted.session import Limits, Session
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
    """Builds the environment of one agent of a game that runs in a thread.

    ``EnvConfig("rlstack.entity.inverted:PythonGame", options={"game": "my.module:MyGame"})``. With
    k agents every k consecutive environments of a pool are one game; rows are the agents'.

    Args:
      game: makes the game, or "module:callable" for who does; given ``options``, and ``seed`` if
        it has such a parameter.
      agents: how many agents the game is given.
      seed: of this environment; the game gets its first agent's.
      step_timeout: see `Limits`.
      patience: see `Limits`.
      close_timeout: see `Limits`.
      **options: for the game.

    Raises:
      ValueError: no such game, or a limit out of range.
    """
    factory = load_object(game) if isinstance(game, str) else game
    limits = Limits(step_timeout, patience, close_timeout)
    name = getattr(factory, "__name__", type(factory).__name__)

    def make() -> Session:
        seeded = {"seed": seed, **options} if takes_seed(factory) else options
        return Session(factory(**seeded), agents, name, limits)

    return seat((id(factory), agents, repr(sorted(options.items()))), seed, make)
