"""Joint rows: games of several seats as one row each, in every kind of pool."""

import numpy as np
import pytest
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.cpp import library
from rlstack.envs.factory import seat_names
from rlstack.envs.seats.game import GameStep, Seats
from rlstack.envs.seats.joint import joined
from rlstack.envs.seats.pettingzoo import Parallel
from rlstack.types import StepType, TimeStep
from tests.envs.seats.echo import EchoSeats

pytestmark = pytest.mark.timeout(60)
FIRST, MID, LAST = map(int, StepType)
PARALLEL = "tests.envs.seats.parallel_envs:"
PLAYERS = "MarlGrid-2AgentEmpty9x9-v0"


class Waiting:
    """The second seat leaves, and joins again in the step in which the first one leaves."""

    seats = ("a", "b")
    observation_spec = specs.Array((1,), np.float32)
    action_spec = specs.DiscreteArray(2, np.int32)

    def reset(self):
        self._time = 0
        return [np.zeros(1, np.float32)] * 2

    def step(self, actions):
        self._time += 1
        kinds = [[MID, LAST], [LAST, FIRST], [FIRST, MID]][self._time - 1]
        seen = [np.zeros(1, np.float32)] * 2
        return GameStep(seen, [0.0] * 2, [1.0] * 2, step_types=kinds)


WaitingSeats = Seats(Waiting)


