"""EnvPool's games of several players as rows of a pool, against EnvPool itself."""

import numpy as np
import pytest

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.cpp import library
from rlstack.types import StepType

TOGETHER, IN_TURN = "MarlGrid-2AgentEmpty9x9-v0", "TicTacToe-v1"
FIRST, MID, LAST = map(int, StepType)
MATRIX = {"observation_format": "matrix"}

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(IN_TURN not in library.names(), reason="needs games of EnvPool 1.2"),
]
with_marlgrid = pytest.mark.skipif(TOGETHER not in library.names(), reason="needs EnvPool 1.2.7")


def of_several_players():
    """The names of EnvPool's games of several players; that of the others is in no spec."""
    from envpool.registration import registry

    return [
        name for name, (_, _, kwargs) in registry.specs.items()
        if kwargs.get("max_num_players", 1) > 1
    ]  # fmt: skip


@with_marlgrid
def test_players_who_act_together_are_rows():
    """Two games, whose steps are those of EnvPool with the same seed and actions."""
    oracle = library.load().make(
        TOGETHER, "gymnasium", num_envs=2, seed=7, num_threads=1, max_episode_steps=60, **MATRIX
    )
    seen, _ = oracle.reset()
    rng, kinds, ended = np.random.default_rng(1), [], np.zeros(4, bool)
    begins, left = np.zeros(4, bool), np.zeros(4, bool)  # of a game; a player that is not in it
    options = {**MATRIX, "max_episode_steps": 60}
    with SyncEnv(TOGETHER, 4, seed=7, options=options) as pool:
        step = pool.reset()
        assert step.observation.shape[:3] == (4, 7, 7)
        np.testing.assert_array_equal(step.observation, seen)
        np.testing.assert_array_equal(step.step_type, FIRST)
        returns = np.zeros(4)
        for _ in range(200):
            actions = rng.choice([0, 1, 2, 2, 2], 4).astype(np.int32)
            step = pool.step(actions)
            seen, reward, terminated, truncated, info = oracle.step(
                {"players.action": actions, "players.env_id": np.repeat([0, 1], 2).astype(np.int32)}
            )
            np.testing.assert_array_equal(step.observation, seen)
            left &= ~begins
            np.testing.assert_array_equal(step.reward, np.where(begins | left, 0.0, reward))
            over = np.repeat(terminated | truncated, 2)
            done = info["players"]["done"]
            leaves = (done | over) & ~left & ~begins
            expected = np.where(begins | left, FIRST, np.where(leaves, LAST, MID))
            np.testing.assert_array_equal(step.step_type, expected)
            gone = leaves & (done | np.repeat(terminated, 2))
            np.testing.assert_array_equal(step.discount, np.where(gone, 0.0, 1.0))
            returns = np.where(begins, 0.0, returns + step.reward)
            for game in np.flatnonzero(over[::2]):
                rows = np.array([2 * game, 2 * game + 1])
                logged = pool.episode_metrics(rows)
                np.testing.assert_allclose(logged["team_return"], returns[rows].sum())
                np.testing.assert_allclose(logged["return_of_player_1"], returns[rows[1:]])
            ended |= (step.discount == 0) & ~over
            begins, left = over, left | leaves
            kinds.append(step.step_type)
    kinds = np.array(kinds)
    assert (kinds == LAST).any(axis=0).all()
    assert ended.any()  # a player that reached its goal waited for the other one
    assert (np.bincount(kinds.ravel()) > 0).all()


def play(pool, step, moves):
    """Plays these moves in game 0, for whose turn it is. The player that waits sends action 0."""
    steps = []
    for move in moves:
        waits = step.observation["action_mask"][:2].sum(axis=1) == 1
        turn = int(np.flatnonzero(~waits)[0])
        actions = np.full(4, 8, np.int32)
        actions[turn], actions[1 - turn] = move, 0  # of the one that waits: ignored
        actions[2:] = step.observation["action_mask"][2:].argmax(axis=1)
        step = pool.step(actions)
        steps.append((turn, step))
    return steps


def test_players_who_act_in_turn_wait_with_one_legal_action():
    with SyncEnv(IN_TURN, 4, seed=3) as pool:
        step = pool.reset()
        assert step.observation["observation"].shape == (4, 3, 3, 2)
        mask = step.observation["action_mask"][:2]
        beginner = int(mask.sum(axis=1).argmax())
        np.testing.assert_array_equal(mask[beginner], 1)
        np.testing.assert_array_equal(mask[1 - beginner], [1] + [0] * 8)
        steps = play(pool, step, [4, 0, 2, 1, 6])  # 2, 4 and 6 are a diagonal
        assert [turn == beginner for turn, _ in steps] == [True, False, True, False, True]
        for _, step in steps[:-1]:
            assert step.step_type[0] == MID and step.reward[0] == step.reward[1] == 0
        after = steps[1][1]
        np.testing.assert_array_equal(
            after.observation["action_mask"][beginner], [0, 1, 1, 1, 0, 1, 1, 1, 1]
        )
        board = after.observation["observation"][:2]
        np.testing.assert_array_equal(np.argwhere(board[beginner, ..., 0]), [[1, 1]])
        np.testing.assert_array_equal(np.argwhere(board[1 - beginner, ..., 0]), [[0, 0]])
        last = steps[-1][1]
        np.testing.assert_array_equal(last.step_type[:2], LAST)
        np.testing.assert_array_equal(last.discount[:2], 0.0)
        np.testing.assert_array_equal(last.reward[[beginner, 1 - beginner]], [1.0, -1.0])
        assert pool.episode_metrics(np.array([beginner]))[f"return_of_player_{beginner}"] == [1.0]
        again = pool.step(np.zeros(4, np.int32))
        np.testing.assert_array_equal(again.step_type[:2], FIRST)
        np.testing.assert_array_equal(again.reward[:2], 0.0)
        np.testing.assert_array_equal(again.discount[:2], 1.0)


