"""bsuite's environments in JAX, step by step against those of the package bsuite."""

import gzip
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.jax_envs import bsuite
from rlstack.jax_envs.factory import make_batch
from rlstack.types import StepType

pytest.importorskip("bsuite")

from bsuite.environments import (
    bandit,
    cartpole,
    catch,
    deep_sea,
    discounting_chain,
    memory_chain,
    mountain_car,
    umbrella_chain,
)
from bsuite.experiments.cartpole_swingup import cartpole_swingup


def of_cartpole(env, state):
    time = env._state.time_elapsed
    numbers = map(float, (state.x, state.speed, state.angle, state.spin))
    env._state = cartpole.CartpoleState(*numbers, time)


def of_car(env, state):
    env._position, env._velocity = float(state.position), float(state.velocity)


def of_catch(env, state):
    env._ball_x = int(state.column)


def of_memory(env, state):
    env._context, env._query = np.array(state.bits), int(state.query)


def of_umbrella(env, state):
    env._need_umbrella, env._has_umbrella = int(state.need), int(state.has)


def nothing(env, state):
    pass


def swingup(height):
    return cartpole_swingup.CartpoleSwingup(height_threshold=height, x_reward_threshold=1 - height)


def sea(size):
    return deep_sea.DeepSea(size, mapping_seed=42)


# Ours, the reference's, what gives the reference our draws, and its numbers of columns to compare.
KINDS = {
    "bandit": (bsuite.Bandit(7), bandit.SimpleBandit(7), nothing, None),
    "catch": (bsuite.Catch(), catch.Catch(), of_catch, None),
    "deep_sea": (bsuite.DeepSea(10), sea(10), nothing, None),
    "discounting": (
        bsuite.DiscountingChain(8), discounting_chain.DiscountingChain(8), nothing, None,
    ),
    "memory_1": (bsuite.MemoryChain(1), memory_chain.MemoryChain(1), of_memory, None),
    "memory_len": (bsuite.MemoryChain(5), memory_chain.MemoryChain(5), of_memory, None),
    "memory_size": (bsuite.MemoryChain(2, 6), memory_chain.MemoryChain(2, 6), of_memory, None),
    "umbrella": (
        bsuite.UmbrellaChain(4, 3), umbrella_chain.UmbrellaChain(4, 3), of_umbrella, 3,
    ),
    "mountain_car": (bsuite.MountainCar(), mountain_car.MountainCar(), of_car, None),
    "cartpole": (bsuite.Cartpole(), cartpole.Cartpole(), of_cartpole, None),
    "swingup": (bsuite.CartpoleSwingup(0.0), swingup(0.0), of_cartpole, None),
    "swingup_high": (bsuite.CartpoleSwingup(0.95), swingup(0.95), of_cartpole, None),
}  # fmt: skip


LONG = {"mountain_car", "cartpole", "swingup", "swingup_high"}  # episodes of up to 1,001 steps


def first_of(env):
    return (
        env.observation
        if hasattr(env, "observation")
        else getattr(env, "_get_observation", getattr(env, "_observation", None))()
    )


def regret_of(env):
    info = env.bsuite_info()
    return info.get("total_regret", info.get("total_bad_episodes"))


