"""The adapter of Brax: its boundaries, options and names; and Brax itself where it is installed."""

import importlib.util
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.jax_envs.factory import make_jax_env
from rlstack.types import StepType

FIRST, MID, LAST = map(int, StepType)


class State(NamedTuple):
    """What Brax's environments return."""

    pipeline_state: Any
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    metrics: dict
    info: dict


class Rolling:
    """Moves by its action; falls beyond ``edge``."""

    action_size = 1

    def __init__(self, edge: float = 1e9, backend: str = "generalized"):
        if backend not in ("generalized", "spring"):
            raise ValueError(f"unknown backend: {backend}")
        self._edge = edge

    def reset(self, rng):
        zero = jnp.zeros(())
        return State(zero, jnp.zeros(2), zero, zero, {"speed": zero}, {})

    def step(self, state, action):
        at = state.pipeline_state + action[0]
        done = jnp.where(at > self._edge, 1.0, 0.0)
        return State(at, jnp.stack([at, action[0]]), action[0], done, {"speed": action[0]}, {})


@pytest.fixture
def _fake(monkeypatch):
    envs = types.ModuleType("brax.envs")
    envs._envs = {"rolling": Rolling, "halfcheetah": Rolling}
    envs.get_environment = lambda env_name, **options: envs._envs[env_name](**options)
    brax = types.ModuleType("brax")
    brax.envs = envs
    monkeypatch.setitem(sys.modules, "brax", brax)
    monkeypatch.setitem(sys.modules, "brax.envs", envs)


@pytest.mark.parametrize(
    ("options", "discount"), [({"episode_length": 3}, 1.0), ({"edge": 2.5}, 0.0)]
)
def test_episodes_end_with_their_last_observation(_fake, options, discount):
    with SyncEnv("brax/rolling", 2, "jax", options=options) as env:
        steps = [env.reset(), *(env.step(np.full((2, 1), 9.0, np.float32)) for _ in range(5))]
    assert [int(s.step_type[0]) for s in steps] == [FIRST, MID, MID, LAST, FIRST, MID]
    assert [float(s.discount[0]) for s in steps] == [1, 1, 1, discount, 1, 1]
    # An action is clipped to 1; the last position is that of the episode that ends.
    assert [float(s.observation[1, 0]) for s in steps] == [0, 1, 2, 3, 0, 1]
    assert [float(s.reward[1]) for s in steps] == [0, 1, 1, 1, 0, 1]


def test_a_fall_at_the_limit_is_a_termination(_fake):
    env = make_jax_env("brax/rolling", {"episode_length": 1, "edge": 0.5})
    state, _ = env.reset(jax.random.PRNGKey(0))
    outcome = env.step(jax.random.PRNGKey(0), state, jnp.ones(1))
    assert outcome.terminated and not outcome.truncated


def test_warnings_of_mujoco_are_logged_and_leave_no_file(_fake, monkeypatch, caplog):
    """MuJoCo appends them to MUJOCO_LOG.TXT in the working directory unless someone takes them."""
    takers = []

    class Heavy(Rolling):
        def __init__(self):
            takers[-1]("the mass is large")
            super().__init__()

    mujoco = types.ModuleType("mujoco")
    mujoco.set_mju_user_warning = takers.append
    monkeypatch.setitem(sys.modules, "mujoco", mujoco)
    monkeypatch.setitem(sys.modules["brax.envs"]._envs, "heavy", Heavy)
    make_jax_env("brax/heavy")
    assert caplog.messages == ["MuJoCo: the mass is large"]
    assert takers[1:] == [None]


def test_names_and_options_that_brax_lacks(_fake):
    with pytest.raises(ValueError, match=r"got 'cheetah'; did you mean 'brax/halfcheetah'"):
        make_jax_env("brax/cheetah")
    with pytest.raises(ValueError, match=r"brax/rolling: options must be .*size"):
        make_jax_env("brax/rolling", {"size": 3})
    with pytest.raises(ValueError, match=r"options must be .*unknown backend: magic"):
        make_jax_env("brax/rolling", {"backend": "magic"})
    with pytest.raises(ValueError, match=r"episode_length must be a positive number.* got 0"):
        make_jax_env("brax/rolling", {"episode_length": 0})


def test_without_brax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "brax", None)
    with pytest.raises(ValueError, match=r"brax/ant needs Brax, .*rlstack\[brax\]"):
        make_jax_env("brax/ant")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("brax") is None, reason="Brax is not installed")
def test_brax_itself_ends_episodes_with_their_last_observation():
    options = {"backend": "spring", "episode_length": 12}
    env = make_jax_env("brax/inverted_pendulum", options)
    step = jax.jit(env.step)
    key = jax.random.PRNGKey(0)
    state, observation = jax.jit(env.reset)(key)
    for force, ends in ((0.0, "truncated"), (1.0, "terminated")):
        now, seen = state, [observation]
        while True:
            outcome = step(key, now, jnp.full(1, force))
            now = outcome.state
            seen.append(outcome.observation)
            if outcome.terminated or outcome.truncated:
                break
        assert (bool(outcome.terminated), bool(outcome.truncated)) == (
            ends == "terminated",
            ends == "truncated",
        )
        assert (len(seen) == 13) == (ends == "truncated")
        # The pole's angle grows until the end, and is not that of a new episode.
        assert (abs(float(seen[-1][1])) > 0.2) == (ends == "terminated")
