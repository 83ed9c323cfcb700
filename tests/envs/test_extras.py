"""`TimeStep.extras` of every kind of pool."""

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

from rlstack.checks import EnvCrash, EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.types import StepType
from tests.envs import costly

pytestmark = pytest.mark.timeout(120)
POOLS = {
    "for_loop": (costly.Costly, "for_loop"),
    "thread": (costly.Costly, "thread"),
    "process": (costly.Costly, "process"),
    "dm_env": (costly.CostlyDm, "for_loop"),
    "dm_env_process": (costly.CostlyDm, "process"),
    "game": (costly.two_seats, "for_loop"),
    "game_process": (costly.two_seats, "process"),
    "jax": (costly.JaxCostly, "jax"),
    "jax_game": (costly.JaxCostlyGame, "jax"),
}


def actions(rng, rows):
    return rng.integers(0, costly.ACTIONS, rows).astype(np.int32)


def check_all(steps):
    """The extras of all steps are right, and steps of each kind and many levels are among them."""
    for step in steps:
        assert costly.differing(step) == 0
        assert step.extras["cost"].dtype == np.float32
        assert step.extras["level"].dtype == np.int32
    kinds = {
        (int(kind), float(discount))
        for step in steps
        for kind, discount in zip(step.step_type, step.discount, strict=True)
    }
    first, mid, last = (int(kind) for kind in StepType)
    assert kinds == {(first, 1.0), (mid, 1.0), (last, 0.0), (last, 1.0)}
    assert {level for step in steps for level in step.extras["level"].tolist()} == set(range(5))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.chosen] if "_" in name else [])
        for name in POOLS
    ],
)
def test_each_step_has_the_extras_of_its_environment(name):
    builder, kind = POOLS[name]
    rng = np.random.default_rng(0)
    workers = {"num_workers": 2} if kind in ("process", "thread") else {}
    with SyncEnv(builder, 4, kind, seed=3, **workers) as pool:
        assert pool.spec.extras["level"].num_values == costly.LEVELS
        assert pool.spec.extras["cost"].shape == ()
        steps = [pool.reset(), *(pool.step(actions(rng, 4)) for _ in range(60))]
    check_all(steps)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", ["thread", "process", "jax"])
def test_asynchronous_pools_keep_extras_with_their_rows(name):
    builder, kind = POOLS[name]
    rng, steps = np.random.default_rng(0), []
    with AsyncEnv(builder, 4, 2, kind, seed=3) as pool:
        pool.async_reset()
        for _ in range(120):
            ids, step = pool.recv()
            steps.append(step)
            pool.send(ids, actions(rng, 2))
    check_all(steps)


def test_values_by_hand():
    """Level 1 lasts 4 steps, and its end is a truncation."""
    with SyncEnv(costly.JaxCostly, 1, "jax", seed=0) as pool:
        steps = [pool.reset()]
        while steps[-1].extras["level"][0] != 1 or not steps[-1].first()[0]:
            steps.append(pool.step(np.zeros(1, np.int32)))
        later = [pool.step(np.array([action], np.int32)) for action in (2, 0, 1, 2, 2)]
    assert [float(step.extras["cost"][0]) for step in later] == [2.0, 2.0, 3.5, 5.0, 0.0]
    assert [int(step.step_type[0]) for step in later] == [1, 1, 1, 2, 0]
    assert later[3].discount[0] == 1


def test_without_extras_a_step_has_none():
    with SyncEnv("CartPole-v1", 2) as pool:
        step = pool.reset()
        assert pool.spec.extras == step.extras == ()
        assert len(jax.tree.leaves(step)) == 4


class _Wrapped(gymnasium.Wrapper):
    """A user's wrapper, with an own observation."""


def test_gymnasium_wrappers_and_levels_that_start_elsewhere():
    def wrapped():
        return _Wrapped(costly.Costly(start=7))

    with SyncEnv(wrapped, 2, "for_loop", seed=1) as pool:
        steps = [pool.reset(), *(pool.step(np.zeros(2, np.int32)) for _ in range(20))]
    assert all(costly.differing(step) == 0 for step in steps)  # they count from 0


