"""More entries in the observations of seats: their number, and the state for the critic."""

import inspect
from typing import ClassVar

import numpy as np
import pytest
from dm_env import specs

from rlstack.envs import SyncEnv
from rlstack.envs.seats.game import Seats
from rlstack.envs.seats.showing import showing
from tests.envs.seats.echo import Echo, EchoSeats, UnequalSeats

pytestmark = pytest.mark.timeout(60)


class Stateful(Echo):
    """Shows dicts with a mask, and its time as the state."""

    observation_spec: ClassVar = {
        "place": Echo.observation_spec,
        "action_mask": specs.Array((10,), np.int8),
    }
    state_spec = specs.Array((1,), np.float32)

    def state(self):
        return np.array([self._time], np.float32)

    def _observe(self):
        return [{"place": x, "action_mask": np.ones(10, np.int8)} for x in super()._observe()]


@pytest.mark.parametrize("kind", ["for_loop", "process"])
def test_seats_see_their_number_and_the_critic_the_observations_of_all(kind):
    options = {"seat_index": True, "critic_state": "joined"}
    more = {"num_workers": 2} if kind == "process" else {}
    name = "tests.envs.seats.echo:EchoSeats"
    with SyncEnv(name, 4, kind, options=options, seed=5, **more) as pool:
        seen = pool.reset().observation
        assert sorted(seen) == ["critic_state", "observation", "seat"]
        np.testing.assert_array_equal(seen["seat"], [0, 1, 0, 1])
        assert pool.spec.observation["seat"].num_values == 2
        seen = pool.step(np.zeros(4, np.int64)).observation
        for row in range(4):
            first = row - row % 2  # of the seats of this game
            for seat in range(2):
                joined = seen["critic_state"][str(seat)][row]
                np.testing.assert_array_equal(joined, seen["observation"][first + seat])


def test_the_state_of_the_game_and_dicts_without_their_mask():
    builder = Seats(Stateful)
    with SyncEnv(builder, 2, "for_loop", options={"critic_state": "game"}) as pool:
        pool.reset()
        seen = pool.step(np.zeros(2, np.int64)).observation
        assert sorted(seen) == ["action_mask", "critic_state", "place"]
        np.testing.assert_array_equal(seen["critic_state"], [[1], [1]])
    with SyncEnv(builder, 2, "for_loop", options={"critic_state": "joined"}) as pool:
        seen = pool.reset().observation["critic_state"]
        assert [sorted(seen[seat]) for seat in ("0", "1")] == [["place"], ["place"]]
        assert [seen["1"]["place"][row][0] for row in range(2)] == [1, 1]


def test_without_these_options_a_game_is_itself():
    game = Echo()
    assert showing(game, "Echo") is game
    parameters = inspect.signature(EchoSeats).parameters
    assert [parameters[name].default for name in ("seat_index", "critic_state")] == [False, "none"]


def test_states_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"needs a game with state\(\).*critic_state=joined"):
        showing(Echo(), "Echo", critic_state="game")
    with pytest.raises(ValueError, match="must be one of none, joined, game; got 'all'"):
        showing(Echo(), "Echo", critic_state="all")
    game = Echo()
    game.observation_spec = {"seat": Echo.observation_spec}
    with pytest.raises(ValueError, match="already have an entry seat"):
        showing(game, "Echo", seat_index=True)


def test_returns_of_the_team_and_of_each_seat_are_logged_apart():
    with SyncEnv(UnequalSeats, 4, "for_loop", options={"length": 2}) as pool:
        for _ in range(2):  # the second episode counts from 0
            pool.reset()
            pool.step(np.array([1, 2, 3, 4]))
            pool.step(np.array([0, 0, 5, 0]))
            found = pool.episode_metrics(np.arange(4))
            # The right seats leave in the first step, so only the left ones see the game's end.
            np.testing.assert_array_equal(found["team_return"], [13, 22])
            np.testing.assert_array_equal(found["return_of_left"], [1, 8])
            np.testing.assert_array_equal(found["return_of_right"], [12, 14])
