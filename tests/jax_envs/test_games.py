"""Games of several seats in JAX: rows, the time rules, what seats see, the pool, and fused runs."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.jax_envs.cover import Cover, CoverState
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.factory import make_batch
from rlstack.jax_envs.game import BatchedGame, GameOutcome
from rlstack.jax_envs.libraries.from_jaxmarl import Padded
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.types import StepType
from tests.programs import running

pytestmark = pytest.mark.timeout(120)
FIRST, MID, LAST = map(int, StepType)
COVER = "rlstack.jax_envs.cover:Cover"


class Echo:
    """Rewards are 10 * seat + action. The right seat ends one step before the game does."""

    seats = ("left", "right")

    def __init__(self, length=3):
        self._length = length

    def observation_spec(self):
        return specs.Array((2,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(9, np.int32)

    def reset(self, rng_key):
        start = jax.random.randint(rng_key, (), 0, 1000)
        return (start, jnp.int32(0)), self._observe(start, 0)

    def step(self, rng_key, state, action):
        start, time = state[0], state[1] + 1
        reward = 10.0 * jnp.arange(2) + action
        ended = jnp.array([False, True]) & (time >= self._length - 1)
        over = time >= self._length
        return GameOutcome((start, time), self._observe(start, time), reward, ended, over)

    def _observe(self, start, time):
        return jnp.stack([jnp.arange(2) + 0.0 * time, jnp.full(2, start + time)], 1).astype(
            jnp.float32
        )


def test_rows_are_the_seats_of_games_and_the_rules_of_time_hold():
    env = BatchedGame(Echo())
    step = jax.jit(env.step)
    state, timestep = jax.jit(env.reset)(env.keys(range(4)))
    assert timestep.step_type.tolist() == [FIRST] * 4
    np.testing.assert_array_equal(timestep.observation[:, 0], [0, 1, 0, 1])
    start = timestep.observation[:, 1]
    assert start[0] == start[1] != start[2] == start[3]  # seats share a game, games differ
    kinds, discounts = [], []
    for time in range(1, 5):
        state, timestep = step(state, jnp.arange(4) + time)
        kinds.append(timestep.step_type[:2].tolist())
        discounts.append(timestep.discount.tolist())
        assert kinds[-1] == timestep.step_type[2:].tolist()
        if time < 4:
            plays = [1, time < 3] * 2  # the second seat leaves in the second step
            rewards = (np.array([0, 11, 2, 13]) + time) * plays
            np.testing.assert_array_equal(timestep.reward, rewards)
            np.testing.assert_array_equal(timestep.observation[:, 1], start + time)
    assert kinds == [[MID, MID], [MID, LAST], [LAST, FIRST], [FIRST, FIRST]]
    assert discounts == [[1] * 4, [1, 0, 1, 0], [1] * 4, [1] * 4]
    np.testing.assert_array_equal(timestep.reward, 0.0)
    assert (timestep.observation[:, 1] != start).all()  # another game


def test_a_game_makes_the_same_steps_in_a_batch_of_any_size():
    env = BatchedGame(Cover(agents=2))
    keys = env.keys(range(6))

    def play(keys):
        state, _ = env.reset(keys)
        actions = jnp.tile(jnp.array([1, 4], jnp.int32), len(keys) // 2)
        return env.step(state, actions)[1]

    small, large = jax.jit(play)(keys[2:4]), jax.jit(play)(keys)
    part = jax.tree.map(lambda x: x[2:4], large)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), small, part)


def test_rewards_of_cover_by_hand():
    game = Cover(agents=2, length=2)
    agents = jnp.array([[0.0, 0.0], [0.5, 0.0]])
    landmarks = jnp.array([[0.0, 0.4], [0.9, 0.0]])
    state = CoverState(agents, landmarks, jnp.int32(0))
    apart = game.step(jax.random.PRNGKey(0), state, jnp.array([0, 2]))  # the second one goes right
    # The first landmark is 0.4 from the first agent, the second one 0.25 from the second agent.
    np.testing.assert_allclose(apart.reward, [-0.65, -0.65], rtol=1e-5)
    near = game.step(jax.random.PRNGKey(0), apart.state, jnp.array([2, 0]))
    nearer = near.state._replace(agents=jnp.array([[0.5, 0.0], [0.5, 0.1]]))
    collided = game.step(jax.random.PRNGKey(0), nearer, jnp.array([0, 0]))
    to_landmarks = np.hypot(0.5, 0.3) + 0.4
    np.testing.assert_allclose(collided.reward, [-to_landmarks - 1] * 2, rtol=1e-5)
    assert not apart.over and near.over
    np.testing.assert_allclose(
        apart.observation[1], [0.65, 0, -0.65, 0.4, 0.25, 0, -0.65, 0], atol=1e-6
    )


def test_seats_see_their_number_and_the_critic_all_observations():
    env = make_batch(COVER, {"agents": 2, "seat_index": True, "critic_state": "joined"})
    _, timestep = jax.jit(env.reset)(env.keys(range(4)))
    seen = timestep.observation
    np.testing.assert_array_equal(seen["seat"], [0, 1, 0, 1])
    for row in range(4):
        for seat in range(2):
            joined = seen["critic_state"][str(seat)][row]
            np.testing.assert_array_equal(joined, seen["observation"][row - row % 2 + seat])
    places = make_batch(COVER, {"agents": 2, "critic_state": "game"})
    state, timestep = jax.jit(places.reset)(places.keys(range(2)))
    shown = timestep.observation["critic_state"]
    np.testing.assert_array_equal(shown[0], shown[1])
    np.testing.assert_array_equal(shown[0][:4], state.env.agents[0].ravel())


def test_a_pool_has_whole_games():
    with SyncEnv(COVER, 6, "jax", options={"length": 2}) as pool:
        assert pool.reset().observation.shape == (6, 12)
        step = pool.step(np.zeros(6, np.int64))
        assert step.reward.shape == (6,) and (step.reward < 0).all()
    with SyncEnv(COVER, 4, "jax") as pool, pytest.raises(EnvError, match="multiple of 3"):
        pool.reset()
    with pytest.raises(EnvError, match="all seats of a game step together"):
        AsyncEnv(COVER, 6, 3, "jax")
    with pytest.raises(ValueError, match="critic_state must be left out"):
        make_batch("rlstack.jax_envs.toy:Catch", {"critic_state": "joined"})
    with pytest.raises(ValueError, match=r"needs a game with state_spec\(\)"):
        make_batch(Echo, {"critic_state": "game"})
    assert not isinstance(make_batch("rlstack.jax_envs.toy:Catch"), BatchedGame)
    assert isinstance(make_batch(Echo), BatchedEnv)


def cover(name, critic_state, frames):
    """A short run of a preset's agent on Cover, in the topology fused."""
    base = preset(name)
    return dataclasses.replace(
        base,
        env=EnvConfig(COVER, num_envs=96, type="jax", options={"critic_state": critic_state}),
        topology="fused",
        frames=frames,
        evaluator=dataclasses.replace(base.evaluator, episodes=60),
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "critic_state"), [("mpe-spread-ippo", "none"), ("mpe-spread-mappo", "game")]
)
def test_agents_with_one_policy_learn_to_cover_in_fused(name, critic_state, tmp_path):
    # Random actions give -53.
    result = running.run(cover(name, critic_state, 600_000), tmp_path / "run")
    assert result.eval_return_mean > -45.0