@with_marlgrid
def test_every_game_of_several_players_can_be_played_by_its_masks():
    names = of_several_players()
    assert {TOGETHER, IN_TURN} < set(names)
    rng, over = np.random.default_rng(2), set()
    for name in names:
        number = len(library.seats(name, {}))
        with SyncEnv(name, 2 * number, seed=1, num_workers=1) as pool:
            step, spec = pool.reset(), pool.spec
            for _ in range(30):
                if isinstance(step.observation, dict):
                    mask = step.observation["action_mask"]
                    assert mask.shape == (2 * number, spec.action.num_values)
                    playing = step.step_type == MID
                    waits = (mask.sum(axis=1) == 1) & (mask[:, 0] == 1)
                    assert (waits.reshape(2, number).sum(axis=1) >= number - 1)[
                        playing[::number]
                    ].all()
                    actions = np.array([rng.choice(np.flatnonzero(m)) for m in mask])
                else:
                    actions = rng.integers(0, spec.action.num_values, 2 * number)
                step = pool.step(actions)
                assert np.isfinite(step.reward).all()
                if (step.step_type == LAST).any():
                    over.add(name)
    assert {IN_TURN, "KuhnPoker-v1", "IntersectionMultiAgent-v0"} <= over


def test_seats_see_their_number_and_the_critic_all_observations():
    options = {"seat_index": True, "critic_state": "joined"}
    with SyncEnv(IN_TURN, 4, options=options) as pool:
        seen = pool.reset().observation
        np.testing.assert_array_equal(seen["seat"], [0, 1, 0, 1])
        seen = pool.step(seen["action_mask"].argmax(axis=1)).observation
        for row in range(4):
            for seat in range(2):
                joined = seen["critic_state"][str(seat)][row]
                np.testing.assert_array_equal(joined, seen["observation"][row - row % 2 + seat])


@with_marlgrid
def test_pools_that_cannot_be_are_refused():
    with SyncEnv(IN_TURN, 3) as pool, pytest.raises(EnvError, match="multiple of 2"):
        pool.reset()
    with pytest.raises(EnvError, match="all seats of a game step together"):
        AsyncEnv(IN_TURN, 4, 2)
    with pytest.raises(ValueError, match="critic_state must be none or joined"):
        SyncEnv(IN_TURN, 2, options={"critic_state": "game"})
    with pytest.raises(ValueError, match="number of agents in its name, 2; got n_agents=3"):
        SyncEnv(TOGETHER, 2, options={"n_agents": 3})
    with pytest.raises(ValueError, match="CppBackend: EnvPool must have"):
        SyncEnv(IN_TURN, 2, options={"colour": 3})
    assert library.seats("CartPole-v1", {}) == ("0",)
    assert library.seats(TOGETHER, {"seat_index": True}) == ("player_0", "player_1")


@with_marlgrid
def test_entries_of_info_are_extras_of_a_seat_or_of_all():
    oracle = library.load().make(TOGETHER, "gymnasium", num_envs=2, seed=7, num_threads=1, **MATRIX)
    oracle.reset()
    rng = np.random.default_rng(1)
    options = {**MATRIX, "extras": ["pos", "done", "dir"]}
    with SyncEnv(TOGETHER, 4, seed=7, options=options) as pool:
        assert pool.spec.extras["pos"].shape == (2,)
        assert pool.reset().extras["pos"].shape == (4, 2)
        for _ in range(20):
            actions = rng.choice([0, 1, 2], 4).astype(np.int32)
            step = pool.step(actions)
            *_, info = oracle.step(
                {"players.action": actions, "players.env_id": np.repeat([0, 1], 2).astype(np.int32)}
            )
            for name in ("pos", "done", "dir"):
                np.testing.assert_array_equal(step.extras[name], info["players"][name])
    with SyncEnv("LeducHoldem-v1", 4, options={"extras": ["chips", "round"]}) as pool:
        step = pool.reset()
        np.testing.assert_array_equal(step.extras["chips"], np.ones((4, 2)))
        assert step.extras["round"].tolist() == [0] * 4
    with pytest.raises(ValueError, match=r"TicTacToe-v1: .*extras must name .*board.*; got score"):
        SyncEnv(IN_TURN, 2, options={"extras": "score"})
