"""Pictures of environments in JAX, of their pools, and of runs that are watched."""

import dataclasses
import importlib.util
import io
import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from rich.console import Console

from rlstack.envs import SyncEnv
from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.game import GameOutcome
from rlstack.jax_envs.libraries.from_gymnax import CLASSIC, classic_control, grid
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.pictures.stage import Stage
from rlstack.programs.pictures.watch import watch
from tests.programs import running

HERE = __name__
needs_gymnax = pytest.mark.skipif(
    importlib.util.find_spec("gymnax") is None, reason="gymnax is not installed"
)


class Walk:
    """Counts the steps to the right; drawn as text."""

    render_fps = 4.0

    def observation_spec(self):
        return specs.Array((1,), np.float32, "place")

    def action_spec(self):
        return specs.DiscreteArray(2, np.int32, "move")

    def reset(self, rng_key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, rng_key, state, action):
        after = state + action
        return Outcome(after, jnp.full(1, after, jnp.float32), 1.0, after >= 5, False)

    def render(self, state):
        assert isinstance(state, np.ndarray) and state.shape == ()
        return "." * int(state) + "@"


class Two:
    """A game of two seats, drawn as one pixel of its time."""

    seats = ("left", "right")

    def observation_spec(self):
        return specs.Array((1,), np.float32, "time")

    def action_spec(self):
        return specs.DiscreteArray(2, np.int32, "move")

    def reset(self, rng_key):
        return jnp.int32(0), jnp.zeros((2, 1))

    def step(self, rng_key, state, action):
        after = state + 1 + action.sum()
        never = jnp.zeros(2, bool)
        return GameOutcome(after, jnp.full((2, 1), after, jnp.float32), jnp.zeros(2), never, False)

    def render(self, state):
        return np.full((1, 1, 3), state, np.uint8)


def test_a_pool_shows_each_of_its_environments():
    with SyncEnv(Walk, 2, "jax") as env:
        env.reset()
        assert [env.render(0), env.render(1)] == ["@", "@"]
        env.step(np.array([0, 1], np.int32))
        env.step(np.array([0, 1], np.int32))
        assert [env.render(0), env.render(1)] == ["@", "..@"]
        assert env.render_fps == 4
    with pytest.raises(RuntimeError, match="must be open"):
        env.render(0)


def test_both_seats_show_their_own_game():
    for options in ({}, {"seat_index": True}):  # which wraps the game
        with SyncEnv(Two, 4, "jax", options=options) as env:
            env.reset()
            env.step(np.array([0, 0, 1, 1], np.int32))
            assert [int(env.render(row)[0, 0, 0]) for row in range(4)] == [1, 1, 3, 3]
            assert env.render_fps is None


def test_other_pools_and_environments_show_nothing():
    with SyncEnv("CartPole-v1", 1, "for_loop") as env:
        assert env.render(0) is None and env.render_fps is None


@pytest.mark.slow
@pytest.mark.chosen
def test_watch_shows_the_environments_own_picture(tmp_path):
    base = running.ppo("single_process", frames=2)  # too few to learn
    env = EnvConfig(name=f"{HERE}:Walk", type="jax", num_envs=base.env.num_envs)
    running.run(dataclasses.replace(base, env=env), tmp_path / "run")
    stream = io.StringIO()
    found = watch(tmp_path / "run", console=Console(file=stream, width=80), max_steps=3)
    assert stream.getvalue().count("@") == found.frames
    stage = Stage(dataclasses.replace(base, env=env), seed=0)
    assert stage.picture(stage.pool.reset()) == "@" and stage.fps == 4
    stage.close()


def test_a_grid_has_a_colour_for_each_channel_and_the_last_one_wins():
    seen = np.zeros((2, 3, 4), bool)
    seen[0, 0, 1] = seen[0, 1, 2] = seen[1, 2, 1] = seen[1, 2, 2] = True
    picture = grid(seen)
    assert picture.shape == (2, 3, 3) and picture.dtype == np.uint8
    assert not picture[1, 0].any() and picture[0, 0].any()
    assert (picture[1, 2] == picture[0, 1]).all() and (picture[0, 0] != picture[0, 1]).any()
    assert grid(np.array([[0.0, 2.0], [1.0, 0.0]]))[..., 0].tolist() == [[0, 255], [127, 0]]
    assert not grid(np.zeros((2, 2))).any()


