"""AlphaZero: values of either seat by hand, losses in numpy, games against a perfect player."""

import dataclasses
import functools
import importlib.util
import io
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlstack
from rlstack.agents.alphazero import AlphaZero, AlphaZeroConfig
from rlstack.checks import WrongKindError
from rlstack.envs.seats.connect_four import ConnectFour
from rlstack.exploration import Greedy, Sample
from rlstack.families.planning import PlanOutput
from rlstack.jax_envs.board_games import TicTacToe
from rlstack.jax_envs.game import GameOutcome
from rlstack.networks import ActorCriticOutput, Network, NetworkConfig, actor_critic
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    SMALL,
    Setting,
    assert_close,
    quick_jit,
)
from tests.fused.test_fused_run import saved
from tests.programs import running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mctx") is None, reason="needs mctx")


class Signs(NamedTuple):
    """Seat 0 sees ``numbers``, seat 1 their opposites. The one with a positive first one moves."""

    numbers: jax.Array  # [3]
    mask: jax.Array  # [4]


class SignGame:
    """A game with the observations of `MASKED`, for the contract's tests."""

    def step(self, rng_key, state, action):
        mover = self.turn(state)
        changed = jnp.roll(state.numbers, 1) + jnp.array([0.0, 0.1, 0.2]) * action[0]
        sign = jnp.where(mover == 0, -1.0, 1.0)
        after = Signs(changed.at[0].set(sign * jnp.abs(changed[0]) + sign * 0.1), state.mask)
        won = jnp.where(jnp.arange(2) == mover, 1.0, -1.0) * (action[mover] == 2)
        over = action[mover] == 3
        return GameOutcome(after, self.observe(after), won, jnp.full(2, over), over)

    def turn(self, state):
        return jnp.where(state.numbers[0] > 0, 0, 1)

    def observe(self, state):
        numbers = jnp.stack([state.numbers, -state.numbers])
        return {"observation": numbers, "action_mask": jnp.stack([state.mask] * 2)}

    def state_of(self, observation):
        return Signs(jnp.asarray(observation["observation"]), observation["action_mask"])


CFG = AlphaZeroConfig(
    model=SignGame, discount=0.9, num_simulations=6, n_step=3, optimizer=FAST, value_cost=0.5
)
SETTINGS = {
    "alphazero": Setting(CFG, MASKED, ONE_OF_4, SMALL),
    "alphazero-reanalyse": Setting(
        dataclasses.replace(CFG, reanalyse_share=0.5), MASKED, ONE_OF_4, SMALL
    ),
}
if importlib.util.find_spec("mctx") is None:
    SETTINGS = {}

GAME = TicTacToe()
LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]


def uniform_network(*_):
    """A network that knows nothing: equal logits, and a value that is the sum of the board."""

    def apply(key, params, timestep, state):
        board = timestep.observation["board"]
        value = params["value"] * board[..., 0].sum((-1, -2))
        return ActorCriticOutput(jnp.zeros((len(board), 10)), value), state

    return Network(lambda key: {"value": jnp.float32(0)}, apply, apply, lambda size: ())


def make(policy=Greedy, network=uniform_network, **changes):
    cfg = AlphaZeroConfig(
        **{
            "model": "rlstack.jax_envs.board_games:TicTacToe",
            "num_simulations": 200,
            "optimizer": FAST,
            **changes,
        },
    )
    return AlphaZero(cfg, GAME.observation_spec(), GAME.action_spec(), network, policy)


def observed(board, mover):
    """What both seats see of a board of X, O and dots, ``[2, ...]`` in numpy."""
    cells = [c for c in board if c in "XO."]
    planes = np.array([[c == mark for c in cells] for mark in "XO"], np.float32).reshape(2, 3, 3)
    found = {"board": np.stack([np.stack(planes, -1), np.stack(planes[::-1], -1)])}
    turn = np.arange(2) == mover
    found["turn"] = turn[:, None].astype(np.float32)
    free = np.array([c == "." for c in cells])
    mask = np.concatenate([turn[:, None] & free, ~turn[:, None]], axis=1)
    return {**found, "action_mask": mask.astype(np.int8)}


