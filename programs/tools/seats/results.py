"""Results of games between sides: wins, draws, losses, and scores with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlstack.math.intervals import Interval, wilson
from rlstack.programs.tools.seats.match import Game


class Episode(NamedTuple):
    """A game between sides."""

    seating: tuple[int, ...]  # the number of the side that played each seat
    game: Game

    def score_of(self, side: int) -> float:
        """Returns the mean return of the seats of a side."""
        own = [
            total for total, at in zip(self.game.returns, self.seating, strict=True) if at == side
        ]
        return float(np.mean(own))

    def winners(self) -> list[int]:
        """Returns the sides with the highest mean return of their seats; none if it was cut."""
        if self.game.cut:
            return []
        scores = {side: self.score_of(side) for side in sorted(set(self.seating))}
        best = max(scores.values())
        return [side for side, score in scores.items() if np.isclose(score, best, 1e-6, 1e-9)]


class Standing(NamedTuple):
    """The results of one side."""

    name: str
    wins: int
    draws: int  # shared with other winners
    losses: int
    score: Interval | None  # share of games won, a draw counts 1/2; None without a complete game
    mean_return: float  # mean return of the side's seats over all episodes


def seatings(num_seats: int, num_sides: int, episodes: int) -> list[tuple[int, ...]]:
    """Returns the side of each seat for each episode; all move by one from episode to episode.

    So in as many episodes as there are sides, each side plays each seat once.
    """
    return [
        tuple((seat + episode) % num_sides for seat in range(num_seats))
        for episode in range(episodes)
    ]


def standings(names: Sequence[str], episodes: Sequence[Episode]) -> list[Standing]:
    """Returns the results of each side, in the order of their names.

    The interval is Wilson's, at 95%. It is about further games of the same sides.
    """
    found = []
    complete = [episode for episode in episodes if not episode.game.cut]
    for side, name in enumerate(names):
        winners = [episode.winners() for episode in complete]
        wins = sum(who == [side] for who in winners)
        draws = sum(side in who for who in winners) - wins
        number = len(winners)
        score = wilson((wins + draws / 2) / number, number) if number else None
        mean = float(np.mean([episode.score_of(side) for episode in episodes]))
        found.append(Standing(name, wins, draws, number - wins - draws, score, mean))
    return found


def num_repeated(episodes: Sequence[Episode]) -> int:
    """Returns how many episodes are like an earlier one, with the same sides in the same seats."""
    return len(episodes) - len({(one.seating, one.game.moves) for one in episodes})


def told(number: int, episode: Episode, names: Sequence[str], seats: Sequence[str]) -> str:
    """Returns an episode in words: returns by seat, and the winner.

    Args:
      number: number of the episode, from 1.
      episode: the episode.
      names: names of the sides.
      seats: names of the seats.
    """
    game = episode.game
    alone = len(names) == 1
    parts = [
        f"{seat} {'' if alone else f'({names[side]}) '}{total:.6g}"
        for seat, side, total in zip(seats, episode.seating, game.returns, strict=True)
    ]
    steps = f"{game.length} steps"
    winners = episode.winners()
    if game.cut:
        end = f"cut after {steps}"
    elif alone:
        end = steps
    elif len(winners) == 1:
        end = f"{names[winners[0]]} wins after {steps}"
    else:
        end = f"{' and '.join(names[side] for side in winners)} draw after {steps}"
    return f"episode {number}: {', '.join(parts)}: {end}"


def summary(found: Sequence[Standing], repeated: int) -> list[str]:
    """Returns the results in words, a line for each side.

    Args:
      found: the result of `standings`.
      repeated: number of episodes that repeat another one move for move, as deterministic policies
        may do.
    """
    lines = []
    for one in found:
        line = f"{one.name}: {one.wins} won, {one.draws} drawn, {one.losses} lost"
        if one.score is not None:
            estimate, low, high = one.score
            line += f", score {estimate:.3f} (95% interval {low:.3f} to {high:.3f})"
        lines.append(f"{line}, mean return {one.mean_return:.6g}")
    if repeated:
        lines.append(
            f"{repeated} of these episodes repeat another one move for move, so the intervals are "
            "too narrow; --policy explore plays different ones."
        )
    return lines