def played(env, rng_key, actions):
    """Returns the first observation, the states before each action, and the outcomes."""

    def once(state, row):
        outcome = env.step(*row[:1], state, row[1])
        return outcome.state, (state, outcome)

    state, observation = env.reset(rng_key)
    keys = jax.random.split(rng_key, len(actions))
    return observation, *jax.lax.scan(once, state, (keys, actions))[1]


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_bsuite(kind):
    ours, theirs, adopt, columns = KINDS[kind]
    number = ours.action_spec().num_values
    assert number == theirs.action_spec().num_values
    assert ours.observation_spec().shape == theirs.observation_spec().shape
    play = jax.jit(lambda *x: played(ours, *x))
    for seed, chance in enumerate((1.0, 0.0, 0.3)):  # of a random action instead of the usual one
        rng, before = np.random.default_rng(seed), regret_of(theirs)
        actions = rng.integers(number, size=1_010 if kind in LONG else 110)
        usual = rng.random(len(actions)) >= chance
        actions[usual] = actions[0]
        observation, *found = play(jax.random.PRNGKey(seed), actions)
        states, outcomes = jax.tree.map(np.asarray, found)
        theirs.reset()
        adopt(theirs, row(states, 0))
        np.testing.assert_allclose(
            observation[..., :columns], first_of(theirs)[..., :columns], atol=1e-6
        )
        steps = []
        while not steps or not steps[-1].last():
            adopt(theirs, row(states, len(steps)))  # so that rounding does not add up
            steps.append(theirs.step(int(actions[len(steps)])))
        end, rewards = len(steps), np.array([step.reward for step in steps])
        over = np.broadcast_to(outcomes.terminated, len(actions))[:end]
        assert over.tolist() == [False] * (end - 1) + [True] and not np.any(outcomes.truncated)
        judged = slice(end - 1, end) if kind == "umbrella" else slice(end)  # the others are drawn
        ours_rewards = np.broadcast_to(outcomes.reward, len(actions))[:end]
        np.testing.assert_allclose(ours_rewards[judged], rewards[judged], atol=1e-6)
        seen = np.stack([step.observation for step in steps])
        np.testing.assert_allclose(
            outcomes.observation[:end][..., :columns], seen[..., :columns], atol=2e-5
        )
        metrics = ours.episode_metrics(row(outcomes.state, end - 1))
        _check(kind, metrics, rewards.sum(), before, regret_of(theirs))


def _check(kind, metrics, total, before, after):
    if after is not None:
        assert metrics["regret"] == pytest.approx(after - before, abs=1e-5)
    elif kind == "mountain_car":
        assert metrics["regret"] == -total - 100
    elif kind == "discounting":
        assert metrics["regret"] == pytest.approx(1.1 - total, abs=1e-6)
    else:
        best, good = (1_000, 500) if kind == "cartpole" else (700, 100)
        assert metrics["regret"] == pytest.approx(best - total, abs=1e-2)
        assert bool(metrics["solved"]) == (total > good)


def test_an_episode_of_cartpole_has_as_many_steps_as_in_bsuite():
    """The pole is held by a force that balances it, in both."""
    ours = bsuite.Cartpole()
    theirs = cartpole.Cartpole(height_threshold=-2.0, x_threshold=1e9)
    theirs.reset()
    steps = 0
    while not theirs.step(1).last():
        steps += 1
    state, _ = ours.reset(jax.random.PRNGKey(0))
    upright = state._replace(
        angle=0.0 * state.angle, spin=0.0 * state.spin, x=0 * state.x, speed=0 * state.speed
    )
    for time, over in ((steps - 1, False), (steps, True)):
        outcome = ours.step(jax.random.PRNGKey(0), upright._replace(time=jnp.int32(time)), 1)
        assert bool(outcome.terminated) is over


def test_a_stochastic_sea_has_wind_and_noise():
    env, size = bsuite.DeepSea(10, deterministic=False), 10
    right = np.random.RandomState(42).binomial(1, 0.5, [size, size])
    start = bsuite.DeepSeaState(jnp.int32(4), jnp.int32(4), jnp.zeros((), bool))
    keys = jax.random.split(jax.random.PRNGKey(0), 4_000)
    step = jax.jit(jax.vmap(env.step, (0, None, None)))
    outcome = step(keys, start, int(right[4, 4]))
    assert set(np.unique(outcome.state.column)) == {4, 5}
    assert np.mean(outcome.state.column == 4) == pytest.approx(1 / size, abs=0.02)
    np.testing.assert_allclose(outcome.reward, -0.01 / size)
    assert not outcome.state.bad.any()
    left = step(keys, start, 1 - int(right[4, 4]))
    assert (left.state.column == 3).all() and left.state.bad.all()
    end = start._replace(row=jnp.int32(9), column=jnp.int32(9))
    rewards = np.asarray(step(keys, end, int(right[9, 9])).reward)
    assert rewards.mean() == pytest.approx(1 - 0.01 / size, abs=0.06)
    assert rewards.std() == pytest.approx(1.0, abs=0.05)


