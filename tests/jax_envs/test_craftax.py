"""The adapter of Craftax: its boundaries, options and names; and Craftax where it is installed."""

import dataclasses
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.jax_envs.factory import make_jax_env
from rlstack.types import StepType

FIRST, MID, LAST = map(int, StepType)
CLASSIC = "craftax/Craftax-Classic-Symbolic-v1"


@dataclasses.dataclass(frozen=True)
class Params:
    """What Craftax's params have, without the rules of the game."""

    max_timesteps: int = 10_000
    health: int = 9

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class Starving:
    """Loses one health in a step of action 1; ends without health or time."""

    default_params = Params()

    def observation_space(self, params):
        return type("Box", (), {"low": 0.0, "high": 9.0, "shape": (2,), "dtype": jnp.float32})()

    def action_space(self, params):
        return type("Discrete", (), {"n": 2})()

    def get_obs(self, state):
        return jnp.stack([state["health"], state["time"]]).astype(jnp.float32)

    def reset_env(self, key, params):
        state = {"health": jnp.int32(params.health), "time": jnp.int32(0)}
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        state = {"health": state["health"] - action, "time": state["time"] + 1}
        return self.get_obs(state), state, -1.0 * action, self.is_terminal(state, params), {}

    def is_terminal(self, state, params):
        return (state["health"] <= 0) | (state["time"] >= params.max_timesteps)


@pytest.fixture
def _fake(monkeypatch):
    def make(name, auto_reset):
        assert not auto_reset
        return Starving()

    made = types.ModuleType("craftax.craftax_env")
    made.make_craftax_env_from_name = make
    monkeypatch.setitem(sys.modules, "craftax", types.ModuleType("craftax"))
    monkeypatch.setitem(sys.modules, "craftax.craftax_env", made)


@pytest.mark.parametrize(
    ("options", "discount"), [({"max_timesteps": 3}, 1.0), ({"health": 3}, 0.0)]
)
def test_episodes_end_with_their_last_observation(_fake, options, discount):
    with SyncEnv(CLASSIC, 2, "jax", options=options) as env:
        steps = [env.reset(), *(env.step(np.ones(2, np.int32)) for _ in range(5))]
    health = options.get("health", 9)
    assert [int(s.step_type[0]) for s in steps] == [FIRST, MID, MID, LAST, FIRST, MID]
    assert [float(s.discount[0]) for s in steps] == [1, 1, 1, discount, 1, 1]
    assert [int(s.observation[1, 0]) for s in steps] == [health - x for x in (0, 1, 2, 3, 0, 1)]
    assert [float(s.reward[1]) for s in steps] == [0, -1, -1, -1, 0, -1]


def test_a_death_at_the_limit_is_a_termination(_fake):
    env = make_jax_env(CLASSIC, {"max_timesteps": 1, "health": 1})
    state, _ = env.reset(jax.random.PRNGKey(0))
    outcome = env.step(jax.random.PRNGKey(0), state, jnp.int32(1))
    assert outcome.terminated and not outcome.truncated


def test_names_and_options_that_craftax_lacks(_fake):
    with pytest.raises(ValueError, match=r"Craftax; .*did you mean 'craftax/Craftax-Classic-Symb"):
        make_jax_env("craftax/Craftax-Classic-Symbolic")
    with pytest.raises(ValueError, match=r"fields of its params \(health, max.*got size, wide\."):
        make_jax_env(CLASSIC, {"wide": 3, "size": 2, "health": 1})


def test_without_craftax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "craftax", None)
    with pytest.raises(ValueError, match=r"needs Craftax, .*rlstack\[craftax\]"):
        make_jax_env(CLASSIC)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("craftax") is None, reason="needs Craftax")
def test_craftax_itself_is_cut_at_its_limit():
    env = make_jax_env(CLASSIC, {"max_timesteps": 3})
    step, key = jax.jit(env.step), jax.random.PRNGKey(0)
    state, observation = jax.jit(env.reset)(key)
    spec = env.observation_spec()
    assert observation.shape == spec.shape == (1345,) and observation.dtype == spec.dtype
    for time in (1, 2, 3):
        outcome = step(key, state, jnp.int32(0))
        state = outcome.state
        assert int(state.timestep) == time
        assert not outcome.terminated and bool(outcome.truncated) == (time == 3)
    picture = env.render(state)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and 0 < picture.mean() < 255