def test_the_step_of_a_game_by_hand():
    # Four games of three seats: one begins; one goes on without its last seat; one is cut off for
    # its second seat, while its first one is terminated; one is terminated for all that were left.
    kinds = [[FIRST, FIRST, FIRST], [MID, LAST, FIRST], [LAST, LAST, FIRST], [FIRST, LAST, LAST]]
    discounts = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 0, 0]]
    rewards = np.array([[0, 0, 0], [3, 6, 0], [1, 1, 0], [0, 4, -1]], np.float32)
    seen = np.arange(24, dtype=np.float32).reshape(12, 2)
    state = np.repeat([1.0, 2.0, 3.0, 4.0], 3).astype(np.float32)
    state[9] = -1  # of a seat that left long ago
    rows = TimeStep(
        np.array(kinds, np.int32).ravel(),
        rewards.ravel(),
        np.array(discounts, np.float32).ravel(),
        {"observation": seen, "critic_state": state[:, None]},
        {"cost": np.arange(12, dtype=np.float32)},
    )
    step = joined(rows, 3, np.array([True, False, False, False]))
    assert step.step_type.tolist() == [FIRST, MID, LAST, LAST]
    np.testing.assert_allclose(step.reward, [0, 3, 2 / 3, 1])
    assert step.discount.tolist() == [1, 1, 1, 0]
    alive = [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert step.extras["alive"].tolist() == alive
    np.testing.assert_array_equal(step.extras["rewards"], rewards)
    np.testing.assert_array_equal(step.extras["cost"], np.arange(12).reshape(4, 3))
    np.testing.assert_array_equal(step.observation["observation"], seen.reshape(4, 3, 2))
    np.testing.assert_array_equal(step.observation["critic_state"], [[1], [2], [3], [4]])
    assert (step.step_type.dtype, step.reward.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
def test_agents_of_pettingzoo_that_end_are_not_alive(kind):
    options = {"game": PARALLEL + "Dying", "joint": True}
    with SyncEnv("rlstack.envs.seats.pettingzoo:Parallel", 2, kind, options=options) as pool:
        assert pool.spec.observation.shape == (3, 1)
        assert pool.spec.action.shape == (3,)
        assert pool.spec.action.start.tolist() == [1] * 3
        for _ in range(2):
            first = pool.reset()
            assert first.step_type.tolist() == [FIRST] * 2
            assert first.extras["alive"].tolist() == [[1] * 3] * 2
            # Actions are 1, 2, 3 there, and a seat is rewarded with its action.
            steps = [pool.step(np.array([[0, 1, 2], [3, 2, 1]])) for _ in range(4)]
            kinds = [step.step_type.tolist() for step in steps]
            assert kinds == [[MID] * 2, [MID] * 2, [LAST] * 2, [FIRST] * 2]
            np.testing.assert_allclose([step.reward[0] for step in steps], [2, 5 / 3, 1, 0])
            alive = [step.extras["alive"][0].tolist() for step in steps]
            assert alive == [[0, 1, 1], [0, 0, 1], [0, 0, 1], [1, 1, 1]]
            assert [step.discount[1] for step in steps] == [1] * 4  # the end is a time limit
            metrics = pool.episode_metrics(np.array([1]))
            assert sorted(metrics["return_of_a"]) == [4]  # one step of reward 4
        assert pool.step(np.zeros((2, 3), int)).observation.shape == (2, 3, 1)


def test_a_seat_that_joins_is_alive_after_its_first_action():
    options = {"game": PARALLEL + "Joining", "joint": True}
    with SyncEnv(Parallel, 1, "for_loop", options=options) as pool:
        pool.reset()
        steps = [pool.step(np.array([[0, 1, 2]])) for _ in range(3)]
        assert [step.extras["alive"][0].tolist() for step in steps] == [[1, 1, 0]] * 2 + [[1] * 3]
        np.testing.assert_allclose([float(step.reward[0]) for step in steps], [1, 1, 2])


def test_the_state_of_a_game_is_there_once():
    options = {"game": PARALLEL + "Surveyed", "critic_state": "game", "joint": True}
    with SyncEnv(Parallel, 2, "for_loop", options=options) as pool:
        assert pool.spec.observation["critic_state"].shape == (1,)
        pool.reset()
        for time in (1, 2, 3):
            seen = pool.step(np.zeros((2, 3), np.int64)).observation
            np.testing.assert_array_equal(seen["critic_state"], [[time]] * 2)


def test_games_have_the_seeds_and_infos_of_their_seats():
    with SyncEnv(EchoSeats, 2, "for_loop", seed=4, options={"joint": True}, step_info=True) as pool:
        np.testing.assert_array_equal(pool.reset().observation[:, :, 2], [[4, 4], [6, 6]])
        step = pool.step(np.array([[1, 2], [3, 4]]))
        np.testing.assert_array_equal(step.reward, [6.5, 8.5])
        assert pool.step_infos(np.array([1])) == [{"of_seat": 0.5}]
        assert pool.stats() == {"restarts": 0} or pool.stats() == {}


@pytest.mark.skipif(PLAYERS not in library.names(), reason="needs games of EnvPool 1.2")
@pytest.mark.parametrize("name", [PLAYERS, "TicTacToe-v1"])
def test_games_of_envpool_are_the_rows_of_their_players_side_by_side(name):
    options = {"observation_format": "matrix"} if name == PLAYERS else {}
    rng, alike = np.random.default_rng(2), {"seed": 7}
    joint = SyncEnv(name, 3, **alike, options={**options, "joint": True})
    rows = SyncEnv(name, 6, seed=7, options=options)
    with joint, rows:
        one, seats = joint.reset(), rows.reset()
        for _ in range(30):
            actions = rng.integers(0, 3, 6).astype(np.int32)
            if isinstance(seats.observation, dict):  # legal ones
                masks = seats.observation["action_mask"]
                assert one.observation["action_mask"].shape == (3, 2, masks.shape[-1])
                np.testing.assert_array_equal(one.observation["action_mask"].reshape(6, -1), masks)
                actions = masks.argmax(axis=1).astype(np.int32)
            one, seats = joint.step(actions.reshape(3, 2)), rows.step(actions)
            np.testing.assert_allclose(one.reward, seats.reward.reshape(3, 2).mean(1))
            ends = (seats.step_type.reshape(3, 2) == LAST).any(1)
            assert (ends >= (one.step_type == LAST)).all()


def test_what_cannot_be_joined_is_told():
    with pytest.raises(ValueError, match="joint needs a game of several seats; it has one"):
        SyncEnv("CartPole-v1", 2, "for_loop", options={"joint": True})
    with pytest.raises(EnvError, match="with joint all games step together"):
        AsyncEnv(EchoSeats, 4, 2, "thread", options={"joint": True})
    entities = {"game": "tests.entity.inverted.games:Bidding", "agents": 2, "joint": True}
    with pytest.raises(ValueError, match=r"joint .*one choice or one vector.* rows"):
        SyncEnv("rlstack.entity.inverted:PythonGame", 2, "for_loop", options=entities)
    with (
        SyncEnv(WaitingSeats, 2, "for_loop", options={"joint": True}) as pool,
        pytest.raises(EnvError, match="must be over when all its seats have left; game 0 goes on"),
    ):
        pool.reset()
        for _ in range(3):
            pool.step(np.zeros((2, 2), np.int64))


def test_names_of_seats():
    assert seat_names(EchoSeats, "auto", {}) == ("left", "right")
    assert seat_names("CartPole-v1", "auto", {}) == ("0",)
    assert seat_names("rlstack.entity.inverted:PythonGame", "auto", {"agents": 2}) == ("0", "1")