def test_an_umbrella_has_rewards_and_distractors_by_chance():
    env = make_batch("rlstack.jax_envs.bsuite:UmbrellaChain", {"n_distractor": 5})
    state, timestep = jax.jit(env.reset)(env.keys(range(1_000)))
    assert np.mean(timestep.observation[:, 0, :2]) == pytest.approx(0.5, abs=0.05)
    _, timestep = jax.jit(env.step)(state, jnp.ones(1_000, jnp.int32))
    assert set(np.unique(timestep.reward)) == {-1.0, 1.0}
    assert np.mean(timestep.reward) == pytest.approx(0.0, abs=0.15)
    assert np.mean(timestep.observation[:, 0, 3:]) == pytest.approx(0.5, abs=0.03)
    assert (timestep.observation[:, 0, 1] == 1).all()


def test_rewards_have_noise_and_scale_in_any_environment():
    options = {"mapping_seed": 3, "reward_noise": 3.0, "reward_scale": 100.0}
    env = make_batch("rlstack.jax_envs.bsuite:Bandit", options)
    state, _ = jax.jit(env.reset)(env.keys(range(4_000)))
    arm = int(np.random.RandomState(3).choice(range(11), size=11, replace=False)[5])
    state, timestep = jax.jit(env.step)(state, jnp.full(4_000, 5))
    assert np.mean(timestep.reward) == pytest.approx(10.0 * arm, abs=0.2)
    assert np.std(timestep.reward) == pytest.approx(3.0, abs=0.15)
    # What is scored has neither.
    np.testing.assert_allclose(env.episode_metrics(state)["regret"], 1 - arm / 10, atol=1e-6)


def test_a_pool_gives_the_numbers_of_episodes():
    with SyncEnv("rlstack.jax_envs.bsuite:Catch", 3, "jax", seed=1) as pool:
        timestep = pool.reset()
        assert pool.episode_metrics(np.arange(3)) == {}
        for _ in range(9):
            timestep = pool.step(np.ones(3, np.int32))
        assert (timestep.step_type == StepType.LAST).all()
        found = pool.episode_metrics(np.array([0, 2]))
        np.testing.assert_array_equal(found["regret"], (1 - timestep.reward)[[0, 2]])
        pool.step(np.ones(3, np.int32))
        assert len(pool.episode_metrics(np.arange(3))["regret"]) == 3


def test_mnist_is_read_and_never_fetched(tmp_path):
    with pytest.raises(ValueError, match=r"must have train-images.*Fetch them as bsuite does"):
        bsuite.Mnist(str(tmp_path))
    pixels = np.arange(3 * 784, dtype=np.uint8).reshape(3, 28, 28)
    images, labels = bsuite.Mnist.FILES
    header = struct.pack(">IIII", 2051, 3, 28, 28)
    (tmp_path / images).write_bytes(gzip.compress(header + pixels.tobytes()))
    (tmp_path / labels).write_bytes(gzip.compress(struct.pack(">II", 2049, 3) + bytes([7, 0, 9])))
    env = bsuite.Mnist(str(tmp_path))
    state, image = env.reset(jax.random.PRNGKey(2))
    number = [7, 0, 9].index(int(state.label))
    np.testing.assert_allclose(image, pixels[number].astype(np.int8) / 255, atol=1e-6)
    right = env.step(None, state, state.label)
    wrong = env.step(None, state, (state.label + 1) % 10)
    assert (right.reward, wrong.reward, right.terminated) == (1, -1, True)
    assert not right.observation.any()
    regrets = [env.episode_metrics(one.state)["regret"] for one in (right, wrong)]
    assert regrets == [0, 2]


def test_a_setting_that_bsuite_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"mapping_seed must be in 0\.\.19; got 20"):
        bsuite.Bandit(20)