def steps(observation):
    size = len(observation["turn"])
    ones = np.ones(size, np.float32)
    return TimeStep(np.full(size, MID, np.int32), 0 * ones, ones, observation)


@functools.cache
def acting(policy=Greedy, **changes):
    """A compiled `actor_step`."""
    agent = make(policy, **changes)
    act = quick_jit(agent.actor_step)

    def acted(observation, value=0.0, seed=0):
        state = agent.initial_state(len(observation["turn"]))
        key, params = jax.random.PRNGKey(seed), {"value": value}
        return act(key, params, steps(observation), state)[0]

    return acted


@pytest.mark.parametrize("mover", [0, 1])
def test_the_search_wins_at_once(mover):
    board = "XX. OO. ..." if mover == 0 else "XX. OO. X.."
    output = acting()(observed(board, mover))
    assert int(output.action[mover]) == (2 if mover == 0 else 5)
    assert int(output.action[1 - mover]) == 9  # to wait
    np.testing.assert_array_equal(output.policy[1 - mover], [0] * 9 + [1])
    # The mean over all simulations, also of moves that do not win: these are draws at first.
    assert float(output.value[mover]) > 0.1
    assert float(output.value[1 - mover]) == 0.0  # without a search, what the network says


def test_the_search_prevents_the_win_of_the_other_seat():
    output = acting()(observed("XX. .O. ...", 1))
    assert int(output.action[1]) == 2


def test_values_change_their_sign_with_the_turn():
    # One simulation from a board where every move leads to a draw in the network's eyes: the value
    # of the next seat, the sum of its stones, counts against the one that moves.
    act = acting(num_simulations=1)
    output = act(observed("XO. ... ...", 0), 0.25)
    # Root: 0.25 * 1. After the move of X, O sees one stone of its own: -0.25. Mean: 0.
    # The seat that waits has the opposite of the network's value for X, without a search.
    np.testing.assert_allclose(output.value, [0.0, -0.25], atol=1e-6)
    output = act(observed("XO. .X. ...", 1), 0.25)
    # X waits: the opposite of O's one stone. After O's move X sees two of its own: the mean of
    # 0.25 and -0.5.
    np.testing.assert_allclose(output.value, [-0.25, -0.125], atol=1e-6)


def test_the_end_of_a_game_has_no_value_beyond_its_reward():
    agent = make(num_simulations=1)

    @quick_jit
    def after(state, action):
        node, legal = agent.node({"value": 9.0}, state)
        return agent.expand(jax.random.PRNGKey(0), {"value": 9.0}, node.state, action)[0], legal

    for action, wanted in ((2, (1.0, 0.0)), (8, (0.0, -1.0))):
        edge, legal = after(stacked("XX. OO. ...", 0), np.array([action]))
        assert (float(edge.reward[0]), float(edge.discount[0])) == wanted
    np.testing.assert_array_equal(legal[0], [0, 0, 1, 0, 0, 1, 1, 1, 1, 0])


def stacked(board, mover):
    seen = jax.tree.map(lambda x: x[0], observed(board, mover))
    return jax.tree.map(lambda x: x[None], GAME.state_of(seen))


def batch_of(step_types, rng):
    """Items of TicTacToe's observations with random boards; one item per column."""
    step_type = np.array(step_types, np.int32).T
    shape = step_type.shape
    planes = rng.integers(0, 3, (*shape, 3, 3))
    turn = rng.integers(0, 2, shape).astype(bool)
    free = (planes == 0).reshape((*shape, 9))
    mask = np.concatenate([turn[..., None] & free, ~turn[..., None]], axis=-1)
    observation = {
        "board": np.stack([planes == 1, planes == 2], axis=-1).astype(np.float32),
        "turn": turn[..., None].astype(np.float32),
        "action_mask": mask.astype(np.int8),
    }
    ends = np.where(step_type == LAST, 0, 1).astype(np.float32)
    reward = np.where(step_type == FIRST, 0, rng.normal(size=shape)).astype(np.float32)
    policy = rng.dirichlet(np.ones(10), shape) * mask
    policy /= np.maximum(policy.sum(-1, keepdims=True), 1e-9)
    value = rng.normal(size=shape).astype(np.float32)
    output = PlanOutput(np.zeros(shape, np.int32), policy.astype(np.float32), value)
    weights = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    timestep = TimeStep(step_type, reward, ends, observation)
    return Batch(Transition(timestep, output, (), np.zeros(shape, np.int32)), weights)