@pytest.mark.parametrize("name", CLASSIC)
def test_classic_control_looks_as_in_gymnasium(name):
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("pygame")
    env = gymnasium.make(name, render_mode="rgb_array")
    env.reset(seed=3)
    state = np.asarray(env.unwrapped.state, float)
    named = types.SimpleNamespace(**dict(zip(CLASSIC[name].fields, state, strict=True)))
    draw = classic_control(name, dataclasses.make_dataclass("Params", [])())
    picture = draw(named)
    assert picture.dtype == np.uint8 and np.array_equal(picture, env.render())
    first = CLASSIC[name].fields[0]
    setattr(named, first, getattr(named, first) + 0.3)
    assert not np.array_equal(picture, draw(named))


def test_without_pygame_there_is_a_warning_and_no_picture(monkeypatch):
    from gymnasium.error import DependencyNotInstalled

    def fail(name, params):
        raise DependencyNotInstalled("pygame is not installed")

    monkeypatch.setattr("rlstack.jax_envs.libraries.from_gymnax.ClassicControl", fail)
    with pytest.warns(RuntimeWarning, match="CartPole-v1 is not drawn: pygame is not installed"):
        assert classic_control("CartPole-v1", None) is None


@needs_gymnax
def test_pictures_of_gymnax():
    pytest.importorskip("pygame")
    shapes = {"CartPole-v1": (400, 600, 3), "Breakout-MinAtar": (10, 10, 3)}
    shapes |= {"Catch-bsuite": (10, 5, 3), "MemoryChain-bsuite": None}
    for name, shape in shapes.items():
        with SyncEnv(name, 1, "jax", seed=3) as env, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # gymnax's own
            env.reset()
            picture = env.render(0)
            assert (None if picture is None else picture.shape) == shape
            assert picture is None or picture.std() > 0


@pytest.mark.skipif(importlib.util.find_spec("brax") is None, reason="Brax is not installed")
def test_pictures_of_brax():
    from brax import envs

    from rlstack.jax_envs.libraries.from_brax import BraxEnv, BraxState

    env = envs.get_environment("halfcheetah")
    shown = BraxEnv(env, 10)
    pictures = []
    for height in (0.0, 0.4):
        q = np.array(env.sys.init_q)
        q[1] += height
        pipeline = types.SimpleNamespace(q=q, qd=np.zeros(env.sys.qd_size()))
        pictures.append(
            shown.render(BraxState(types.SimpleNamespace(pipeline_state=pipeline), np.int32(0)))
        )
    low, high = pictures
    assert low.shape == (360, 480, 3) and low.dtype == np.uint8 and low.std() > 20
    assert not np.array_equal(low, high) and round(shown.render_fps) == 20
    # A second model has buffers of its own.
    other = BraxEnv(envs.get_environment("ant"), 10)
    sys = other._env.sys
    pipeline = types.SimpleNamespace(q=np.array(sys.init_q), qd=np.zeros(sys.qd_size()))
    other.render(BraxState(types.SimpleNamespace(pipeline_state=pipeline), np.int32(0)))
    again = types.SimpleNamespace(q=np.array(env.sys.init_q), qd=np.zeros(env.sys.qd_size()))
    state = BraxState(types.SimpleNamespace(pipeline_state=again), np.int32(0))
    assert np.array_equal(shown.render(state), low)


def test_brax_without_opengl_is_not_drawn(monkeypatch):
    from rlstack.jax_envs.libraries import from_brax

    def fail(model):
        raise RuntimeError("no OpenGL here.")

    monkeypatch.setattr(from_brax, "BraxRenderer", fail)
    env = from_brax.BraxEnv(types.SimpleNamespace(sys=types.SimpleNamespace(mj_model=None)), 10)
    with pytest.warns(RuntimeWarning, match="not drawn.*no OpenGL here.*MUJOCO_GL"):
        assert env.render(None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert env.render(None) is None
