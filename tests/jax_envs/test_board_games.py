"""TicTacToe and Connect Four in JAX, against the game in Python and rules written by hand."""

import jax
import numpy as np
import pytest

from rlstack.envs.seats.connect_four import ConnectFour as PythonConnectFour
from rlstack.jax_envs.board_games import ConnectFour, TicTacToe, has_row
from rlstack.jax_envs.game import BatchedGame

KEY = jax.random.PRNGKey(0)
LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]


def played(game, places):
    """The outcomes of moves of either seat in turn; the other seat's action is nonsense."""
    step, (state, _) = jax.jit(game.step), game.reset(KEY)
    found = []
    for place in places:
        actions = np.array([place, 3] if state.turn == 0 else [3, place], np.int32)
        found.append(step(KEY, state, actions))
        state = found[-1].state
    return found


def assert_same(seen, wanted):
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(seen[name], value, err_msg=name)
        assert seen[name].dtype == value.dtype


@pytest.mark.parametrize("seed", range(12))
def test_connect_four_is_the_game_in_python(seed):
    rng, game, ours = np.random.default_rng(seed), PythonConnectFour(), ConnectFour()
    step = jax.jit(ours.step)
    state, seen = ours.reset(KEY)
    wanted, over = game.reset(), False
    while not over:
        for seat in range(2):
            assert_same({k: v[seat] for k, v in seen.items()}, wanted[seat])
        turn = int(wanted[1]["turn"][0])
        legal = np.flatnonzero(wanted[turn]["action_mask"])
        # Sometimes an illegal action: a full column, or to wait.
        places = range(8) if seed > 8 and rng.random() < 0.1 else legal
        actions = np.full(2, 7, np.int32)
        actions[turn] = rng.choice(places)
        there, here = game.step(list(actions)), step(KEY, state, actions)
        state, seen, wanted, over = here.state, here.observation, there.observations, there.last
        np.testing.assert_array_equal(here.reward, there.rewards)
        assert bool(here.over) == over
        np.testing.assert_array_equal(here.terminated, [over] * 2)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("seat", [0, 1])
def test_three_in_a_row_win_tictactoe(line, seat):
    others = [i for i in range(9) if i not in line]
    # Seat 1 wins with its third stone, after three stones of seat 0 that are no line.
    harmless = next(
        [a, b, c]
        for a in others
        for b in others
        for c in others
        if len({a, b, c}) == 3 and sorted([a, b, c]) not in LINES
    )
    mine, theirs = line, harmless
    pairs = zip(mine, theirs, strict=True) if seat == 0 else zip(theirs, mine, strict=True)
    moves = [place for pair in pairs for place in pair][: 5 + seat]
    found = played(TicTacToe(), moves)
    assert [bool(outcome.over) for outcome in found] == [False] * (4 + seat) + [True]
    reward = [1.0, -1.0] if seat == 0 else [-1.0, 1.0]
    np.testing.assert_array_equal(found[-1].reward, reward)
    for outcome in found[:-1]:
        np.testing.assert_array_equal(outcome.reward, [0.0, 0.0])


def test_a_full_board_is_a_draw_and_an_illegal_action_loses():
    # X O X / X O O / O X X
    found = played(TicTacToe(), [0, 1, 2, 4, 3, 5, 7, 6, 8])
    assert bool(found[-1].over)
    np.testing.assert_array_equal(found[-1].reward, [0.0, 0.0])
    for illegal in (4, 9):  # a cell that is taken; to wait
        last = played(TicTacToe(), [4, illegal])[-1]
        assert bool(last.over)
        np.testing.assert_array_equal(last.reward, [1.0, -1.0])


def test_what_the_seats_see_of_tictactoe():
    state = played(TicTacToe(), [4, 0])[-1].state
    seen = TicTacToe().observe(state)
    np.testing.assert_array_equal(seen["turn"], [[1], [0]])
    np.testing.assert_array_equal(seen["action_mask"][0], [0, 1, 1, 1, 0, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(seen["action_mask"][1], [0] * 9 + [1])
    assert seen["board"][0, 1, 1, 0] == seen["board"][0, 0, 0, 1] == 1
    assert seen["board"][1, 1, 1, 1] == seen["board"][1, 0, 0, 0] == 1
    assert seen["board"].sum() == 4
    assert TicTacToe().render(jax.tree.map(np.asarray, state)) == ". . .\n. X .\nO . ."


@pytest.mark.parametrize("game", [TicTacToe(), ConnectFour()])
def test_the_state_of_an_observation_shows_it_to_the_first_seat(game):
    rng = np.random.default_rng(0)
    state, seen = game.reset(KEY)
    for _ in range(5):
        for seat in range(2):
            own = {k: v[seat] for k, v in seen.items()}
            other = {k: v[1 - seat] for k, v in seen.items()}
            again = game.observe(game.state_of(own))
            assert_same({k: v[0] for k, v in again.items()}, own)
            assert_same({k: v[1] for k, v in again.items()}, other)
        place = rng.choice(np.flatnonzero(seen["action_mask"][int(state.turn)]))
        outcome = game.step(KEY, state, np.array([place, place]))
        state, seen = outcome.state, outcome.observation


def test_rows_of_other_boards():
    stones = np.zeros((4, 5), bool)
    stones[[0, 1, 2], [3, 2, 1]] = True
    assert bool(has_row(stones, 3))
    assert not bool(has_row(stones, 4))
    assert not bool(has_row(np.zeros((2, 5), bool), 3))


def test_games_are_batches_of_seats():
    env = BatchedGame(ConnectFour())
    state, timestep = env.reset(env.keys(range(4)))
    np.testing.assert_array_equal(timestep.observation["turn"][:, 0], [1, 0, 1, 0])
    for _ in range(4):
        state, timestep = env.step(state, np.zeros(4, np.int32))
        np.testing.assert_array_equal(timestep.reward, [0] * 4)
