"""Games in JAX as joint rows: the rows of their seats side by side, and the two-step game."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.jax_envs.cover import Cover, CoverState
from rlstack.jax_envs.factory import make_batch
from rlstack.jax_envs.game import BatchedGame, JointGame
from rlstack.jax_envs.two_step import TwoStep
from rlstack.types import StepType
from tests.agent_cases import quick_jit
from tests.jax_envs.test_games import Echo

FIRST, MID, LAST = map(int, StepType)
ECHO = "tests.jax_envs.test_games:Echo"
TWO_STEP = "rlstack.jax_envs.two_step:TwoStep"


def test_a_row_is_a_game_with_the_steps_of_its_seats():
    joint, seats = JointGame(Echo()), BatchedGame(Echo())
    keys = joint.keys(range(3))
    state, one = quick_jit(joint.reset)(keys)
    of_seats, rows = quick_jit(seats.reset)(jnp.repeat(keys, 2, axis=0))
    step, step_rows = quick_jit(joint.step), quick_jit(seats.step)
    kinds, alive = [], []
    for _ in range(5):
        np.testing.assert_array_equal(one.observation, rows.observation.reshape(3, 2, 2))
        np.testing.assert_array_equal(one.extras["rewards"], rows.reward.reshape(3, 2))
        np.testing.assert_array_equal(one.reward, rows.reward.reshape(3, 2).mean(1))
        kinds.append(one.step_type.tolist())
        alive.append(one.extras["alive"][1].tolist())
        action = jnp.arange(6, dtype=jnp.int32)
        state, one = step(state, action.reshape(3, 2))
        of_seats, rows = step_rows(of_seats, action)
    assert kinds == [[kind] * 3 for kind in (FIRST, MID, MID, LAST, FIRST)]
    # The right seat leaves in the second step, and a limit ends the game in the third.
    assert alive == [[1, 1], [1, 1], [1, 0], [1, 0], [1, 1]]
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(state))


def test_a_pool_makes_the_steps_of_the_compiled_loop():
    options = {"joint": True, "critic_state": "joined"}
    env = make_batch(ECHO, options)
    state, timestep = quick_jit(env.reset)(env.keys([5, 6]))
    step, action = quick_jit(env.step), np.array([[1, 4], [0, 2]], np.int32)
    with SyncEnv(ECHO, 2, "jax", seed=5, options=options) as pool:
        found = pool.reset()
        for _ in range(5):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), timestep, found)
            assert found.observation["critic_state"]["1"].shape == (2, 2)
            state, timestep = step(state, action)
            found = pool.step(action)


def test_joint_rows_may_be_stepped_one_by_one():
    with AsyncEnv(TWO_STEP, 2, 1, "jax", options={"joint": True}) as pool:
        pool.async_reset()
        ids, _ = pool.recv()
        pool.send(ids, np.array([[1, 1]], np.int32))
        kinds = [pool.recv()[1].step_type.tolist() for _ in range(2)]
    assert kinds == [[FIRST], [MID]]


def test_the_two_step_game():
    first = np.array([[0, 1], [0, 0], [1, 0], [1, 0], [1, 1], [1, 0]])  # to 2A twice, then to 2B
    then = np.array([[0, 1], [1, 1], [0, 0], [0, 1], [1, 0], [1, 1]])
    paid = [7, 7, 0, 1, 1, 8]
    env = make_batch(TWO_STEP, {"joint": True, "critic_state": "game"})
    state, start = quick_jit(env.reset)(env.keys(range(6)))
    step = quick_jit(env.step)
    np.testing.assert_array_equal(start.observation["critic_state"], [[1, 0, 0]] * 6)
    state, middle = step(state, first)
    place = np.eye(3)[1 + first[:, 0]]
    np.testing.assert_array_equal(middle.observation["critic_state"], place)
    np.testing.assert_array_equal(middle.observation["observation"], np.stack([place] * 2, 1))
    state, end = step(state, then)
    assert (middle.reward.tolist(), end.reward.tolist()) == ([0] * 6, paid)
    assert (middle.step_type.tolist(), end.step_type.tolist()) == ([MID] * 6, [LAST] * 6)
    assert end.discount.tolist() == [0] * 6
    assert end.extras["alive"].tolist() == [[0, 0]] * 6


def test_cover_with_continuous_moves():
    game = Cover(agents=2, continuous=True)
    assert game.action_spec().shape == (2,)
    state = CoverState(jnp.zeros((2, 2)), jnp.ones((2, 2)), jnp.int32(0))
    move = jnp.array([[1.0, 0.0], [-0.5, 0.2]])
    after = quick_jit(game.step)(jax.random.PRNGKey(1), state, move).state
    np.testing.assert_allclose(after.agents, [[0.15, 0.0], [-0.075, 0.03]], rtol=1e-6)


def test_an_environment_of_one_agent_cannot_be_joined():
    with pytest.raises(ValueError, match="joint must be left out, because it is no game"):
        make_batch("rlstack.jax_envs.toy:Catch", {"joint": True})
    assert isinstance(make_batch(TWO_STEP, {"joint": False}), BatchedGame)
    assert TwoStep().seats == ("first", "second")
