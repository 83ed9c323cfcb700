"""The supply chain: the simulator's rules, the wrapper, the planners, and what policies learn."""

import dataclasses
import io
import itertools

import jax
import numpy as np
import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config import own_modules
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train

BASE_STOCK, FORECAST_STOCK = 1_310, 1_570  # of the page; tested below
# What each must earn at least, as a multiple of what the base stock earns.
MARGINS = {"ppo": 1.15, "a2c": 1.1, "dqn": 1.1, "ddpg": 1.05}
QUICK_MARGIN = 1.03


@pytest.fixture
def simulator():
    from supply_chain import simulator

    return simulator


@pytest.fixture
def environment():
    from supply_chain import environment

    return environment


def chain(simulator, seed=0):
    return simulator.SupplyChain(np.random.default_rng(seed))


def episode(env, act, seed=None):
    """Plays an episode; returns its rewards, observations and the last info."""
    observation, _ = env.reset(seed=seed)
    rewards, seen, over = [], [observation], False
    while not over:
        observation, reward, terminated, over, info = env.step(act(observation))
        assert not terminated
        rewards.append(reward)
        seen.append(observation)
    return rewards, seen, info


def test_a_day_by_hand(simulator):
    c = chain(simulator)
    c.stock, c._demand = [10.0, 8.0, 0.0], [[5], [3]]
    report = c.step([7.0, 15.0, 5.0])  # the warehouse has half of what the shops order
    assert report.sold == 5
    assert report.demand == 8
    assert report.margin == 2.0 * 5
    assert report.lost == 3.0
    assert report.lorries == simulator.SUPPLIER_LORRY + simulator.TOUR_LORRY
    assert report.spoiled == pytest.approx(3.0 * 0.04 * 3.0)
    assert report.storage == pytest.approx(0.08 * 3 * 0.96)
    assert report.profit == pytest.approx(10 - 3 - report.lorries - 0.36 - 0.08 * 2.88)
    np.testing.assert_allclose(c.stock, [0.0, 2.88 + 7.5, 2.5])  # shops get theirs tomorrow
    assert c.on_the_road == [[0.0, 7.0, 0.0], [0.0], [0.0]]  # the supplier's takes three days


def test_goods_are_neither_made_nor_lost(simulator):
    c, rng = chain(simulator, 3), np.random.default_rng(3)
    space = simulator.CAPACITY
    total = sum(c.stock)
    for _ in range(simulator.DAYS):
        order = float(rng.uniform(0, 15))  # too little to fill the warehouse
        report = c.step([order, *rng.uniform(0, 10, 2)])
        total += order - report.sold - report.spoiled / simulator.COST
        held = sum(c.stock) + sum(map(sum, c.on_the_road))
        assert held == pytest.approx(total)
        assert all(0 <= units <= most for units, most in zip(c.stock, space, strict=True))


def test_customers_do_not_depend_on_orders_and_repeat_with_the_seed(simulator):
    orders = ([0.0, 0.0, 0.0], [20.0, 12.0, 8.0])
    demands = []
    for order in (*orders, orders[0]):
        c = chain(simulator, 5)
        demands.append([c.step(order).demand for _ in range(simulator.DAYS)])
    assert demands[0] == demands[1] == demands[2]
    other = chain(simulator, 6)
    assert demands[0] != [other.step(orders[0]).demand for _ in range(simulator.DAYS)]


def test_demand_has_the_pattern_of_its_forecast(simulator):
    chains = [chain(simulator, seed) for seed in range(100)]
    expected = np.array([c.expected for c in chains])[..., : simulator.DAYS]
    drawn = np.array([c._demand for c in chains])[..., : simulator.DAYS]
    assert drawn.mean() == pytest.approx(expected.mean(), rel=0.02)
    days = np.arange(simulator.DAYS)
    weekday = np.stack([(days + c.weekday) % 7 for c in chains])
    north = expected[:, 0] / simulator.MEAN_DEMAND[0]
    for day, factor in enumerate(simulator.WEEK):
        values = np.unique(np.round(north[weekday == day] / factor, 6))
        assert set(values) == {1.0, simulator.PROMOTION_FACTOR}


def test_cover_is_the_inverse_of_units(environment):
    expected = [3.0, 5.0, 2.0]
    for days in (0.0, 0.5, 1.0, 2.9):
        units = environment.units_for(expected, days)
        assert environment.cover(expected, units, mean=4.0) == pytest.approx(days)
    assert environment.cover(expected, 14.0, mean=4.0) == 4.0  # ten units are three days
    assert environment.units_for(expected, 3.0) == 10.0