def test_the_loss_is_that_of_numpy():
    kinds = [[MID] * 4, [MID, MID, LAST, FIRST], [LAST, FIRST, MID, MID], [FIRST, LAST, FIRST, MID]]
    batch = batch_of(kinds * 8, np.random.default_rng(1))
    agent = make(discount=0.5, n_step=2, value_cost=0.25)
    arguments = jax.random.PRNGKey(0), {"value": jnp.float32(0.3)}, batch
    loss, (logs, priorities) = quick_jit(agent.loss)(*arguments)
    timestep, stored = batch.trajectory.timestep, batch.trajectory.agent_output
    total, learned = 0.0, 0
    for i, kind in enumerate(kinds * 8):
        if kind[0] == LAST or not timestep.observation["turn"][0, i, 0]:
            assert priorities[i] == 0
            continue
        learned += 1
        target, factor = 0.0, 1.0
        for t in (1, 2):
            target += factor * timestep.reward[t, i]
            factor *= 0.5 * timestep.discount[t, i]
            if kind[t] == LAST:
                break
        target += factor * stored.value[t, i]
        error = target - 0.3 * timestep.observation["board"][0, i, ..., 0].sum()
        probs = stored.policy[0, i]
        size = timestep.observation["action_mask"][0, i].sum()  # the network's policy is uniform
        divergence = sum(p * np.log(p * size) for p in probs if p > 0)
        total += batch.weights[i] * (divergence + 0.25 * error**2)
        assert float(priorities[i]) == pytest.approx(abs(error), rel=1e-4)
    assert learned > 4
    assert float(loss) == pytest.approx(total / len(priorities), rel=1e-4)
    assert float(logs["priority"]) == pytest.approx(float(priorities.mean()), rel=1e-5)


def test_what_is_no_model_is_refused():
    with pytest.raises(WrongKindError, match="has no turn, observe, state_of"):
        make(model="rlstack.jax_envs.rock_paper_scissors:RockPaperScissors")
    with pytest.raises(ValueError, match="model must be"):
        AlphaZeroConfig(model="TicTacToe")
    with pytest.raises(ValueError, match="no 'Chess'"):
        make(model="rlstack.jax_envs.board_games:Chess")
    lstm = functools.partial(actor_critic, cfg=NetworkConfig(core="lstm"))
    with pytest.raises(ValueError, match="feed-forward"):
        make(network=lstm)


@functools.cache
def best_moves(cells):
    """The value for whose turn it is, and the moves that reach it; ``cells`` is 9 marks."""
    mark = "XO"[cells.count("X") > cells.count("O")]
    if any(all(cells[i] == "XO"[mark == "X"] for i in line) for line in LINES):
        return -1, ()
    free = [i for i, c in enumerate(cells) if c == "."]
    if not free:
        return 0, ()
    found = {i: -best_moves(cells[:i] + mark + cells[i + 1 :])[0] for i in free}
    best = max(found.values())
    return best, tuple(i for i, value in found.items() if value == best)


def test_the_perfect_player_is_perfect():
    value, moves = best_moves("." * 9)
    assert (value, len(moves)) == (0, 9)  # every first move draws
    assert best_moves("XX.OO....") == (1, (2,))
    assert best_moves("X........")[1] == (4,)  # only the centre draws against a corner


