"""Games whose seats act in turn: steps, rewards and returns worked by hand."""

import importlib.util

import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.seats.pettingzoo import AEC, AECGame
from rlstack.envs.seats.turns import Ending, Turn, Turns, playable
from rlstack.math import returns
from rlstack.types import StepType
from tests.envs.seats.turn_envs import Bidding

pytestmark = pytest.mark.timeout(60)
BIDDING = "tests.envs.seats.turn_envs:Bidding"
FIRST, MID, LAST = map(int, StepType)


def play(pool, bids, batches):
    """Sends the bids in the order of turns; returns (type, reward, discount) of each row."""
    bids = iter(bids)
    found = {row: [] for row in range(pool.num_envs)}
    pool.async_reset()
    for _ in range(batches):
        ids, step = pool.recv()
        actions = np.zeros(len(ids), np.int64)
        for i, row in enumerate(ids.tolist()):
            kind = int(step.step_type[i])
            found[row].append((kind, float(step.reward[i]), float(step.discount[i])))
            seen = step.observation["observation"][i]
            assert seen[0] == row and step.observation["action_mask"][i].any()
            actions[i] = 0 if kind == LAST else next(bids)
        pool.send(ids, actions)
    return found


def pool_of(agents, **options):
    options = {"game": BIDDING, "agents": agents, **options}
    return AsyncEnv(AEC, agents, 1, "thread", options=options, num_workers=agents)


def of_episode(steps, discount=1.0):
    """The returns of a row's decisions, with the functions that learners use."""
    kinds, rewards, discounts = (np.array(column)[:, None] for column in zip(*steps, strict=True))
    return returns.discounted_returns(
        rewards[1:], discount * discounts[1:], np.zeros((len(steps), 1)), kinds[1:] != FIRST
    )[:, 0]


def test_a_seat_that_waits_makes_no_transition_and_its_rewards_are_summed():
    with pool_of(2) as pool:
        # a bids 1, b bids 2, a bids 3, b bids 4; then a new game, in which a bids 5.
        found = play(pool, [1, 2, 3, 4, 5, 6], batches=8)
        metrics = pool.episode_metrics(np.arange(2))
    # From its first turn to its second, a gets 1 and loses 2; then it gets 3 and loses 4.
    assert found[0] == [(FIRST, 0, 1), (MID, -1, 1), (LAST, -1, 0), (FIRST, 0, 1)]
    # From its first turn to its second, b gets 2 and loses 3; then it gets 4.
    assert found[1] == [(FIRST, 0, 1), (MID, -1, 1), (LAST, 4, 0), (FIRST, 0, 1)]
    np.testing.assert_allclose(of_episode(found[0][:3]), [-2, -1])
    np.testing.assert_allclose(of_episode(found[1][:3], discount=0.5), [-1 + 0.5 * 4, 4])
    np.testing.assert_array_equal(metrics["return_of_a"], [-2])
    np.testing.assert_array_equal(metrics["return_of_b"], [2])  # also before its turn
    np.testing.assert_array_equal(metrics["team_return"], [0, 0])
    np.testing.assert_array_equal(metrics["bids"], [4, 4])


def test_a_seat_that_is_terminated_has_no_future_and_waits_for_the_next_game():
    with pool_of(3, bids=5, leaves=True) as pool:
        # Bids of a 1, b 2, c 3, a 4; c is gone; b 5, and the game is over.
        found = play(pool, [1, 2, 3, 4, 5, 6, 7], batches=10)
    assert found[2][:2] == [(FIRST, 0, 1), (LAST, 3 - 4 + 100, 0)]
    assert found[0][:3] == [(FIRST, 0, 1), (MID, 1 - 2 - 3, 1), (LAST, 4 - 5, 0)]
    assert found[1][:3] == [(FIRST, 0, 1), (MID, 2 - 3 - 4, 1), (LAST, 5, 0)]
    assert [step[0] for row in range(3) for step in found[row][3:]] == [FIRST, FIRST]


def test_truncated_games_are_bootstrapped_and_seats_without_a_turn_wait():
    with pool_of(3, bids=2, limit=True) as pool:
        found = play(pool, [1, 2, 3, 4], batches=6)
    assert found[0][:2] == [(FIRST, 0, 1), (LAST, 1 - 2, 1)]
    assert found[1][:2] == [(FIRST, 0, 1), (LAST, 2, 1)]
    assert found[2] == []  # two games without a turn of its own
    assert found[0][2][0] == FIRST


