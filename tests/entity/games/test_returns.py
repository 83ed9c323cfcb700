"""Returns of random and scripted policies in each game, for comparison with learners."""

import math

import numpy as np
import pytest

from rlstack.entity import scripted as s
from rlstack.entity.games import GAMES
from rlstack.entity.scripted import RandomPolicy, play


def returns(name, rule, episodes, seed=1, **options):
    game = GAMES[name].game(seed=seed, **options)
    rule = rule or RandomPolicy(game, seed + 1)
    found = [play(game, rule) for _ in range(episodes)]
    return np.array([e.total for e in found]), np.array([e.length for e in found])


def count_chance(choices):
    """The mean of 1 / legal choices: the right one and k of m others, k uniform on 0..m."""
    m = choices
    return (1 + sum(1 / m + (m - k) / (m * (k + 1)) for k in range(1, m + 1))) / (m + 1)


# Values are exact where they can be derived; the others are published or measured over
# 10^4 episodes, with their uncertainty.
CHANCE = [
    ("MultiArmedBandit", {}, 300, 0.2, 0),
    ("MoveToOrigin", {}, 1000, -0.256, 0.008),
    ("NotHotdog", {}, 2000, 0.5, 0),
    ("Count", {"masked_choices": 2}, 2000, count_chance(2), 0),
    ("Count", {"masked_choices": 5}, 2000, count_chance(5), 0),
    ("Count", {}, 2000, count_chance(10), 0),
    ("Xor", {}, 2000, 0.5, 0),
    ("FloorIsLava", {}, 2000, 0.125, 0),
    ("CherryPick", {}, 1000, -11.4535, 0.01),
    ("PickMatchingBalls", {}, 3000, 0.145, 0.002),
    ("PickMatchingBalls", {"randomize": True}, 3000, 0.300, 0.003),
    ("Minefield", {}, 1000, 0.029, 0.002),
    ("MultiSnake", {}, 3000, 0.0108, 0.0005),
    ("MultiSnake", {"num_snakes": 2}, 3000, 0.0042, 0.0002),
    ("MultiSnake", {"max_snake_length": 2}, 2000, 0.104, 0.005),
    ("MineSweeper", {}, 1500, 0.118, 0.004),
    ("RockPaperScissors", {}, 2000, 2 / 3, 0),
    ("TreasureHunt", {}, 1500, 0.835, 0.02),
]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("name", "options", "episodes", "figure", "open_"), CHANCE)
def test_returns_of_random_policies(name, options, episodes, figure, open_):
    found, _ = returns(name, None, episodes, **options)
    band = 4 * found.std() / math.sqrt(episodes) + open_
    assert band < max(0.15, abs(figure) / 2)
    assert found.mean() == pytest.approx(figure, abs=band)


def test_the_figures_of_count_are_the_published_ones():
    assert [count_chance(m) for m in (2, 5, 10)] == pytest.approx([0.752, 0.454, 0.291], abs=0.004)


OPTIMAL = [
    ("MultiArmedBandit", {}, s.pull_arm_a, 3),
    ("NotHotdog", {}, s.say_what_it_is, 50),
    ("Count", {}, s.count_beans, 50),
    ("Xor", {}, s.exclusive_or, 50),
    ("FloorIsLava", {}, s.jump_to_high_ground, 50),
    ("CherryPick", {}, s.pick_best_cherry, 50),
    ("PickMatchingBalls", {}, s.pick_commonest_colour, 50),
    ("PickMatchingBalls", {"randomize": True, "one_hot": False}, s.pick_commonest_colour, 50),
    ("MineSweeper", {}, s.defuse_nearest, 100),
    ("MineSweeper", {"orbital_cannon": True}, s.defuse_nearest, 100),
    ("Minefield", {}, s.steer_around_mines, 100),
]


@pytest.mark.parametrize(("name", "options", "rule", "episodes"), OPTIMAL)
def test_the_best_return_is_one(name, options, rule, episodes):
    found, _ = returns(name, rule, episodes, **options)
    assert found == pytest.approx(np.ones(episodes))


CASES = [
    ("MoveToOrigin", {}, s.brake_in_time, 100, 0.9996, 0.0002),
    ("PickMatchingBalls", {}, s.stay_with_first_colour, 1000, 0.744, 0.002),
    ("PickMatchingBalls", {"randomize": True}, s.stay_with_first_colour, 1000, 0.750, 0.003),
    ("Minefield", {}, s.drive_straight, 700, 0.840, 0.004),
    ("MultiSnake", {}, s.go_for_food, 150, 0.993, 0.002),
    ("MultiSnake", {"num_snakes": 2}, s.go_for_food, 150, 0.780, 0.01),
    ("RockPaperScissors", {}, s.throw_paper, 1000, 1.0, 0),
    ("RockPaperScissors", {"cheat": True}, s.beat_opponent, 50, 2.0, 0),
    ("TreasureHunt", {}, s.go_for_treasure, 150, 5.0, 0.03),
]


@pytest.mark.parametrize(("name", "options", "rule", "episodes", "figure", "open_"), CASES)
def test_returns_of_scripted_policies(name, options, rule, episodes, figure, open_):
    found, _ = returns(name, rule, episodes, **options)
    band = 4 * found.std() / math.sqrt(episodes) + open_
    assert band < 0.15
    assert found.mean() == pytest.approx(figure, abs=band)


@pytest.mark.parametrize(
    ("name", "rule", "episodes", "length"),
    [
        ("Minefield", s.steer_around_mines, 200, 45),
        ("TreasureHunt", s.go_for_treasure, 150, 25),
        ("MineSweeper", None, 1000, 63),
        ("TreasureHunt", None, 1500, 128),
    ],
)
def test_lengths_of_episodes(name, rule, episodes, length):
    _, found = returns(name, rule, episodes)
    assert found.mean() == pytest.approx(length, abs=4 * found.std() / math.sqrt(episodes) + 1)
