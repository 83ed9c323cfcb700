"""Thirteen small games, for tests and as examples.

Every public name here builds a game as the ``dm_env`` environment that pools take, with the options
of the game: ``EnvConfig("rlstack.entity.games:MineSweeper", options={"num_mines": 3})``. The game
classes are in the modules (`rlstack.entity.games.mine_sweeper.MineSweeper`); their docstrings state
the rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dm_env

from rlstack.entity.environment import Environment
from rlstack.entity.games import (
    cherry_pick,
    count,
    floor_is_lava,
    mine_sweeper,
    minefield,
    move_to_origin,
    multi_armed_bandit,
    multi_snake,
    not_hotdog,
    pick_matching_balls,
    rock_paper_scissors,
    treasure_hunt,
    xor,
)

__all__ = [
    "GAMES",
    "CherryPick",
    "Count",
    "FloorIsLava",
    "GameBuilder",
    "MineSweeper",
    "Minefield",
    "MoveToOrigin",
    "MultiArmedBandit",
    "MultiSnake",
    "NotHotdog",
    "PickMatchingBalls",
    "RockPaperScissors",
    "TreasureHunt",
    "Xor",
]


class GameBuilder:
    """Builds a game as a ``dm_env.Environment``; picklable.

    Attributes:
      game: the class of the game.
    """

    def __init__(self, game: Callable[..., Environment]):
        self.game = game

    @property
    def __signature__(self) -> inspect.Signature:
        """The options of the game; pools check whether they include ``seed``."""
        return inspect.signature(self.game)

    def __call__(self, **options: Any) -> dm_env.Environment:
        """Returns an adapted game with these options."""
        from rlstack.entity.adapter import as_dm_env

        return as_dm_env(self.game(**options))


MultiArmedBandit = GameBuilder(multi_armed_bandit.MultiArmedBandit)
MoveToOrigin = GameBuilder(move_to_origin.MoveToOrigin)
NotHotdog = GameBuilder(not_hotdog.NotHotdog)
Count = GameBuilder(count.Count)
Xor = GameBuilder(xor.Xor)
FloorIsLava = GameBuilder(floor_is_lava.FloorIsLava)
CherryPick = GameBuilder(cherry_pick.CherryPick)
PickMatchingBalls = GameBuilder(pick_matching_balls.PickMatchingBalls)
Minefield = GameBuilder(minefield.Minefield)
MultiSnake = GameBuilder(multi_snake.MultiSnake)
MineSweeper = GameBuilder(mine_sweeper.MineSweeper)
RockPaperScissors = GameBuilder(rock_paper_scissors.RockPaperScissors)
TreasureHunt = GameBuilder(treasure_hunt.TreasureHunt)

GAMES: Mapping[str, GameBuilder] = {
    builder.game.__name__: builder
    for builder in list(globals().values())
    if isinstance(builder, GameBuilder)
}
"""All builders, by name of the game."""