def games_against_a_perfect_player(act):
    """(final board, result for the policy: 1, 0 or -1) of all games in which it has either seat.

    The perfect player takes each of its best moves.
    """
    games = []
    for seat in (0, 1):
        boards = {"." * 9}
        for turn in (0, 1) * 4 + (0,):
            live = sorted(board for board in boards if winner(board) is None)
            if live and turn == seat:
                rows = [observed(board, turn) for board in live]
                seen = jax.tree.map(lambda *x, turn=turn: np.stack([r[turn] for r in x]), *rows)
                moves = list(zip(live, np.asarray(act(seen)), strict=True))
            else:
                moves = [(board, move) for board in live for move in best_moves(board)[1]]
            assert all(board[move] == "." for board, move in moves)
            boards = {board[:move] + "XO"[turn] + board[move + 1 :] for board, move in moves}
            signs = {"XO"[seat]: 1, "XO"[1 - seat]: -1, "draw": 0}
            games += [(board, signs[end]) for board in boards if (end := winner(board))]
    return games


def winner(board):
    for line in LINES:
        if board[line[0]] != "." and len({board[i] for i in line}) == 1:
            return board[line[0]]
    return None if "." in board else "draw"


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(600)
def test_it_never_loses_against_a_perfect_player(tmp_path):
    train.run(preset("tictactoe-alphazero"), tmp_path / "run", stream=io.StringIO())
    policy = rlstack.load(tmp_path / "run")

    def act(seen):
        policy.reset()
        return policy.act(seen)

    assert {result for _, result in games_against_a_perfect_player(act)} == {0}


def test_games_of_the_first_free_cell_can_be_lost():
    def act(seen):
        return seen["action_mask"].argmax(axis=-1)

    games = games_against_a_perfect_player(act)
    assert ("XXOXO.O..", -1) in games  # it began
    assert ("OO.XXX...", -1) in games
    results = np.array([result for _, result in games])
    assert (results == -1).mean() > 0.5
    assert (results == 1).sum() == 0


@pytest.mark.slow
@pytest.mark.chosen
def test_noise_makes_games_differ():
    seen = jax.tree.map(lambda *x: np.concatenate(x), *[observed("." * 9, 0)] * 64)
    output = acting(Sample, num_simulations=16)(seen)
    assert len(set(np.asarray(output.action)[::2].tolist())) > 3
    assert (np.asarray(output.action)[1::2] == 9).all()


def test_any_rows_of_a_batch_may_move():
    """The search goes over half of the rows at a time; in a batch without moves there is none."""
    act, board = acting(Sample, num_simulations=16), "XX. OO. ..."
    pair = observed(board, 0)
    for moving in (0, 1, 64, 65, 128):
        chosen = np.random.default_rng(moving).permutation(128) >= moving
        rows = jax.tree.map(lambda x, chosen=chosen: x[chosen.astype(int)], pair)
        output = act(rows, 0.1, moving)
        waits, actions = np.asarray(output.action) == 9, np.asarray(output.action)
        np.testing.assert_array_equal(waits, chosen)
        # The network says 0.1 for each stone of X, who moves. The rows that wait have minus that,
        # and the search finds that X wins.
        np.testing.assert_allclose(output.value[chosen], -0.2, atol=1e-6)
        if moving > 1:
            assert np.asarray(output.value)[~chosen].mean() > 0.2
            assert (actions[~chosen] == 2).mean() > 0.5
        np.testing.assert_allclose(output.policy.sum(axis=1), 1, rtol=1e-5)


def test_a_row_does_not_depend_on_which_others_move():
    act, rng = acting(Sample, num_simulations=16), np.random.default_rng(0)
    pair = observed("X.. .O. ...", 0)
    found = []
    for _ in range(2):
        chosen = rng.permutation(128) % 2
        chosen[:10] = 0
        output = act(jax.tree.map(lambda x, chosen=chosen: x[chosen], pair), 0.1)
        found.append(jax.tree.map(lambda x: np.asarray(x)[:10], output))
    assert_close(*found)


