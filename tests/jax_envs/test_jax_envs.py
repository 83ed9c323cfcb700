"""Environments in JAX: the time rules in a batch, the pool, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.checks import EnvError, WrongKindError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.jax_envs.environment import BatchedEnv, Outcome
from rlstack.jax_envs.toy import Catch, DeepSea, Toll
from rlstack.types import StepType
from tests.jax_envs import toy

_LATER = [pytest.mark.slow, pytest.mark.chosen]
TOYS = [
    toy.MaskedDict,
    *(pytest.param(kind, marks=_LATER) for kind in (toy.Catch, toy.MemoryCue, toy.MultiDiscrete)),
    *(pytest.param(kind, marks=_LATER) for kind in (DeepSea, Toll)),
    toy.PointMass,
]
FIRST, MID, LAST = map(int, StepType)


class Scripted:
    """Ends episodes as its script says; the observation is (episode's length, steps so far)."""

    def __init__(self, ends=((3, True, False), (2, False, True), (1, True, True))):
        self._lengths = jnp.array([length for length, _, _ in ends])
        self._terminated = jnp.array([terminated for _, terminated, _ in ends])
        self._truncated = jnp.array([truncated for _, _, truncated in ends])

    def observation_spec(self):
        return specs.Array((2,), np.float32, "numbers")

    def action_spec(self):
        return specs.DiscreteArray(3, np.int32, "number")

    def reset(self, rng_key):
        kind = jax.random.randint(rng_key, (), 0, len(self._lengths))
        return {"kind": kind, "time": 0}, jnp.array([self._lengths[kind], 0], jnp.float32)

    def step(self, rng_key, state, action):
        kind, time = state["kind"], state["time"] + 1
        over = time == self._lengths[kind]
        observation = jnp.array([self._lengths[kind], time], jnp.float32)
        return Outcome(
            {"kind": kind, "time": time},
            observation,
            10.0 * time + action,
            over & self._terminated[kind],
            over & self._truncated[kind],
        )


_SCRIPTED = BatchedEnv(Scripted())
_RESET, _STEP = jax.jit(_SCRIPTED.reset), jax.jit(_SCRIPTED.step)


@given(
    seed=st.integers(0, 2**31 - 3), actions=st.lists(st.integers(0, 2), min_size=20, max_size=20)
)
@settings(max_examples=8, deadline=None)
def test_the_rules_of_time_hold_in_any_episode(seed, actions):
    state, timestep = _RESET(_SCRIPTED.keys([seed, seed + 1]))
    assert timestep.step_type.tolist() == [FIRST, FIRST]
    for action in actions:
        before = jax.tree.map(np.asarray, timestep)
        state, timestep = _STEP(state, jnp.array([action, action]))
        for row in range(2):
            kind = int(timestep.step_type[row])
            length, time = timestep.observation[row].tolist()
            reward, discount = float(timestep.reward[row]), float(timestep.discount[row])
            if before.step_type[row] == LAST:
                assert (kind, reward, discount, time) == (FIRST, 0.0, 1.0, 0.0)
                continue
            # The true last observation is that of the episode which ends.
            assert length == before.observation[row][0]
            assert time == before.observation[row][1] + 1
            assert reward == 10 * time + action
            assert kind == (LAST if time == length else MID)
            assert discount == (0.0 if kind == LAST and length != 2 else 1.0)


def test_only_steps_that_begin_an_episode_reset():
    """On the CPU, where a branch costs less than a reset."""
    resets = []

    class Counted(Scripted):
        def reset(self, rng_key):
            jax.debug.callback(lambda: resets.append(None))
            return super().reset(rng_key)

    env = BatchedEnv(Counted())
    state, timestep = jax.jit(env.reset)(env.keys(range(3)))
    step = jax.jit(env.step)
    for _ in range(20):
        ended = (timestep.step_type == LAST).any()
        jax.block_until_ready(timestep)
        resets.clear()
        state, timestep = step(state, jnp.zeros(3, jnp.int32))
        jax.effects_barrier()
        assert bool(resets) == ended


@pytest.mark.parametrize("kind", TOYS)
def test_toys_keep_the_time_rules_and_their_specs(kind):
    with SyncEnv(kind, 3, "jax", seed=5) as env:
        timestep, over = env.reset(), np.ones(3, bool)
        actions = np.random.default_rng(0)
        for _ in range(45):
            jax.tree.map(_matches, env.spec.observation, timestep.observation)
            assert ((timestep.step_type == FIRST) == over).all()
            assert (timestep.reward[over] == 0).all()
            assert (timestep.discount[timestep.step_type != LAST] == 1).all()
            over = timestep.step_type == LAST
            timestep = env.step(_random(actions, env.spec.action, 3))
        assert env.stats()["restarts"] == 0


def _matches(spec, x):
    assert x.shape == (3, *spec.shape)
    assert x.dtype == spec.dtype
    for row in x:
        spec.validate(np.asarray(row))


def _random(rng, spec, rows):
    low, high = np.broadcast_to(spec.minimum, spec.shape), np.broadcast_to(spec.maximum, spec.shape)
    if np.issubdtype(spec.dtype, np.integer):
        return rng.integers(low, high + 1, (rows, *spec.shape)).astype(spec.dtype)
    return rng.uniform(low, high, (rows, *spec.shape)).astype(spec.dtype)


def test_deep_sea_rewards_the_one_way_to_the_treasure():
    moves = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], np.int32)  # of three environments
    with SyncEnv(DeepSea, 3, "jax", options={"size": 3}) as env:
        first = env.reset()
        assert first.observation[:, 0, 0].tolist() == [1, 1, 1]
        steps = [env.step(column) for column in moves.T]
    cost = 0.01 / 3
    np.testing.assert_allclose(
        np.stack([s.reward for s in steps], axis=1),
        [[-cost, -cost, 1 - cost], [-cost, 0, -cost], [0, 0, 0]],
        rtol=1e-5,
    )
    places = [[int(np.argmax(board)) for board in s.observation] for s in steps[:2]]
    assert places == [[4, 4, 3], [8, 6, 6]]  # row * 3 + column
    assert not steps[2].observation.any()
    assert [s.step_type.tolist() for s in steps] == [[MID] * 3, [MID] * 3, [LAST] * 3]
    assert steps[2].discount.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="DeepSea: size must be at least 2; got 1"):
        DeepSea(1)