def test_what_an_environment_does_wrong_is_told():
    with (
        SyncEnv(costly.Costly, 1, "for_loop", options={"forgets": True}) as pool,
        pytest.raises(EnvError, match=r"entries of extras_space; cost, level is missing"),
    ):
        pool.reset()
        pool.step(np.zeros(1, np.int32))

    class Plain(costly.Costly):
        def __init__(self):
            super().__init__()
            self.extras_space = spaces.Box(0, 1)

    with pytest.raises(EnvError, match="extras_space must be a Dict of the entries of info"):
        SyncEnv(Plain, 1, "for_loop")

    class Odd(costly.CostlyDm):
        def __init__(self, shown):
            super().__init__()
            self.extras = lambda: shown

    for shown, message in (
        ({"cost": np.float32(np.nan), "level": 0}, r"extras\['cost'\] must be finite; got nan"),
        ({"cost": 0.5, "level": 5}, r"extras\['level'\] must lie in its space.*got 5"),
        ({"cost": np.zeros(2), "level": 0}, r"extras\['cost'\] must be what its space"),
        ({"level": 0}, r"extras: must be a dict with keys \['cost', 'level'\]"),
    ):
        with (
            SyncEnv(Odd, 1, options={"shown": shown}) as pool,
            pytest.raises(EnvError, match=message),
        ):
            pool.reset()

    class Crashing(costly.CostlyDm):
        def extras(self):
            raise KeyError("gone")

    with (
        SyncEnv(Crashing, 1, "for_loop") as pool,
        pytest.raises(EnvCrash, match="extras raised KeyError"),
    ):
        pool.reset()


def test_an_environment_in_jax_must_keep_its_spec():
    class Wrong(costly.JaxCostly):
        def extras(self, state):
            return {"cost": state[0] * jnp_zeros(), "level": state[1]}

    def jnp_zeros():
        return np.zeros(2, np.float32)

    with pytest.raises(EnvError, match=r"extras must be float32\(\); got float32\(2,\)"):
        SyncEnv(Wrong, 1, "jax")


def test_entries_of_envpools_info():
    pytest.importorskip("envpool")
    name = "Ant-v4"
    options = {"extras": ["reward_ctrl", "x_position"]}
    with SyncEnv(name, 3, options=options, seed=1) as pool, SyncEnv(name, 3, seed=1) as plain:
        assert sorted(pool.spec.extras) == ["reward_ctrl", "x_position"]
        assert pool.spec.extras["reward_ctrl"].dtype == np.float32
        step, other = pool.reset(), plain.reset()
        seen = [step]
        for t in range(5):
            action = np.full((3, 8), 0.1 * t, np.float32)
            step, other = pool.step(action), plain.step(action)
            np.testing.assert_array_equal(step.observation, other.observation)
            # -0.5 * |action|^2, Ant's cost of control: its 8 numbers are 0.1 t each.
            wanted = np.full(3, -0.5 * 8 * (0.1 * t) ** 2, np.float32)
            np.testing.assert_allclose(step.extras["reward_ctrl"], wanted, rtol=1e-5)
            seen.append(step)
    assert len({float(step.extras["x_position"][0]) for step in seen}) > 4
    with pytest.raises(ValueError, match=r"extras must name entries of EnvPool's info.*got secret"):
        SyncEnv(name, 1, options={"extras": ["secret"]})


def test_both_ways_to_envpools_data_give_the_same_extras():
    pytest.importorskip("envpool")
    from rlstack.envs.backend import PoolConfig
    from rlstack.envs.cpp.backend import CppBackend

    options = {"extras": "x_velocity"}
    found = []
    for direct in (True, False):
        backend = CppBackend("Hopper-v4", PoolConfig(2, 2, options=options), direct)
        backend.reset()
        steps = [backend.recv()[1]]
        for _ in range(30):
            backend.send(None, [np.full((2, 3), 0.5, np.float64)])
            steps.append(backend.recv()[1])
        backend.close()
        found.append(np.stack([step.extras["x_velocity"] for step in steps[1:]]))
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0]).max() > 0
