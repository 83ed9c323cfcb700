"""The numbers of the games of several seats."""

import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.rules import BASE_STOCK, order_up_to_base_stock
from rlstack.envs import SyncEnv
from rlstack.envs.seats.game import GameStep
from rlstack.envs.seats.games import Matches
from rlstack.envs.seats.games import SupplyChain as Chain
from rlstack.envs.seats.rock_paper_scissors import (
    RockPaperScissors,
    equilibrium,
    exploitability,
    payoffs,
)
from rlstack.envs.seats.supply_chain import SupplyChain


def test_a_week_of_a_supply_chain_as_worked_by_hand():
    chain = SupplyChain(delay=1, seed=0)
    customers = int(np.random.default_rng(0).integers(9))
    first = np.stack(chain.reset()) * 10
    np.testing.assert_allclose(first[:, :4], [[12, 0, 0, 4]] * 3)
    np.testing.assert_allclose(first[:, 4:], 10 * np.eye(3))
    step = chain.step([8, 4, 0])  # orders of 8, 4 and 0
    seen = np.stack(step.observations) * 10
    stock = np.array([12 - customers, 12 - 8, 12 - 4])
    np.testing.assert_allclose(seen[:, 0], stock)
    np.testing.assert_allclose(seen[:, 1], 0)
    np.testing.assert_allclose(seen[:, 2], [8, 4, 0])
    np.testing.assert_allclose(seen[:, 3], [customers, 8, 4])
    np.testing.assert_allclose(step.rewards, -stock / 10)
    second = np.stack(chain.step([0, 0, 8]).observations) * 10
    # The retailer's 8 units and the distributor's 4 arrive; the factory ordered none.
    assert second[1, 0] == max(stock[1] + 4 - max(customers - 4, 0), 0)
    assert second[1, 2] == 8 - 4


def test_people_see_a_line_for_each_facility():
    chain = SupplyChain(delay=1, seed=0)
    chain.reset()
    chain.step([8, 4, 0])
    week, retailer, *_, factory = str(chain).splitlines()
    assert week == "week 1 of 40" and retailer.startswith("retailer    stock")
    assert "waits for   8" in retailer and factory.endswith("last demand 4")
    assert chain.action_names[4] == "demand" and chain.action_names[0] == "demand-4"


def test_a_facility_owes_what_it_cannot_ship():
    chain = SupplyChain(delay=1)
    chain.reset()
    for _ in range(4):
        step = chain.step([8, 0, 4])
    distributor = step.observations[1] * 10
    assert distributor[0] == 0
    assert distributor[1] > 0
    assert step.rewards[1] == pytest.approx(-2 * distributor[1] / 10)


@pytest.mark.parametrize("shared", [0.25, 1.0])
def test_facilities_share_a_part_of_the_costs(shared):
    alone, together = SupplyChain(), SupplyChain(shared=shared)
    alone.reset()
    together.reset()
    for orders in np.random.default_rng(0).integers(9, size=(5, 3)):
        own, paid = (np.array(chain.step(orders).rewards) for chain in (alone, together))
        np.testing.assert_allclose(paid, own + shared * (own.mean() - own), rtol=1e-6)


def test_what_is_ordered_is_on_the_road_or_owed_by_the_next_facility():
    chain, rng = SupplyChain(seed=3, weeks=30), np.random.default_rng(0)
    chain.reset()
    for _ in range(30):
        last = chain.step(rng.integers(9, size=3)).last
        on_road = np.array([sum(transit) for transit in chain._transit])
        owed_upstream = np.append(chain._owed[1:], 0)
        np.testing.assert_array_equal(chain._ordered, on_road + owed_upstream)
    assert last


def returns_of(rule, chains=20):
    with SyncEnv(Chain, 3 * chains, "for_loop", seed=100) as pool:
        timestep, total = pool.reset(), np.zeros(3 * chains)
        while not timestep.last().all():
            timestep = pool.step(rule(timestep.observation))
            total += timestep.reward
    return total.reshape(chains, 3).mean(axis=0)


