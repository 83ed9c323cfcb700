"""Results of games between sides: worked by hand."""

import pytest

from rlstack.programs.tools.seats.match import Game
from rlstack.programs.tools.seats.results import (
    Episode,
    num_repeated,
    seatings,
    standings,
    summary,
    told,
)


def game(*returns, cut=False, moves=()):
    return Game(returns, 7, cut, moves)


def test_each_side_plays_each_seat_as_often():
    assert seatings(2, 2, 3) == [(0, 1), (1, 0), (0, 1)]
    assert seatings(3, 2, 2) == [(0, 1, 0), (1, 0, 1)]
    assert seatings(4, 3, 3) == [(0, 1, 2, 0), (1, 2, 0, 1), (2, 0, 1, 2)]
    for seats, sides in ((2, 2), (3, 2), (5, 3)):
        columns = list(zip(*seatings(seats, sides, 2 * sides), strict=True))
        assert all(sorted(column) == sorted(2 * list(range(sides))) for column in columns)


def test_the_side_with_the_highest_mean_return_of_its_seats_wins():
    assert Episode((0, 1), game(1.0, -1.0)).winners() == [0]
    assert Episode((1, 0), game(1.0, -1.0)).winners() == [1]
    assert Episode((0, 1), game(0.1 + 0.2, 0.3)).winners() == [0, 1]
    assert Episode((0, 1, 0), game(3.0, 2.0, 0.0)).winners() == [1]  # 1.5 against 2
    assert Episode((0, 1), game(1.0, 0.0, cut=True)).winners() == []


def test_standings_count_wins_draws_and_losses_with_an_interval():
    episodes = [
        Episode((0, 1), game(1.0, -1.0)),
        Episode((1, 0), game(-1.0, 1.0)),
        Episode((0, 1), game(0.0, 0.0)),
        Episode((1, 0), game(4.0, 2.0, cut=True)),
    ]
    left, right = standings(["left", "right"], episodes)
    assert left[:4] == ("left", 2, 1, 0) and right[:4] == ("right", 0, 1, 2)
    assert left.score.estimate == pytest.approx(2.5 / 3)
    assert left.score.low < left.score.estimate < left.score.high <= 1.0
    assert right.score.low == pytest.approx(1 - left.score.high)
    assert left.mean_return == pytest.approx((1 + 1 + 0 + 2) / 4)
    (nothing,) = standings(["left"], [Episode((0, 0), game(1.0, 1.0, cut=True))])
    assert nothing.score is None and nothing.wins == nothing.losses == 0


def test_three_sides_share_a_draw():
    (first, second, third) = standings(list("abc"), [Episode((0, 1, 2), game(1.0, 1.0, 0.0))])
    assert (first.wins, first.draws, second.draws, third.losses) == (0, 1, 1, 1)


def test_episodes_that_repeat_one_another_are_counted():
    episodes = [
        Episode((0, 1), game(1.0, -1.0, moves=(b"a",))),
        Episode((1, 0), game(1.0, -1.0, moves=(b"a",))),
        Episode((0, 1), game(1.0, -1.0, moves=(b"a",))),
    ]
    assert num_repeated(episodes) == 1
    lines = summary(standings(["x", "y"], episodes), 1)
    assert lines[0].startswith("x: 2 won, 0 drawn, 1 lost, score 0.667 (95% interval 0.2")
    assert lines[0].endswith("mean return 0.333333") and "1 of these episodes repeat" in lines[2]


def test_an_episode_in_words():
    seats, names = ("first", "second"), ["four", "five"]
    text = told(2, Episode((1, 0), game(1.0, -1.0)), names, seats)
    assert text == "episode 2: first (five) 1, second (four) -1: five wins after 7 steps"
    text = told(1, Episode((0, 1), game(0.0, 0.0)), names, seats)
    assert text.endswith("four and five draw after 7 steps")
    assert told(1, Episode((0, 1), game(0.0, 0.0, cut=True)), names, seats).endswith(
        ": cut after 7 steps"
    )
    alone = told(1, Episode((0, 0), game(2.0, 3.0)), ["four"], seats)
    assert alone == "episode 1: first 2, second 3: 7 steps"