@pytest.mark.slow
@pytest.mark.chosen
def test_ppo_learns_the_same_from_seats_that_leave_on_the_host_and_in_one_program(tmp_path):
    """The right seat is absent in a third of its rows: no frame, and in no statistics or loss."""
    base = preset("mpe-spread-ippo")
    experiment = dataclasses.replace(
        base,
        env=EnvConfig("tests.jax_envs.test_games:Echo", 8, "jax", options={"length": 5}),
        replay=dataclasses.replace(base.replay, batch_size=8, unroll_length=12, max_size=16),
    )
    for topology in ("single_process", "fused"):
        result = running.run(
            running.small(experiment, topology, 10**6, updates=3), tmp_path / topology
        )
        assert result.learner_steps == 3
        # 36 steps are six games: 5 frames of the left seat, 4 of the right one.
        assert result.env_frames == 4 * 6 * 9, topology
    pairs = zip(*(running.params(tmp_path / t) for t in ("single_process", "fused")), strict=True)
    for host, compiled in pairs:
        np.testing.assert_allclose(host, compiled, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.skipif(importlib.util.find_spec("jaxmarl") is None, reason="needs JaxMARL")
def test_games_of_jaxmarl():
    env = make_batch("jaxmarl/MPE_simple_spread_v3", {"critic_state": "joined"})
    assert env.num_seats == 3 and env.spec.action.num_values == 5
    state, timestep = jax.jit(env.reset)(env.keys(range(6)))
    assert timestep.observation["observation"].shape == (6, 18)
    step, kinds = jax.jit(env.step), []
    for _ in range(27):
        state, timestep = step(state, jnp.zeros(6, jnp.int32))
        kinds.append(int(timestep.step_type[0]))
        np.testing.assert_array_equal(timestep.discount, 1.0)  # only a time limit ends it
        if kinds[-1] != FIRST:
            assert (timestep.reward < 0).all()
    assert kinds == [MID] * 25 + [LAST, FIRST]
    with pytest.raises(ValueError, match=r"id of JaxMARL.*did you mean.*MPE_simple_spread_v3"):
        make_batch("jaxmarl/MPE_simple_spread_v2")
    with pytest.raises(ValueError, match=r"has no 'max_step'.*did you mean.*max_steps"):
        make_batch("jaxmarl/MPE_simple_spread_v3", {"max_step": 5})
    make_batch("jaxmarl/MPE_simple_spread_v3", {"max_steps": 5})
    with pytest.raises(EnvError, match=r"action space must be the same for all agents.*pad True"):
        make_batch("jaxmarl/MPE_simple_speaker_listener_v4")
    env = make_batch("jaxmarl/MPE_simple_speaker_listener_v4", {"pad": True})
    assert env.spec.action.num_values == 5


class Pair:
    """A speaker with 2 choices and a listener with 3, as JaxMARL has them."""

    agents = ("speaker", "listener")
    name = "Pair"

    def __init__(self, numbers=False):
        self._numbers = numbers
        self.num = {"speaker": 2, "listener": 3}

    def observation_space(self, agent):
        return SimpleNamespace(shape=(self.num[agent],))

    def action_space(self, agent):
        number = self.num[agent]
        if self._numbers:
            return SimpleNamespace(low=np.zeros(number), high=np.ones(number), shape=(number,))
        return SimpleNamespace(n=number, shape=(), dtype=jnp.int32)

    def reset(self, rng_key):
        return {agent: jnp.ones(n) for agent, n in self.num.items()}, jnp.int32(0)

    def step_env(self, rng_key, state, actions):
        rewards = {agent: actions[agent].sum() for agent in self.agents}
        return *self.reset(rng_key), rewards, {"__all__": False}, {}


@pytest.mark.parametrize("numbers", [False, True])
def test_agents_of_jaxmarl_get_the_longest_spaces(numbers):
    env = Padded(Pair(numbers))
    seen, state = env.reset(None)
    assert {agent: x.tolist() for agent, x in seen.items()} == {
        "speaker": [1, 1, 0],
        "listener": [1, 1, 1],
    }
    assert env.action_space("speaker") is env.action_space("listener")
    actions = dict.fromkeys(Pair.agents, jnp.ones(3) if numbers else jnp.int32(1))
    seen, _, rewards, *_ = env.step_env(None, state, actions)
    assert seen["speaker"].tolist() == [1, 1, 0]
    assert rewards == {"speaker": 2, "listener": 3} if numbers else {"speaker": 1, "listener": 1}
    if numbers:
        with pytest.raises(NotImplementedError):
            env.get_avail_actions(state)
    else:
        legal = {agent: x.tolist() for agent, x in env.get_avail_actions(state).items()}
        assert legal == {"speaker": [True, True, False], "listener": [True, True, True]}


def test_agents_with_images_are_not_padded():
    class Images(Pair):
        def observation_space(self, agent):
            return SimpleNamespace(shape=(2, self.num[agent]))

    with pytest.raises(EnvError, match=r"Pair: with pad, observations must be vectors"):
        Padded(Images())
