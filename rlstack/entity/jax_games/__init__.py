"""Games of entities as environments in JAX, with the rules of those in `rlstack.entity.games`.

Their specs are those of the games in Python, so the same agents play both. They have no metrics.

May import: rlstack, rlstack.entity, rlstack.jax_envs.
"""

from __future__ import annotations

from rlstack.entity.jax_games.count import Count
from rlstack.entity.jax_games.multi_snake import MultiSnake

__all__ = ["Count", "MultiSnake"]
