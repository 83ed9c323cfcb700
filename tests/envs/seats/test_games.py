"""The numbers of the games of several seats."""

import numpy as np
import pytest

from agents.rules import BASE_STOCK, order_up_to_base_stock
from rlstack.envs import SyncEnv
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


@pytest.mark.parametrize("options", [{"facilities": 1}, {"weeks": 0}, {"delay": 0}])
def test_impossible_chains_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SupplyChain(**options)
