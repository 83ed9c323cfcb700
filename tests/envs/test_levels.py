"""Levels in actions: every pool begins them, and shows them in the extras."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.rock_paper_scissors import RockPaperScissors
from rlstack.types import StepType
from tests.envs import costly
from tests.envs.leveled import LEVELS, Numbered, Seeded, shown
from tests.programs.hooks.numbered import NumberedDm

FIRST, MID, LAST = map(int, StepType)
pytestmark = pytest.mark.timeout(60)


class JaxNumbered:
    """`Numbered` in JAX."""

    def observation_spec(self):
        return specs.BoundedArray((1,), np.float32, 0.0, 1.0)

    def action_spec(self):
        return specs.DiscreteArray(2, np.int32)

    def reset(self, rng_key):
        return self.reset_with_index(rng_key, jax.random.randint(rng_key, (), 0, LEVELS))

    def reset_with_index(self, rng_key, index):
        state = jnp.full(1, index / LEVELS, jnp.float32), jnp.int32(0)
        return state, state[0]

    def step(self, rng_key, state, action):
        state = state[0], state[1] + 1
        return Outcome(state, state[0], state[0][0], state[1] == 2, False)


class JaxSeeded:
    """An episode shows what its key draws."""

    observation_spec, action_spec = JaxNumbered.observation_spec, JaxNumbered.action_spec
    step = JaxNumbered.step

    def reset(self, rng_key):
        state = jax.random.uniform(rng_key, (1,)), jnp.int32(0)
        return state, state[0]


POOLS = {
    "for_loop": (Numbered, "for_loop"),
    "thread": (Numbered, "thread"),
    "process": (Numbered, "process"),
    "jax": (JaxNumbered, "jax"),
}


def act(rows, level):
    return {"action": np.ones(rows, np.int32), "level": np.array(level, np.int32)}


@pytest.mark.parametrize("name", POOLS)
def test_an_episode_begins_the_level_of_the_action_after_the_last_step(name):
    builder, kind = POOLS[name]
    with SyncEnv(builder, 3, kind, seed=4, levels=LEVELS, num_workers=2) as pool:
        assert pool.spec.action["level"].num_values == LEVELS
        assert pool.spec.extras["level"].num_values == LEVELS
        step = pool.reset()
        first = step.extras["level"]
        if kind != "jax":  # the seed modulo the number
            assert first.tolist() == [4, 5, 0]
        np.testing.assert_allclose(step.observation[:, 0], first / LEVELS, rtol=1e-6)
        played = [first]
        for level in ([1, 2, 3], [5, 4, 0], [2, 2, 1]):
            for chosen, kind_of_step in (([0] * 3, MID), ([3] * 3, LAST), (level, FIRST)):
                step = pool.step(act(3, chosen))
                assert step.step_type.tolist() == [kind_of_step] * 3
                if kind_of_step == FIRST:
                    played.append(np.array(level))
                assert step.extras["level"].dtype == np.int32
                assert step.extras["level"].tolist() == played[-1].tolist()
                np.testing.assert_allclose(step.observation[:, 0], played[-1] / LEVELS, rtol=1e-6)
        with pytest.raises(ValueError, match="must lie in"):
            pool.step(act(3, [LEVELS] * 3))


@pytest.mark.parametrize("kind", ["thread", "jax"])
def test_asynchronous_pools_begin_levels(kind):
    builder = JaxNumbered if kind == "jax" else Numbered
    with AsyncEnv(builder, 4, 2, kind, levels=LEVELS) as pool:
        pool.async_reset()
        wanted, began = {}, 0
        for time in range(40):
            ids, step = pool.recv()
            levels = step.extras["level"]
            np.testing.assert_allclose(step.observation[:, 0], levels / LEVELS, rtol=1e-6)
            for row, env in enumerate(ids.tolist()):
                if step.step_type[row] == FIRST and env in wanted:
                    assert levels[row] == wanted[env]
                    began += 1
            chosen = (ids + time) % LEVELS
            wanted |= dict(zip(ids.tolist(), chosen.tolist(), strict=True))
            pool.send(ids, act(2, chosen))
        assert began > 10


def test_without_a_method_a_level_is_a_seed():
    with SyncEnv(Seeded, 2, "for_loop", levels=100) as pool:
        np.testing.assert_allclose(pool.reset().observation[:, 0], [shown(0), shown(1)])
        for level in (17, 99, 17):
            steps = [pool.step(act(2, [level, 5])) for _ in range(3)]
            np.testing.assert_allclose(steps[-1].observation[:, 0], [shown(level), shown(5)])

    with SyncEnv(JaxSeeded, 2, "jax", levels=100) as pool:
        pool.reset()
        step = [pool.step(act(2, [17, 5])) for _ in range(3)][-1]
        wanted = [jax.random.uniform(jax.random.PRNGKey(level), (1,))[0] for level in (17, 5)]
        np.testing.assert_allclose(step.observation[:, 0], wanted, rtol=1e-6)


def test_an_evaluation_by_index_begins_episodes_in_jax():
    with SyncEnv(JaxNumbered, 3, "jax", first_index=2) as pool:
        np.testing.assert_allclose(pool.reset().observation[:, 0] * LEVELS, [2, 3, 4], rtol=1e-6)
        assert pool.spec.extras == ()


def test_levels_join_the_extras_of_an_environment():
    class Costs(costly.JaxCostly):
        def extras_spec(self):
            return {"cost": super().extras_spec()["cost"]}

        def extras(self, state):
            return {"cost": super().extras(state)["cost"]}

    with SyncEnv(Costs, 2, "jax", levels=9) as pool:
        assert sorted(pool.reset().extras) == ["cost", "level"]


def test_what_has_no_levels_is_refused():
    with pytest.raises(ValueError, match=r"levels must be 0 for CartPole-v1 of EnvPool.*for_loop"):
        SyncEnv("CartPole-v1", 1, "cpp", levels=3)
    with pytest.raises(EnvError, match=r"an entry 'level', which the pool adds"):
        SyncEnv(costly.Costly, 1, "for_loop", levels=3)
    with SyncEnv(NumberedDm, 1, "for_loop", levels=3) as pool:
        assert pool.reset().observation.tolist() == [[0]]
    with pytest.raises(EnvError, match=r"must have a method reset_with_index"):
        SyncEnv(costly.CostlyDm, 1, "for_loop", levels=3)
    with pytest.raises(ValueError, match=r"levels must be 0 for a game of several seats"):
        SyncEnv(RockPaperScissors, 2, "jax", levels=3)
    with pytest.raises(ValueError, match=r"levels must be an integer of at least 0"):
        SyncEnv(Numbered, 1, "for_loop", levels=-1)
