"""Rules of the games on boards: MultiSnake, MineSweeper and TreasureHunt, by scripted episodes."""

from collections import deque

import pytest

from rlstack.entity.scripted import legal_choices
from tests.entity.games.cases import act, make

FIRE = "Fire Orbital Cannon"
UP, DOWN, LEFT, RIGHT = range(4)


def snakes(cells, food, **options):
    game = make("MultiSnake", num_snakes=len(cells), **options)
    game.reset()
    game._snakes, game._food = [deque(snake) for snake in cells], list(food)
    game._cells = {cell: -2 for snake in cells for cell in snake}
    game._cells.update({cell: colour for colour, cell in enumerate(food)})
    return game, game._observe([0.0] * game._num_players, over=False)


def test_a_snake_moves_eats_and_grows():
    game, observation = snakes([[(3, 3)]], [(3, 4)])
    observation = act(game, observation, move=[UP])
    assert observation.reward == pytest.approx(0.1)
    assert observation.features["SnakeHead"] == [(3, 4, 0)]
    assert observation.features["SnakeBody"] == [(3, 3, 0)]
    ((x, y, _),) = observation.features["Food"]
    assert (x, y) not in [(3, 3), (3, 4)] and min(x, y) >= 0 and max(x, y) < 10
    game, observation = snakes([[(3, 3), (3, 4)]], [(9, 9)])
    observation = act(game, observation, move=[LEFT])
    assert observation.features["SnakeHead"] == [(2, 4, 0)]
    assert observation.features["SnakeBody"] == [(3, 4, 0)]
    assert (observation.reward, observation.done) == (0, False)
    assert observation.global_features == (1,)


@pytest.mark.parametrize(
    ("snake", "move"),
    [
        ([(0, 5)], LEFT),
        ([(9, 5)], RIGHT),
        ([(5, 9)], UP),
        ([(5, 0)], DOWN),
        ([(3, 3), (3, 4)], DOWN),  # the snake moves into itself
        ([(3, 3), (3, 4), (4, 4), (4, 3)], LEFT),  # its own tail, which is about to move
    ],
)
def test_a_snake_ends_at_walls_and_snakes(snake, move):
    game, observation = snakes([snake], [(9, 9)])
    last = act(game, observation, move=[move])
    assert last.done and not last.truncated and last.reward == 0


def test_others_still_move_and_eat_when_a_snake_ends_the_game():
    game, observation = snakes([[(0, 0)], [(5, 5)]], [(9, 9), (5, 6)])
    last = act(game, observation, move=[LEFT, UP])
    assert last.done and last.reward == pytest.approx(1 / 20)
    assert last.features["SnakeHead"] == [(0, 0, 0), (5, 6, 1)]
    # Food of another colour also ends it, as does a cell that an earlier snake has just entered.
    game, observation = snakes([[(0, 0)], [(5, 5)]], [(5, 6), (9, 9)])
    assert act(game, observation, move=[UP, UP]).done
    game, observation = snakes([[(0, 0)], [(1, 1)]], [(9, 8), (9, 9)])
    assert act(game, observation, move=[RIGHT, DOWN]).done


def test_full_length_ends_the_game_when_all_have_it():
    game, observation = snakes([[(0, 0), (0, 1)], [(5, 5)]], [(0, 2), (5, 6)], max_snake_length=2)
    observation = act(game, observation, move=[UP, LEFT])
    assert (observation.reward, observation.done) == (0, False)  # full length: no growth, no reward
    assert observation.features["SnakeBody"] == [(0, 1, 0)]
    game, observation = snakes([[(0, 0), (0, 1)], [(5, 5)]], [(9, 9), (5, 6)], max_snake_length=2)
    last = act(game, observation, move=[UP, UP])
    assert last.done and last.reward == pytest.approx(0.5)


def test_snakes_end_after_180_steps():
    game, observation = snakes([[(0, 0)]], [(9, 9)])
    for step in range(180):
        assert not observation.done
        observation = act(game, observation, move=[step % 2])
    assert observation.done and observation.global_features == (180,)


def test_each_player_is_credited_with_their_own_snakes():
    cells, food = [[(1, 1)], [(3, 3)], [(5, 5)], [(7, 7)]], [(9, 0), (9, 1), (5, 6), (9, 3)]
    game, observation = snakes(cells, food, num_players=2)
    observation = act(game, observation, move=[UP, UP, UP, UP])
    assert observation.metrics == {"reward_0": 0.0, "reward_1": pytest.approx(1 / 40)}
    assert observation.reward == pytest.approx(1 / 40)


def field(mines, robots, cooldown=None, **options):
    game = make("MineSweeper", width=4, height=4, orbital_cannon=cooldown is not None, **options)
    game.reset()
    game._mines, game._robots = list(mines), list(robots)
    if cooldown is not None:
        game._cooldown = cooldown
    return game, game._observe(0.0)


