"""Entries of a library's info as extras of its environments."""

import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.envs import SyncEnv
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.game import BatchedGame, GameOutcome
from rlstack.jax_envs.libraries.infos import WithInfos, with_infos

pytestmark = pytest.mark.timeout(120)


def test_entries_of_gymnax_and_their_names():
    pytest.importorskip("gymnax")
    options = {"max_steps_in_episode": 3, "extras": ["discount"]}
    with SyncEnv("CartPole-v1", 2, "jax", options=options) as pool:
        assert pool.spec.extras["discount"].shape == ()
        steps = [pool.reset(), *(pool.step(np.ones(2, np.int32)) for _ in range(5))]
    # gymnax's own discount is 0 where its done is, also at the time limit; FIRST shows 0.
    found = [float(step.extras["discount"][0]) for step in steps]
    assert found == [0, 1, 1, 0, 0, 1]
    with pytest.raises(ValueError, match=r"CartPole-v1: .* any of discount; got speed"):
        SyncEnv("CartPole-v1", 1, "jax", options={"extras": "speed"})


class State(NamedTuple):
    """What Brax's environments return."""

    pipeline_state: Any
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    metrics: dict
    info: dict


class Rolling:
    """Moves by its action."""

    action_size, dt = 1, 0.5

    def reset(self, rng):
        zero = jnp.zeros(())
        return State(zero, jnp.zeros(2), zero, zero, {"speed": zero}, {"rng": rng})

    def step(self, state, action):
        at = state.pipeline_state + action[0]
        seen = jnp.stack([at, action[0]])
        return State(at, seen, at, jnp.zeros(()), {"speed": 2 * action[0]}, state.info)


def test_metrics_of_brax(monkeypatch):
    envs = types.ModuleType("brax.envs")
    envs._envs = {"rolling": Rolling}
    envs.get_environment = lambda env_name, **options: Rolling(**options)
    brax = types.ModuleType("brax")
    brax.envs = envs
    monkeypatch.setitem(sys.modules, "brax", brax)
    monkeypatch.setitem(sys.modules, "brax.envs", envs)
    options = {"episode_length": 2, "extras": ["speed"]}
    with SyncEnv("brax/rolling", 2, "jax", options=options) as pool:
        moves = np.array([[0.5], [-1.0]], np.float32)
        steps = [pool.reset(), *(pool.step(moves) for _ in range(3))]
        assert pool.render_fps == 2
    speeds = [step.extras["speed"].tolist() for step in steps]
    assert speeds == [[0, 0], [1, -2], [1, -2], [0, 0]]
    with pytest.raises(ValueError, match=r"brax/rolling: .* any of rng, speed; got height"):
        SyncEnv("brax/rolling", 1, "jax", options={"extras": ["height"]})


class Team:
    """A game whose info has an entry by agent, one of seats, and one of the team."""

    seats = ("red", "blue", "green")

    def observation_spec(self):
        return specs.Array((1,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(9, np.int32)

    def reset(self, rng_key):
        return jnp.int32(0), jnp.zeros((3, 1))

    def step_with_info(self, rng_key, state, action):
        time = state + 1
        outcome = GameOutcome(
            time, jnp.full((3, 1), time, jnp.float32), jnp.zeros(3), jnp.zeros(3, bool), time >= 2
        )
        named = {name: action[i] * 10 for i, name in enumerate(self.seats)}
        return outcome, {"own": named, "rows": jnp.stack([action, action + 1], 1), "total": time}


def test_entries_of_games_belong_to_seats():
    env = BatchedGame(WithInfos(Team(), ["own", "rows", "total"], "team"))
    assert env.spec.extras["rows"].shape == (2,)
    state, first = env.reset(env.keys(range(6)))
    _, step = env.step(state, jnp.arange(6, dtype=jnp.int32))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(first.extras))
    np.testing.assert_array_equal(step.extras["own"], [0, 10, 20, 30, 40, 50])
    np.testing.assert_array_equal(step.extras["rows"][:, 1], [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(step.extras["total"], [1] * 6)


class _Plain:
    """An environment without pictures."""

    def observation_spec(self):
        return specs.Array((1,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(2, np.int32)

    def reset(self, rng_key):
        return jnp.zeros(()), jnp.zeros(1)


def test_without_the_option_an_environment_stays_as_it_is():
    plain = _Plain()
    assert with_infos(plain, {"backend": "x"}, "plain") is plain
    assert not hasattr(BatchedEnv, "extras")