def test_a_toll_is_paid_by_those_who_pass():
    """Returns are 16 for passing all gates, 0 for none, and 8 for tolls of at most 0.5."""
    with SyncEnv(Toll, 600, "jax") as env:
        timestep, policy = env.reset(), np.arange(600) % 3
        assert not timestep.extras["cost"].any()
        returns, costs = np.zeros(600), np.zeros(600)
        for time in range(16):
            assert timestep.step_type[0] != LAST
            toll, left = timestep.observation.T
            np.testing.assert_allclose(left, 1 - time / 16)
            action = np.where(policy == 2, toll <= 0.5, policy == 0).astype(np.int32)
            timestep = env.step(action)
            np.testing.assert_allclose(timestep.extras["cost"], action * toll)
            returns += timestep.reward
            costs += timestep.extras["cost"]
    assert (timestep.step_type == LAST).all() and (timestep.discount == 0).all()
    means = [(returns[policy == kind].mean(), costs[policy == kind].mean()) for kind in range(3)]
    # 3 standard errors are 0.25 of the costs of 8, and 0.43 and 0.17 of the returns and costs of 8
    # and 2.
    np.testing.assert_allclose(means, [(16, 8), (0, 0), (8, 2)], atol=0.45)


def test_catch_may_show_its_board_as_an_image():
    (_, board), (state, image) = (
        Catch(4, 3, pixels=pixels).reset(jax.random.PRNGKey(0)) for pixels in (False, True)
    )
    assert image.dtype == np.uint8
    assert Catch(4, 3, pixels=True).observation_spec().shape == image.shape == (4, 3, 1)
    np.testing.assert_array_equal(image[..., 0], 255 * board)
    assert image[0, state.column, 0] == image[3, 1, 0] == 255


