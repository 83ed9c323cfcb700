"""Several matches of one game side by side, so that more policies can play than one match seats.

A policy set gives each seat of a game to one policy. With two matches of a game of two seats, a set
can hold a policy, its earlier versions, and an exploiter that meets only the newest of them (the
league of AlphaStar, Vinyals et al. 2019, https://doi.org/10.1038/s41586-019-1724-z).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rlstack.envs.auto_reset import FIRST
from rlstack.envs.nest import Tree
from rlstack.envs.seats.game import Seats
from rlstack.envs.seats.protocol import GameStep, SeatGame, step_types_of
from rlstack.envs.seats.turns import playable
from rlstack.references import load_object


class Matches:
    """Several matches of one game, as one game with the seats of all matches.

    A seat has the name that it has in the game, and the number of its match: ``first_0``,
    ``second_0``, ``first_1``. Matches know nothing of one another. All begin together, and the game
    is over with the last of them: a seat whose match is over before leaves it, and repeats its last
    observation with, if it has an action mask, the first action as the only legal one.
    """

    def __init__(self, game: str, matches: int = 2, seed: int = 0, **options: Any) -> None:
        """Builds the matches.

        Args:
          game: "module:name" of a class of `SeatGame`, or of a builder of their environments, such
            as ``rlstack.envs.seats.games:RockPaperScissors``.
          matches: the number of matches.
          seed: the seed of the first match, if the game takes a seed; match i has ``seed + i``.
          **options: keyword arguments of the game.

        Raises:
          ValueError: there is no such game, its seats act in turn, or there is no match.
        """
        if matches < 1:
            raise ValueError(f"Matches: matches must be at least 1; got {matches}.")
        builder = load_object(game)
        if isinstance(builder, Seats):
            if builder.in_turn:
                raise ValueError(
                    f"Matches: the seats of a match must act at the same time; got {game}, whose "
                    "seats act in turn."
                )
            builder = builder.game
        seeded = "seed" in inspect.signature(builder).parameters
        self._matches: list[SeatGame] = [
            builder(**options, **({"seed": seed + i} if seeded else {})) for i in range(matches)
        ]
        first = self._matches[0]
        self._size = len(first.seats)
        self.seats = tuple(f"{name}_{i}" for i in range(matches) for name in first.seats)
        self.observation_spec, self.action_spec = first.observation_spec, first.action_spec
        if hasattr(first, "action_names"):
            self.action_names = first.action_names
        self._steps: list[GameStep] = []  # the newest one of each match
        self._left: list[set[int]] = []  # the seats of each match that are not in it any more

    def __str__(self) -> str:
        """Returns what people see of the matches, one after the other."""
        return "\n\n".join(map(str, self._matches))

    def reset(self) -> list[Tree]:
        """Starts all matches."""
        zeros, ones = [0.0] * self._size, [1.0] * self._size
        self._steps = [GameStep(match.reset(), zeros, ones) for match in self._matches]
        self._left = [set() for _ in self._matches]
        return self._of_seats("observations")

    def step(self, actions: Sequence[Tree]) -> GameStep:
        """Takes the action of each seat; those of matches that are over are ignored."""
        self._steps = [
            _after_its_end(step)
            if step.last
            else match.step(actions[i * self._size : (i + 1) * self._size])
            for i, (match, step) in enumerate(zip(self._matches, self._steps, strict=True))
        ]
        return GameStep(
            self._of_seats("observations"),
            self._of_seats("rewards"),
            self._of_seats("discounts"),
            all(step.last for step in self._steps),
            [info for step in self._steps for info in self._infos(step)],
            [
                kind
                for step, left in zip(self._steps, self._left, strict=True)
                for kind in step_types_of(step, left)
            ],
        )

    def close(self) -> None:
        """Closes the matches."""
        for match in self._matches:
            getattr(match, "close", lambda: None)()

    def _of_seats(self, field: str) -> list[Any]:
        return [value for step in self._steps for value in getattr(step, field)]

    def _infos(self, step: GameStep) -> Sequence[Mapping[str, float]]:
        return step.infos or [{}] * self._size


def _after_its_end(step: GameStep) -> GameStep:
    """Returns what the seats of a match that is over get until the last match is over."""
    seen = [playable(observation, waits=True) for observation in step.observations]
    zeros = [0.0] * len(seen)
    return GameStep(seen, zeros, zeros, True, step.infos, [FIRST] * len(seen))