def test_a_synchronous_pool_repeats_what_waiting_seats_see():
    options = {"game": BIDDING, "agents": 2}
    with SyncEnv(AEC, 4, "for_loop", options=options, seed=3) as pool:
        assert pool.reset().step_type.tolist() == [FIRST] * 4
        for _ in range(2):
            steps = [pool.step(np.array([bid] * 4)) for bid in (1, 2, 3, 4)]
            kinds = [step.step_type.tolist() for step in steps]
            assert kinds == [[MID] * 4] * 3 + [[LAST] * 4]
            rewards = [step.reward[:2].tolist() for step in steps]
            # Seat b is at its first turn after the bid of 1, which it loses.
            assert rewards == [[0, -1], [-1, 0], [0, -1], [-1, 4]]
            masks = [step.observation["action_mask"][:2].sum(axis=1).tolist() for step in steps]
            assert masks == [[1, 10], [10, 1], [1, 10], [1, 1]]
            np.testing.assert_array_equal(steps[-1].discount, 0.0)
            found = pool.episode_metrics(np.arange(2))
            np.testing.assert_array_equal(found["return_of_b"], [2])
            assert pool.step(np.zeros(4, np.int64)).step_type.tolist() == [FIRST] * 4
    with (
        SyncEnv(AEC, 3, "for_loop", options=options) as pool,
        pytest.raises(EnvError, match="of 2"),
    ):
        pool.reset()


JOINING = "tests.envs.seats.turn_envs:Joining"


def test_an_agent_that_joins_later_has_a_row_of_a_synchronous_pool_from_the_start():
    with SyncEnv(AEC, 3, "for_loop", options={"game": JOINING}) as pool:
        for _ in range(2):
            seen = [pool.reset()]
            # a bids 1, b bids 2, c joins and bids 3, a bids 4, b bids 5.
            seen += [pool.step(np.full(3, bid)) for bid in (1, 2, 3, 4, 5)]
            kinds = [step.step_type.tolist() for step in seen]
            assert [kind[:2] for kind in kinds] == [[FIRST] * 2] + [[MID] * 2] * 4 + [[LAST] * 2]
            # c makes no transition up to the step in which it joins.
            assert [kind[2] for kind in kinds] == [FIRST, FIRST, FIRST, MID, MID, LAST]
            # c neither gains nor loses before it joins. Its only turn brings its bid, less 4 and 5.
            assert [float(step.reward[2]) for step in seen] == [0, 0, 0, 0, 0, 3 - 4 - 5]
            assert [float(step.discount[2]) for step in seen] == [1, 1, 1, 1, 1, 0]
            assert [float(step.discount[0]) for step in seen] == [1, 1, 1, 1, 1, 0]
            own = [step.observation["observation"][2].tolist() for step in seen]
            assert own == [[0, 0], [0, 0], [2, 2], [2, 3], [2, 4], [2, 5]]
            masks = [step.observation["action_mask"][2].sum() for step in seen]
            assert masks == [1, 1, 10, 1, 1, 1]
            metrics = pool.episode_metrics(np.arange(3))
            np.testing.assert_array_equal(metrics["return_of_c"], [3 - 4 - 5])


def test_a_game_that_ends_before_an_agent_joins():
    options = {"game": JOINING, "bids": 1, "critic_state": "joined"}
    with SyncEnv(AEC, 3, "for_loop", options=options) as pool:
        pool.reset()
        step = pool.step(np.full(3, 7))
        assert step.step_type.tolist() == [LAST, LAST, FIRST]
        assert step.reward.tolist() == [7, -7, 0] and step.discount.tolist() == [0, 0, 1]
        joined = step.observation["critic_state"]["2"]["observation"]
        np.testing.assert_array_equal(joined, np.zeros((3, 2)))


class Returning:
    """Seat 0 leaves with its first action and a reward of 1, and is back after the next one."""

    seats = ("a", "b")
    observation_spec = specs.Array((1,), np.float32)
    action_spec = specs.DiscreteArray(2)

    def _seen(self):
        return np.full(1, self._time, np.float32)

    def reset(self):
        self._time, self._playing = 0, {0, 1}
        return Turn(0)

    def plays(self, seat):
        return seat in self._playing

    def observe(self, seat):
        assert self.plays(seat)
        return self._seen()

    def step(self, action):
        self._time += 1
        self._playing = {1: {1}, 4: set()}.get(self._time, {0, 1})
        ends = {0: Ending(self._seen(), 10.0, 1.0), 1: Ending(self._seen(), 20.0)}
        return [
            Turn(1, 0.0, {0: Ending(self._seen(), 1.0)}),
            Turn(0, 0.0),
            Turn(1, 5.0),
            Turn(None, 0.0, ends),
        ][self._time - 1]