@pytest.mark.slow
@pytest.mark.chosen
def test_toys_score_as_their_originals_say():
    with SyncEnv(toy.Catch, 4, "jax", options={"rows": 4, "columns": 3}) as env:
        timestep = env.reset()
        while timestep.step_type[0] != LAST:
            ball = timestep.observation[:, :3].max(1).argmax(1)
            paddle = timestep.observation[:, 3].argmax(1)
            timestep = env.step(np.sign(ball - paddle).astype(np.int32) + 1)
        assert timestep.reward.tolist() == [1.0] * 4
        assert timestep.discount.tolist() == [0.0] * 4
    with SyncEnv(toy.TruncatingChain, 1, "jax", options={"length": 2}) as env:
        env.reset()
        steps = [env.step(np.zeros(1, np.int32)) for _ in range(3)]
        assert [int(s.step_type[0]) for s in steps] == [MID, LAST, FIRST]
        assert [float(s.discount[0]) for s in steps] == [1.0, 1.0, 1.0]
    with SyncEnv(toy.MemoryCue, 8, "jax", options={"delay": 1, "num_cues": 3}) as env:
        cue = env.reset().observation.argmax(1).astype(np.int32)
        shown = [env.step(cue) for _ in range(3)]
        assert [s.observation[:, 3].tolist()[0] for s in shown] == [0.0, 1.0, 0.0]
        assert shown[-1].reward.tolist() == [1.0] * 8
        env.step(cue), env.step(cue), env.step(cue)
        wrong = env.step((cue + 1) % 3)
        assert set(wrong.reward.tolist()) <= {1.0, -0.5}


def test_an_environment_makes_the_same_steps_in_every_pool():
    """Alone, among others, and in an asynchronous pool."""
    sizes = {}
    for size in (1, 3):
        with SyncEnv(Scripted, size, "jax", seed=7) as env:
            steps = [env.reset(), *(env.step(np.full(size, i % 3, np.int32)) for i in range(12))]
        sizes[size] = [[np.asarray(x[0]) for x in jax.tree.leaves(step)] for step in steps]
    with AsyncEnv(Scripted, 3, 2, "jax", seed=7) as env:
        env.async_reset()
        of_first, counts = [], np.zeros(3, int)
        while len(of_first) < 13:
            ids, timestep = env.recv()
            for row, i in enumerate(ids.tolist()):
                if i == 0:
                    of_first.append([np.asarray(x[row]) for x in jax.tree.leaves(timestep)])
            env.send(ids, (counts[ids] % 3).astype(np.int32))
            counts[ids] += 1
        assert counts.max() - counts.min() <= 1
    for one, other, third in zip(sizes[1], sizes[3], of_first, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
        jax.tree.map(np.testing.assert_array_equal, one, third)


class _Wrong(Scripted):
    def __init__(self, **changes):
        super().__init__()
        self._changes = changes

    def reset(self, rng_key):
        state, observation = super().reset(rng_key)
        return self._changes.get("state", state), self._changes.get("observation", observation)

    def step(self, rng_key, state, action):
        outcome = super().step(rng_key, state, action)
        return outcome._replace(state={**outcome.state, **self._changes.get("after", {})})


@pytest.mark.parametrize(
    ("builder", "error", "text"),
    [
        (lambda: _Wrong(observation=jnp.zeros(3)), EnvError, r"reset: the observation must be .*2"),
        (lambda: _Wrong(state={"kind": 0, "time": 0, "more": 0}), EnvError, "keep its structure"),
        (lambda: _Wrong(after={"time": jnp.zeros(2)}), EnvError, "keep their shapes"),
        (lambda: 3, WrongKindError, "must return a"),
        ("tests.jax_envs.test_jax_envs:Absent", ValueError, "no callable"),
        ("tests.nowhere:Absent", ValueError, "importable module"),
        (3, WrongKindError, "callable"),
    ],
)
def test_what_is_no_environment_in_jax_is_refused(builder, error, text):
    with pytest.raises(error, match=text):
        SyncEnv(builder, 2, "jax")


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="unexpected keyword argument 'size'"):
        SyncEnv(toy.Catch, 2, "jax", options={"size": 3})
