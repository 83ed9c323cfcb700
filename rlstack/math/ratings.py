"""Ratings of players from the results of their games, with intervals.

The model is that of Bradley and Terry (1952), which Elo ratings estimate: player i scores on
average ``1 / (1 + 10^((r_j - r_i) / 400))`` against player j. A draw counts as half a win.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

_SCALE = 400.0 / np.log(10.0)  # Elo points for a factor e of the odds
_PRIOR = 1.0  # drawn games of each pair besides those played, so that no rating is infinite
_MAX_STEPS = 1_000
_CLOSE = 1e-8


class Ratings(NamedTuple):
    """Ratings in Elo points; their mean is 0."""

    values: Array  # [players]
    low: Array  # [players], the lower ends of the intervals
    high: Array  # [players]


def fit(wins: Array, games: Array) -> Array:
    """Returns the ratings that make these results most likely, ``[players]``; their mean is 0.

    The likelihood is maximised by the algorithm of Hunter (2004), "MM algorithms for generalized
    Bradley-Terry models", equation 3. A drawn game of each pair is added.

    Args:
      wins: ``[players, players]``, the sum of player i's scores against player j.
      games: ``[players, players]``, the number of their games, symmetric.
    """
    others = 1.0 - np.eye(len(wins))
    scores = ((wins + _PRIOR / 2) * others).sum(axis=1)
    played = (games + _PRIOR) * others
    strengths = np.ones(len(wins))
    for _ in range(_MAX_STEPS):
        sums = strengths[:, None] + strengths[None, :]
        new = scores / (played / sums).sum(axis=1)
        new /= np.exp(np.log(new).mean())
        if np.abs(np.log(new / strengths)).max() < _CLOSE:
            break
        strengths = new
    return _SCALE * np.log(new)


def rate(
    scores: Array,
    pairs: Array,
    players: int,
    *,
    level: float = 0.95,
    samples: int = 500,
    seed: int = 0,
) -> Ratings:
    """Returns ratings with intervals of the percentile bootstrap over games.

    Args:
      scores: ``[games]``, 1 if the first player of a pair won, 1/2 for a draw, else 0.
      pairs: int ``[games, 2]``, the players of each game.
      players: number of players, at least 2.
      level: the confidence level of the intervals.
      samples: number of samples of the bootstrap.
      seed: the seed of the bootstrap samples.

    Raises:
      ValueError: there are fewer than two players.
    """
    if players < 2:
        raise ValueError(f"ratings: there must be at least 2 players; got {players}.")
    rng = np.random.default_rng(seed)
    values = fit(*tables(scores, pairs, players))
    drawn = []
    for _ in range(samples):
        chosen = rng.integers(len(scores), size=len(scores))
        drawn.append(fit(*tables(scores[chosen], pairs[chosen], players)))
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(np.stack(drawn), [tail, 100 - tail], axis=0)
    return Ratings(values, low, high)


def tables(scores: Array, pairs: Array, players: int) -> tuple[Array, Array]:
    """Returns the sums of scores and the numbers of games of each pair, ``[players, players]``."""
    wins, games = np.zeros((players, players)), np.zeros((players, players))
    first, second = pairs.T
    np.add.at(wins, (first, second), scores)
    np.add.at(wins, (second, first), 1.0 - scores)
    np.add.at(games, (first, second), 1.0)
    np.add.at(games, (second, first), 1.0)
    return wins, games