@pytest.mark.parametrize("critic_state", ["none", "joined"])
def test_a_seat_that_comes_back_goes_on_in_a_synchronous_pool(critic_state):
    with SyncEnv(Turns(Returning), 2, options={"critic_state": critic_state}) as pool:
        seen = [pool.reset(), *(pool.step(np.zeros(2, np.int64)) for _ in range(4))]
    assert [step.reward.tolist() for step in seen[1:]] == [[1, 0], [0, 0], [0, 5], [10, 20]]
    assert [step.discount.tolist() for step in seen[1:]] == [[0, 1], [1, 1], [1, 1], [1, 0]]
    kinds = [[LAST, MID], [FIRST, MID], [MID, MID], [LAST, LAST]]
    assert [step.step_type.tolist() for step in seen[1:]] == kinds
    if critic_state == "joined":
        shown = [step.observation["critic_state"]["0"][1, 0] for step in seen]
        own = [step.observation["observation"][0, 0] for step in seen]
        assert shown == own == [0, 1, 2, 3, 4]


def test_an_agent_that_joins_later_takes_its_turns_in_an_asynchronous_pool():
    with AsyncEnv(AEC, 3, 1, "thread", options={"game": JOINING}, num_workers=3) as pool:
        found = play(pool, [1, 2, 3, 4, 5, 6, 7], batches=10)
    assert found[2][:2] == [(FIRST, 0, 1), (LAST, 3 - 4 - 5, 0)]
    assert found[0][:3] == [(FIRST, 0, 1), (MID, 1 - 2 - 3, 1), (LAST, 4 - 5, 0)]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_several_games_run_beside_each_other_and_close(kind):
    options = {"game": BIDDING, "agents": 2, "bids": 6}
    workers = {"thread": 4, "process": 1}[kind]
    with AsyncEnv(AEC, 4, 2, kind, options=options, num_workers=workers) as pool:
        pool.async_reset()
        ended = np.zeros(4, int)
        for _ in range(60):
            ids, step = pool.recv()
            ended[ids[np.asarray(step.step_type) == LAST]] += 1
            pool.send(ids, np.ones(2, np.int64))
        assert (ended >= 6).all()


class Surveyed(Bidding):
    """Has a state: the number of bids."""

    state_space = spaces.Box(0.0, 99.0, (1,), np.float32)

    def state(self):
        return np.full(1, self._made, np.float32)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_seats_see_their_number_and_the_critic_the_observations_of_all(kind):
    options = {"game": BIDDING, "agents": 3, "bids": 5, "leaves": True}
    options |= {"seat_index": True, "critic_state": "joined"}
    steps = []  # (row, bids so far, what the critic sees)
    if kind == "async":
        pool = AsyncEnv(AEC, 3, 1, "thread", options=options, num_workers=3)
    else:
        pool = SyncEnv(AEC, 3, "for_loop", options=options)
    with pool:
        assert sorted(pool.spec.observation) == [
            "action_mask", "critic_state", "observation", "seat",
        ]  # fmt: skip
        if kind == "async":
            pool.async_reset()
            for _ in range(8):
                ids, step = pool.recv()
                steps.append((ids, step.observation))
                pool.send(ids, np.ones(1, np.int64))
        else:
            steps.append((range(3), pool.reset().observation))
            steps += [(range(3), pool.step(np.ones(3, np.int64)).observation) for _ in range(5)]
    made = {row: [] for row in range(3)}
    for ids, seen in steps:
        for i, row in enumerate(ids):
            assert seen["seat"][i] == row
            bids = int(seen["observation"][i][1])
            made[row].append(bids)
            joined = [seen["critic_state"][str(seat)]["observation"][i] for seat in range(3)]
            # Seat c is gone after the fourth bid, and sees nothing of the fifth.
            np.testing.assert_array_equal(joined, [[0, bids], [1, bids], [2, min(bids, 4)]])
            assert sorted(seen["critic_state"]["0"]) == ["observation"]  # no mask
    turns = {0: [0, 3, 5], 1: [1, 4, 5], 2: [2, 4]}
    steps_of = {0: [*range(6)], 1: [*range(6)], 2: [0, 1, 2, 3, 4, 4]}
    assert made == (turns if kind == "async" else steps_of)