def test_actions_order_what_is_missing(environment):
    envs = {kind: environment.SupplyChainEnv(kind) for kind in ("cover", "choices", "joint")}
    for env in envs.values():
        env.reset(seed=2)
    largest = environment.KNOWN_DAYS
    for choice in itertools.product(range(4), repeat=3):
        days = [kinds[c] for kinds, c in zip(environment.CHOICES, choice, strict=True)]
        orders = envs["choices"].orders(np.array(choice))
        joint = int(np.ravel_multi_index(choice, (4, 4, 4)))
        assert envs["joint"].orders(joint) == orders
        real = 2 * np.array(days) / largest - 1
        np.testing.assert_allclose(envs["cover"].orders(real), orders, atol=1e-6)
    assert envs["choices"].orders([0, 0, 0]) == [0.0, 0.0, 0.0]
    env = environment.SupplyChainEnv("levels")
    env.reset(seed=2)
    position = np.array(env._positions)
    np.testing.assert_allclose(env.orders([1.0, 1.0, 1.0]), environment.LARGEST_LEVELS - position)
    for wrong in ({"actions": "units"}, {"scenarios": "test"}):
        with pytest.raises(ValueError, match="must be"):
            environment.SupplyChainEnv(**wrong)


def test_episodes_repeat_with_the_seed_and_held_out_ones_are_others(environment):
    def forecasts(scenarios):
        env = environment.SupplyChainEnv("joint", scenarios)
        _, seen, info = episode(env, lambda _: 37, seed=4)
        assert env.observation_space.contains(seen[0])
        assert len(seen) == environment.DAYS + 1
        assert 0 < info["service"] < 1
        return np.stack([s["forecast"] for s in seen])

    training = forecasts("training")
    np.testing.assert_array_equal(training, forecasts("training"))
    assert not np.array_equal(training, forecasts("held_out"))


@pytest.mark.parametrize(
    ("rule", "actions", "stated"),
    [("base_stock", "levels", BASE_STOCK), ("forecast_stock", "cover", FORECAST_STOCK)],
)
def test_planners_earn_what_the_page_says(environment, rule, actions, stated):
    """The planners are not weakened to be beaten: a change of the simulator is noticed here."""
    from supply_chain import rules

    env = environment.SupplyChainEnv(actions, "held_out")
    answer = jax.jit(getattr(rules, rule))

    def act(observation):
        batch = {name: value[None] for name, value in observation.items()}
        return np.asarray(answer(batch))[0]

    profits = [sum(episode(env, act, seed)[0]) for seed in range(40)]
    error = np.std(profits) / np.sqrt(len(profits))
    assert abs(np.mean(profits) - stated) < 3 * error


def experiment(name, **changes):
    """A preset of the example, by name."""
    own_modules.load_all(["supply_chain.presets"])
    return dataclasses.replace(preset(f"supply-chain-{name}"), **changes)


def profit(directory, experiment):
    """Trains; returns the mean profit on held-out scenarios."""
    experiment = dataclasses.replace(experiment, modules=("supply_chain.presets",))
    found = train.run(experiment, directory, stream=io.StringIO()).eval_return_mean
    print(f"{experiment.preset}, {experiment.topology}: {found:.0f}")
    return found


def asynchronous(experiment):
    """The same with an asynchronous pool: a batch is the half that is ready first."""
    half = experiment.env.num_envs // 2
    env = dataclasses.replace(experiment.env, type="thread", num_workers=2, wait_num=half)
    return dataclasses.replace(experiment, env=env)


def test_presets_survive_json_and_evaluate_on_held_out_scenarios():
    for name in (*MARGINS, "base-stock", "forecast-stock"):
        found = experiment(name, modules=("supply_chain.presets",))
        assert from_json(to_json(found)) == found
        assert found.env.options.get("scenarios", "training") == "training"
        assert found.evaluation_env.options["scenarios"] == "held_out"


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
def test_a_short_run_beats_the_base_stock(tmp_path):
    short = experiment("ppo", frames=60_000, evaluator=EvaluatorConfig(episodes=40, num_envs=20))
    assert profit(tmp_path / "run", short) > QUICK_MARGIN * BASE_STOCK


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "margin"), MARGINS.items())
def test_policies_beat_the_base_stock(tmp_path, name, margin):
    assert profit(tmp_path / "run", experiment(name)) > margin * BASE_STOCK


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "margin"), MARGINS.items())
def test_policies_beat_the_base_stock_from_asynchronous_pools(tmp_path, name, margin):
    assert profit(tmp_path / "run", asynchronous(experiment(name))) > margin * BASE_STOCK


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rounds", [True, False])
def test_actors_in_processes_beat_the_base_stock(tmp_path, rounds):
    """Two actors of half the environments, in synchronous rounds or asynchronously."""
    base = experiment("ppo", topology="heavy_env", program=ProgramConfig(num_actors=2))
    env = dataclasses.replace(base.env, num_envs=base.env.num_envs // 2)
    replay = dataclasses.replace(base.replay, min_actors=2 if rounds else 0)
    found = profit(tmp_path / "run", dataclasses.replace(base, env=env, replay=replay))
    assert found > MARGINS["ppo"] * BASE_STOCK