FOURS = [
    [(row + i * down, column + i * right) for i in range(4)]
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
    for row in range(6)
    for column in range(7)
    if row + 3 * down < 6 and 0 <= column + 3 * right < 7
]


def wins_at(stones, board, column):
    """Whether one more stone in a column of ``board`` [6, 7, 2] makes a row of four."""
    new = int(board[:, column].sum()), column
    fours = [four for four in FOURS if new in four]
    return any(all(cell == new or stones[cell] for cell in four) for four in fours)


def at_random(rng, seen):
    return rng.choice(np.flatnonzero(seen["action_mask"]))


def one_ply(rng, seen):
    """Wins at once where it can."""
    legal, board = np.flatnonzero(seen["action_mask"]), seen["board"]
    winning = [x for x in legal if x < 7 and wins_at(board[..., 0], board, x)]
    return rng.choice(winning or legal)


def two_ply(rng, seen):
    """Wins at once where it can, and else prevents that the other seat does."""
    legal, board = np.flatnonzero(seen["action_mask"]), seen["board"]
    for seat in (0, 1):
        found = [x for x in legal if x < 7 and wins_at(board[..., seat], board, x)]
        if found:
            return rng.choice(found)
    return rng.choice(legal)


def results_in_connect_four(player, act, games, seed=1):
    """Results of the policy, 1, 0 or -1, of games in which each side begins half of the time."""
    rng, seats, results = np.random.default_rng(seed), np.arange(games) % 2, np.zeros(games)
    played = [ConnectFour() for _ in range(games)]
    seen, live = [game.reset() for game in played], set(range(games))
    while live:
        rows = [seen[i][seats[i]] for i in range(games)]
        moves = np.asarray(act(jax.tree.map(lambda *x: np.stack(x), *rows)))
        for i in sorted(live):
            actions = [moves[i], player(rng, seen[i][1 - seats[i]])]
            step = played[i].step(actions if seats[i] == 0 else actions[::-1])
            seen[i] = step.observations
            if step.last:
                results[i] = step.rewards[seats[i]]
                live.remove(i)
    return results


def test_players_of_connect_four_see_rows_of_four():
    def act(seen):
        rng = np.random.default_rng(0)
        rows = [{name: x[i] for name, x in seen.items()} for i in range(len(seen["turn"]))]
        return [one_ply(rng, row) for row in rows]

    assert results_in_connect_four(at_random, act, 40).mean() > 0.3
    assert results_in_connect_four(two_ply, act, 40).mean() < -0.3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_beats_simple_players_of_connect_four(tmp_path):
    train.run(preset("connect-four-alphazero"), tmp_path / "run", stream=io.StringIO())
    policy = rlstack.load(tmp_path / "run")

    def act(seen):
        policy.reset()
        return policy.act(seen)

    for player, least in ((at_random, 0.95), (one_ply, 0.8), (two_ply, 0.8)):
        assert (results_in_connect_four(player, act, 200) == 1).mean() >= least, player.__name__


@pytest.mark.slow
@pytest.mark.chosen
def test_a_resumed_fused_run_equals_an_uninterrupted_one(tmp_path):
    experiment = preset("tictactoe-alphazero")
    experiment = dataclasses.replace(
        experiment,
        agent=dataclasses.replace(experiment.agent, num_simulations=4),
        network=SMALL,
        checkpoint_replay=True,
    )
    replay = {"batch_size": 16, "min_size": 40, "samples_per_insert": 4.0}
    for name, frames in (("half", 240), ("whole", 480)):
        tiny = running.small(experiment, "fused", frames, env={"num_envs": 8}, replay=replay)
        assert running.run(tiny, tmp_path / name).learner_steps > 5
    train.resume(tmp_path / "half", frames=480, stream=io.StringIO())
    found, wanted = saved(tmp_path / "half"), saved(tmp_path / "whole")
    assert any("acting" in name for name in found)
    assert found == wanted  # with the digests of all arrays