def test_the_state_of_a_game_of_turns():
    game = f"{__name__}:Surveyed"
    with SyncEnv(AEC, 2, options={"game": game, "critic_state": "game"}) as pool:
        seen = [pool.reset(), *(pool.step(np.ones(2, np.int64)) for _ in range(4))]
        for bids, step in enumerate(seen):
            np.testing.assert_array_equal(step.observation["critic_state"], [[bids]] * 2)
    with pytest.raises(ValueError, match=r"needs a game with state\(\)"):
        AEC.make(game=BIDDING, critic_state="game")


def test_only_the_first_reset_has_the_seed_and_what_does_not_fit_is_named():
    game = AECGame(BIDDING, seed=7)
    game.reset()
    game.reset()
    assert game._env.seeds == [7, None]
    with pytest.raises(ValueError, match="must be a module with a function env"):
        AECGame("json")
    blank = {"action_mask": np.zeros(3, np.int8)}
    np.testing.assert_array_equal(playable(blank)["action_mask"], [1, 0, 0])
    assert playable(np.ones(2)) is not None and not blank["action_mask"].any()


@pytest.mark.skipif(importlib.util.find_spec("pettingzoo") is None, reason="needs PettingZoo")
def test_an_environment_of_pettingzoo():
    pytest.importorskip("mpe2")
    options = {"game": "mpe2.simple_spread_v3", "N": 2, "max_cycles": 3}
    with AsyncEnv(AEC, 2, 1, "thread", options=options, seed=1, num_workers=2) as pool:
        pool.async_reset()
        kinds = {0: [], 1: []}
        for _ in range(10):
            ids, step = pool.recv()
            kinds[int(ids[0])].append(int(step.step_type[0]))
            pool.send(ids, np.zeros(1, np.int64))
        assert kinds[0][:4] == kinds[1][:4] == [FIRST, MID, MID, LAST]


class Leaving:
    """Seats act in turn, the second one leaves after three actions, and the first plays on."""

    seats = ("one", "two")
    observation_spec = specs.Array((2,), np.float32)
    action_spec = specs.DiscreteArray(2)

    @property
    def extras_spec(self):
        return {"moves": specs.Array((), np.float32), "seat": specs.DiscreteArray(2)}

    def reset(self):
        self.moves = 0
        return Turn(0)

    def observe(self, seat):
        return np.array([self.moves, seat], np.float32)

    def extras(self, seat):
        return {"moves": np.float32(self.moves), "seat": seat}

    def step(self, action):
        self.moves += 1
        ended = {1: Ending(self.observe(1), -1.0)} if self.moves == 3 else {}
        if self.moves == 6:
            return Turn(None, ended={0: Ending(self.observe(0), 1.0)})
        return Turn(self.moves % 2 if self.moves < 3 else 0, 0.5, ended)


def test_extras_are_those_of_the_step_although_others_have_moved_on():
    kinds = set()
    with AsyncEnv(Turns(Leaving), 2, 1, "thread", num_workers=2) as pool:
        assert pool.spec.extras["seat"].num_values == 2
        pool.async_reset()
        ended = []
        for _ in range(60):
            ids, step = pool.recv()
            np.testing.assert_array_equal(step.extras["moves"], step.observation[:, 0])
            np.testing.assert_array_equal(step.extras["seat"], ids)
            kinds.add((int(ids[0]), int(step.step_type[0])))
            if not step.last()[0]:
                pool.send(ids, np.zeros(1, np.int64))
                continue
            assert step.extras["moves"][0] == (6, 3)[ids[0]]
            ended.append(
                ids
            )  # answered only when the game is over for both, whichever thread came first
            if len(ended) == 2:
                for late in ended:
                    pool.send(late, np.zeros(1, np.int64))
                ended = []
    assert kinds == {(0, FIRST), (0, MID), (0, LAST), (1, FIRST), (1, LAST)}


def test_rows_of_synchronous_pools_have_the_extras_of_now():
    with SyncEnv(Turns(Leaving), 2, "for_loop") as pool:
        step = pool.reset()
        moves = [step.extras["moves"].tolist()]
        for _ in range(6):
            step = pool.step(np.zeros(2, np.int64))
            moves.append(step.extras["moves"].tolist())
            np.testing.assert_array_equal(step.extras["seat"], [0, 1])
    assert moves == [[time] * 2 for time in range(7)]
