"""Ratings of players from their games."""

import numpy as np
import pytest

from rlstack.math import ratings


def played(strengths, games, seed=0):
    """Games of all pairs of players with these ratings."""
    rng = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(len(strengths)) for j in range(i) for _ in range(games)]
    pairs = np.array(pairs)
    gap = strengths[pairs[:, 0]] - strengths[pairs[:, 1]]
    return (rng.random(len(pairs)) < 1 / (1 + 10 ** (-gap / 400))).astype(float), pairs


def test_two_players_have_the_rating_of_their_score():
    wins, games = np.array([[0, 30.0], [10.0, 0]]), np.array([[0, 40.0], [40.0, 0]])
    gap = 400 * np.log10(30.5 / 10.5)  # with the drawn game that is added
    np.testing.assert_allclose(ratings.fit(wins, games), [gap / 2, -gap / 2], rtol=1e-5)


def test_ratings_are_found_again_and_lie_in_their_intervals():
    true = np.array([-200.0, -50.0, 50.0, 200.0])
    found = ratings.rate(*played(true, 400), 4, samples=200)
    np.testing.assert_allclose(found.values.mean(), 0.0, atol=1e-6)
    assert (found.low < true).all()
    assert (true < found.high).all()
    assert (found.high - found.low < 60).all()


def test_more_games_make_intervals_narrower():
    true = np.array([-50.0, 50.0])
    few, many = (ratings.rate(*played(true, n), 2, samples=200) for n in (50, 800))
    assert (many.high - many.low < (few.high - few.low) / 2).all()


def test_a_player_that_always_wins_has_a_finite_rating():
    found = ratings.rate(np.ones(20), np.tile([0, 1], (20, 1)), 2, samples=10)
    assert np.isfinite(found.values).all()
    assert found.values[0] == pytest.approx(400 * np.log10(20.5 / 0.5) / 2, rel=1e-5)


def test_one_player_has_no_rating():
    with pytest.raises(ValueError, match="at least 2 players"):
        ratings.rate(np.ones(1), np.zeros((1, 2), int), 1)
