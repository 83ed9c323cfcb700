"""The rules of Connect Four: wins, waiting seats and legal actions."""

import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.envs.seats.connect_four import COLUMNS, ROWS, WAIT, ConnectFour, has_four
from rlstack.envs.seats.games import ConnectFour as Seats


def play(columns):
    """Drops stones in these columns, in turn; returns the game and its last step."""
    game = ConnectFour()
    game.reset()
    for number, column in enumerate(columns):
        actions = [column, WAIT] if number % 2 == 0 else [WAIT, column]
        step = game.step(actions)
        if number < len(columns) - 1:
            assert not step.last and step.rewards == [0.0, 0.0] and step.discounts == [1.0, 1.0]
    return game, step


@pytest.mark.parametrize(
    "columns, winner",
    [
        ([0, 1, 0, 1, 0, 1, 0], 0),  # up
        ([0, 0, 1, 1, 2, 2, 3], 0),  # across
        ([6, 3, 6, 4, 6, 5, 0, 6, 0, 2], 1),  # across, by the second seat
        ([0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3], 0),  # a diagonal to the right
        ([6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3], 0),  # a diagonal to the left
    ],
)
def test_four_in_a_row_win_and_end_the_game_for_both(columns, winner):
    _, step = play(columns)
    assert step.last and step.discounts == [0.0, 0.0]
    assert step.rewards == ([1.0, -1.0] if winner == 0 else [-1.0, 1.0])


def test_people_see_the_board_and_names_of_columns():
    game, _ = play([3, 3, 2])
    lines = str(game).splitlines()
    assert lines[-3:] == [". . . O . . .", ". . X X . . .", "a b c d e f g"]
    assert lines[:-3] == [". . . . . . ."] * 4
    assert game.action_names[WAIT] == "wait" and len(game.action_names) == COLUMNS + 1


def test_no_four_go_around_the_edge_of_a_board():
    top = [1 << (7 * column + row) for column, row in ((0, 4), (0, 5), (1, 0), (1, 1))]
    assert not has_four(sum(top))
    across = [1 << (7 * column + 5 - column) for column in range(4)]
    assert has_four(sum(across))


def test_four_are_found_as_by_counting():
    rng = np.random.default_rng(0)
    for _ in range(300):
        cells = rng.random((COLUMNS, ROWS)) < 0.45
        stones = sum(1 << (7 * c + r) for c in range(COLUMNS) for r in range(ROWS) if cells[c, r])
        lines = [
            all(
                0 <= c + i * x < COLUMNS and 0 <= r + i * y < ROWS and cells[c + i * x, r + i * y]
                for i in range(4)
            )
            for c in range(COLUMNS)
            for r in range(ROWS)
            for x, y in ((0, 1), (1, 0), (1, 1), (1, -1))
        ]
        assert has_four(stones) == any(lines)


def test_a_full_board_without_four_is_a_draw():
    # Pairs of columns whose rows alternate, so that no colour has more than three in a row.
    columns = [0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 2, 3, 2, 3, 3, 2, 3, 2, 2, 3, 2, 3]
    columns += [4, 5, 4, 5, 5, 4, 5, 4, 4, 5, 4, 5, 6, 6, 6, 6, 6, 6]
    _, step = play(columns)
    assert step.last and step.rewards == [0.0, 0.0] and step.discounts == [0.0, 0.0]


def test_a_seat_sees_its_own_stones_first_and_may_only_wait_when_it_is_not_its_turn():
    game, step = play([3, 3, 2])
    first, second = step.observations
    np.testing.assert_array_equal(first["board"], second["board"][..., ::-1])
    assert first["board"][0, 3, 0] == first["board"][1, 3, 1] == first["board"][0, 2, 0] == 1
    assert first["board"].sum() == 3
    assert (first["turn"], second["turn"]) == ([0.0], [1.0])
    assert first["action_mask"].tolist() == [0] * 7 + [1]
    assert second["action_mask"].tolist() == [1] * 7 + [0]
    for seen in step.observations:
        for name, spec in game.observation_spec.items():
            spec.validate(seen[name])


def test_what_the_waiting_seat_chooses_changes_nothing():
    game = ConnectFour()
    game.reset()
    step = game.step([3, 3])
    assert step.observations[1]["board"].sum() == 1 and not step.last


@pytest.mark.parametrize("column", [0, WAIT])
def test_an_illegal_action_loses(column):
    game, step = play([0, 0, 0, 0, 0, 0])
    assert step.observations[0]["action_mask"][0] == 0
    step = game.step([column, WAIT])
    assert step.last and step.rewards == [-1.0, 1.0]


def test_random_legal_games_in_a_pool_end_for_both_seats_at_once():
    rng, ended = np.random.default_rng(1), 0
    with SyncEnv(Seats, 8, "for_loop", seed=1) as pool:
        timestep = pool.reset()
        for _ in range(120):
            legal = timestep.observation["action_mask"]
            assert (legal[::2, WAIT] + legal[1::2, WAIT] == 1).all() or timestep.last().any()
            timestep = pool.step(np.argmax(rng.random(legal.shape) * legal, axis=1))
            np.testing.assert_array_equal(timestep.last()[::2], timestep.last()[1::2])
            np.testing.assert_array_equal(timestep.reward[::2], -timestep.reward[1::2])
            assert (timestep.discount[timestep.last()] == 0).all()
            ended += int(timestep.last()[::2].sum())
    assert ended >= 4