def test_the_base_stock_rule_costs_less_than_half_of_random_orders():
    rng = np.random.default_rng(0)
    ruled = returns_of(lambda seen: np.asarray(order_up_to_base_stock(seen)))
    drawn = returns_of(lambda seen: rng.integers(9, size=len(seen)))
    assert (ruled > drawn / 2).all()
    assert ruled.sum() > -70


def test_the_rule_orders_what_the_base_stock_lacks():
    seen = np.array([[1.2, 0, 0, 0.4, 1, 0, 0], [0, 0.3, 2.0, 0.4, 1, 0, 0]], np.float32)
    np.testing.assert_array_equal(
        order_up_to_base_stock(seen), [BASE_STOCK - 12, BASE_STOCK - 17 if BASE_STOCK > 17 else 0]
    )


def test_the_equilibrium_of_rock_paper_scissors_cannot_be_exploited():
    for rock in (1.0, 2.0, 5.0):
        np.testing.assert_allclose(payoffs(rock), -payoffs(rock).T)
        assert exploitability(equilibrium(rock), rock) == pytest.approx(0.0, abs=1e-12)
    assert exploitability(np.array([1.0, 0, 0])) == 1.0
    assert exploitability(np.array([0, 0, 1.0]), rock=2.0) == 2.0
    np.testing.assert_allclose(equilibrium(2.0), [0.25, 0.5, 0.25])


def test_the_loser_pays():
    game = RockPaperScissors(rock=2.0)
    game.reset()
    assert str(game) == "not thrown"
    assert list(game.step([0, 2]).rewards) == [2.0, -2.0]
    assert str(game) == "rock against scissors"
    assert list(game.step([0, 1]).rewards) == [-1.0, 1.0]
    assert game.step([1, 1]).last


@pytest.mark.parametrize(
    "options", [{"facilities": 1}, {"weeks": 0}, {"delay": 0}, {"shared": 1.5}]
)
def test_impossible_chains_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SupplyChain(**options)


THROWS = "rlstack.envs.seats.games:RockPaperScissors"


def test_matches_are_apart_and_have_the_options_of_their_game():
    options = {"game": THROWS, "rock": 2.0}
    assert Matches.seats(**options) == ("first_0", "second_0", "first_1", "second_1")
    with SyncEnv(Matches, 8, "for_loop", options=options) as pool:
        pool.reset()
        step = pool.step(np.array([0, 2, 1, 0, 1, 2, 2, 2]))
        np.testing.assert_array_equal(step.reward, [2, -2, 1, -1, -1, 1, 0, 0])
        np.testing.assert_array_equal(step.step_type, 2)
        np.testing.assert_array_equal(step.discount, 0.0)
        logged = pool.episode_metrics(np.arange(4))
        np.testing.assert_array_equal(logged["return_of_first_1"], [1.0])


class Countdown:
    """Lasts as many steps as its seed; the reward is the time that is left."""

    seats = ("only",)
    observation_spec = {"action_mask": specs.BoundedArray((2,), np.int8, 0, 1)}  # noqa: RUF012
    action_spec = specs.DiscreteArray(2, np.int32)

    def __init__(self, seed):
        self._length = self.left = seed

    def reset(self):
        self.left = self._length
        return [{"action_mask": np.ones(2, np.int8)}]

    def step(self, actions):
        self.left -= 1
        last = self.left == 0
        return GameStep([{"action_mask": np.ones(2, np.int8)}], [self.left], [1.0 - last], last)


def test_seats_of_a_match_that_is_over_wait_for_the_last_one():
    game = Matches.make(game=f"{__name__}:Countdown", matches=3, seed=1)
    for _ in range(2):
        game.reset()
        steps = [game.step([0, 0, 0]) for _ in range(3)]
        assert [list(step.rewards) for step in steps] == [[0, 1, 2], [0, 0, 1], [0, 0, 0]]
        assert [list(step.discounts) for step in steps] == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
        assert [step.last for step in steps] == [False, False, True]
        masks = [seen["action_mask"].tolist() for seen in steps[1].observations]
        assert masks == [[1, 0], [1, 1], [1, 1]]


def test_matches_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least 1; got 0"):
        Matches.make(game=THROWS, matches=0)
    with pytest.raises(ValueError, match="whose seats act in turn"):
        Matches.make(game="tests.programs.tools.seats.games:TakeStones")