def test_robots_move_as_the_labels_say_and_not_off_the_board():
    labels = ("up", "down", "left", "right", "defuse")
    for robot, legal in [((0, 0), (0, 3, 4)), ((3, 3), (1, 2, 4)), ((1, 3), (1, 2, 3, 4))]:
        game, observation = field([(2, 1)], [robot])
        assert game.action_space["Move"].choices == labels
        assert legal_choices(game, observation, "Move") == [list(legal)]
    for move, cell in enumerate([(1, 2), (1, 0), (0, 1), (2, 1), (1, 1)]):
        game, observation = field([(3, 3)], [(1, 1)])
        assert act(game, observation, Move=[move]).features["Robot"] == [cell]


def test_defusing_reaches_distance_one_and_the_last_mine_wins():
    game, observation = field([(1, 1), (2, 1), (1, 2), (2, 2)], [(1, 1), (3, 3)])
    observation = act(game, observation, Move=[4, 1])
    assert observation.features["Mine"] == [(2, 2)]
    assert (observation.reward, observation.done) == (0, False)
    game, observation = field([(2, 2)], [(2, 3), (0, 0)])
    last = act(game, observation, Move=[4, 0])
    assert (last.reward, last.done, last.truncated) == (1, True, False)


def test_robots_on_mines_are_gone_and_without_robots_it_is_over():
    game, observation = field([(0, 1), (3, 3)], [(0, 0), (2, 2)])
    observation = act(game, observation, Move=[0, 1])
    assert observation.features["Robot"] == [(2, 1)] and len(observation.features["Mine"]) == 2
    assert not observation.done
    game, observation = field([(0, 1), (3, 3)], [(0, 0)])
    last = act(game, observation, Move=[0])
    assert (last.reward, last.done) == (0, True)
    assert "Move" not in last.actions
    # A mine that is defused in the same step does no harm.
    game, observation = field([(0, 1), (3, 3)], [(0, 0), (1, 1)])
    assert len(act(game, observation, Move=[0, 4]).features["Robot"]) == 2


def test_the_cannon_cools_fires_and_cools_again():
    game, observation = field([(0, 3), (3, 3)], [(0, 0)], cooldown=2, cooldown_period=3)
    seen = []
    for _ in range(2):
        seen.append(observation.features["Orbital Cannon"][0][0])
        assert "Fire Orbital Cannon" not in observation.actions
        observation = act(game, observation, Move=[4])
    assert [*seen, observation.features["Orbital Cannon"][0][0]] == [2, 1, 0]
    observation = act(game, observation, Move=[4], **{FIRE: [("Mine", 0)]})
    assert observation.features["Mine"] == [(3, 3)]
    assert observation.features["Orbital Cannon"] == [(3,)]
    # The cannon can hit a robot, which then does not act.
    game, observation = field([(0, 1), (3, 3)], [(0, 0), (2, 2)], cooldown=0)
    observation = act(game, observation, Move=[4, 1], **{FIRE: [("Robot", 0)]})
    assert observation.features["Robot"] == [(2, 1)] and len(observation.features["Mine"]) == 2
    # The cannon can remove the last mine.
    game, observation = field([(3, 3)], [(0, 0)], cooldown=0)
    assert act(game, observation, Move=[0], **{FIRE: [("Mine", 0)]}).reward == 1


def test_mines_and_robots_start_on_different_cells():
    game = make("MineSweeper", width=3, height=3, num_mines=5, num_robots=4)
    features = game.reset().features
    assert len({*features["Mine"], *features["Robot"]}) == 9


@pytest.mark.parametrize("name", ["MineSweeper", "TreasureHunt"])
def test_a_limit_of_steps_truncates(name):
    game = make(name, max_steps=3)
    choices = {"Move": [4, 4]} if name == "MineSweeper" else {"move": [0]}
    while True:
        observation = game.reset()
        steps = 0
        while not observation.over:
            observation = act(game, observation, **choices)
            steps += 1
        if steps == 3 and observation.reward == 0:
            break
    assert observation.truncated


def hunt(x, y, traps, treasures):
    game = make("TreasureHunt")
    first = game.reset()
    cells = {*first.features["Trap"], *first.features["Treasure"]}
    assert first.global_features == (0, 0) and len(cells) == 10 and (0, 0) not in cells
    assert max(abs(c) for cell in cells for c in cell) <= 5
    game._x, game._y, game._traps, game._treasures = x, y, list(traps), list(treasures)
    return game, game._observe(0.0)


def test_treasures_are_taken_and_traps_end_the_hunt():
    game, observation = hunt(0, 0, [(2, 0)], [(1, 0), (0, 1)])
    observation = act(game, observation, move=[RIGHT])
    assert (observation.reward, observation.done) == (1, False)
    assert observation.features["Treasure"] == [(0, 1)]
    last = act(game, observation, move=[RIGHT])
    assert (last.reward, last.done, last.truncated) == (0, True, False)
    game, observation = hunt(0, 0, [(2, 0)], [(0, 1)])
    last = act(game, observation, move=[UP])
    assert (last.reward, last.done) == (1, True) and last.features["Treasure"] == []


@pytest.mark.parametrize(
    ("place", "move"), [((0, 10), UP), ((0, -10), DOWN), ((-10, 0), LEFT), ((10, 0), RIGHT)]
)
def test_a_hunt_does_not_leave_the_board(place, move):
    game, observation = hunt(*place, [(2, 0)], [(0, 1)])
    observation = act(game, observation, move=[move])
    assert observation.global_features == place and not observation.done
