"""The adapter of gymnax: its boundaries, options and names."""

import subprocess
import sys
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.checks import EnvError
from rlstack.envs import SyncEnv
from rlstack.imports import versions
from rlstack.jax_envs import pixels
from rlstack.jax_envs.libraries.from_gymnax import GymnaxEnv, make_gymnax
from rlstack.jax_envs.libraries.limits import check_limit
from rlstack.jax_envs.toy import DeepSea
from rlstack.types import StepType

FIRST, MID, LAST = map(int, StepType)


@pytest.fixture(autouse=True, scope="module")
def _gymnax():
    pytest.importorskip("gymnax")


def test_a_time_limit_truncates_and_a_fall_terminates():
    with SyncEnv("CartPole-v1", 1, "jax", options={"max_steps_in_episode": 3}) as env:
        steps = [env.reset(), *(env.step(np.ones(1, np.int32)) for _ in range(5))]
    assert [int(s.step_type[0]) for s in steps] == [FIRST, MID, MID, LAST, FIRST, MID]
    assert [float(s.discount[0]) for s in steps] == [1.0] * 6
    assert [float(s.reward[0]) for s in steps] == [0, 1, 1, 1, 0, 1]
    # Pushed to the right in each step, the cart moves on until the last observation.
    speeds = [float(s.observation[0, 1]) for s in steps[:4]]
    assert speeds == sorted(speeds)
    assert speeds[3] > 0.4 > abs(float(steps[4].observation[0, 1]))

    with SyncEnv("CartPole-v1", 1, "jax") as env:
        timestep = env.reset()
        while timestep.step_type[0] != LAST:
            timestep = env.step(np.ones(1, np.int32))
    assert float(timestep.discount[0]) == 0.0
    assert abs(float(timestep.observation[0, 2])) > 12 * 2 * np.pi / 360  # the fallen pole


def test_cartpole_is_seen_as_two_images():
    plain, seen = make_gymnax("CartPole-v1", {}), pixels.CartPole(height=5, width=25)
    key = jax.random.PRNGKey(1)
    env, _ = plain.reset(key)
    state, observation = seen.reset(key)
    first = observation
    assert first.shape == (5, 25, 2)
    np.testing.assert_array_equal(observation[..., 0], observation[..., 1])
    for _ in range(6):
        before = observation
        expected, outcome = plain.step(key, env, 1), seen.step(key, state, 1)
        env, state, observation = expected.state, outcome.state, outcome.observation
        assert (expected.reward, expected.terminated) == (outcome.reward, outcome.terminated)
        np.testing.assert_array_equal(observation[..., 1], before[..., 0])
    place, _, angle, _ = np.asarray(expected.observation, np.float64)
    cart = 12 + place / 4.8 * 24  # a picture of 4.8 units has its middle in column 12
    columns = np.arange(25)
    for row, above in ((0, 4), (3, 1)):
        light = np.asarray(observation[row, :, 0], np.float64)
        assert 250 <= light.sum() <= 255  # one pixel, which two columns may share
        assert (light @ columns) / light.sum() == pytest.approx(
            cart + above * np.tan(angle), abs=0.02
        )
    wide = np.asarray(observation[4, :, 0], np.float64)
    assert 4 * 255 - 5 <= wide.sum() <= 4 * 255 + 5
    single = pixels.CartPole(height=5, width=25, images=1)
    assert single.step(key, state, 0).observation.shape == (5, 25, 1)
    np.testing.assert_array_equal(single.reset(key)[1][..., 0], first[..., 0])
    with pytest.raises(ValueError, match="height must be at least 4"):
        pixels.CartPole(height=3)


def test_a_game_of_minatar_whose_state_says_that_it_is_over():
    """MinAtar's states keep ``terminal``, which is true after a time limit too."""
    options = {"max_steps_in_episode": 4, "use_minimal_action_set": True}
    with SyncEnv("Breakout-MinAtar", 2, "jax", options=options) as env:
        assert env.spec.action.num_values == 3
        steps = [env.reset(), *(env.step(np.zeros(2, np.int32)) for _ in range(6))]
    assert [int(s.step_type[0]) for s in steps] == [FIRST, MID, MID, MID, LAST, FIRST, MID]
    assert float(steps[4].discount[0]) == 1.0


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("game", "limit"),
    [
        *(("Breakout", 4), ("Asterix", 15), ("Freeway", 40), ("SpaceInvaders", 15)),
        *(("Breakout", 2000), ("Asterix", 2000), ("SpaceInvaders", 2000)),
    ],
)
def test_the_games_of_minatar_end_with_their_last_observation(game, limit):
    """gymnax's own ``step`` gives the first observation of the next episode instead."""
    import gymnax

    name, options = f"{game}-MinAtar", {"max_steps_in_episode": limit}
    env = make_gymnax(name, options)
    raw, raw_params = gymnax.make(name)
    raw_params = raw_params.replace(**options)
    step, raw_step = jax.jit(env.step), jax.jit(raw.step)
    key = jax.random.PRNGKey(limit)
    state, _ = jax.jit(env.reset)(key)
    steps, ended = 0, False
    while not ended:
        key, step_key, action_key = jax.random.split(key, 3)
        action = jax.random.randint(action_key, (), 0, env.action_spec().num_values)
        before, outcome = state, step(step_key, state, action)
        state, steps = outcome.state, steps + 1
        ended = outcome.terminated or outcome.truncated
    by_time = limit < 2000
    assert (bool(outcome.terminated), bool(outcome.truncated)) == (not by_time, by_time)
    assert (steps == limit) == by_time
    last, *_ = raw.step_env(step_key, before, action, raw_params)
    np.testing.assert_array_equal(outcome.observation, last)
    after, _, _, done, _ = raw_step(step_key, before, action, raw_params)
    assert done and not np.array_equal(outcome.observation, after)


def test_minatar_gives_no_warnings_about_gymnax_itself():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make_gymnax("Breakout-MinAtar", {})
        state, _ = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
        jax.eval_shape(env.step, jax.random.PRNGKey(0), state, 0)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "name", ["Catch-bsuite", "DeepSea-bsuite", "MemoryChain-bsuite", "UmbrellaChain-bsuite"]
)
def test_observations_of_bsuite_have_the_dtype_of_their_spec(name):
    """The space of Catch says int64, which JAX does not have, and its observations are floats."""
    with SyncEnv(name, 2, "jax") as env:
        timestep = env.reset()
        for _ in range(3):
            assert timestep.observation.dtype == env.spec.observation.dtype == np.float32
            timestep = env.step(np.zeros(2, np.int32))


def test_deep_sea_is_that_of_gymnax():
    rng, options = np.random.default_rng(0), {"size": 5}
    with (
        SyncEnv(DeepSea, 32, "jax", options=options) as own,
        SyncEnv("DeepSea-bsuite", 32, "jax", options=options) as other,
    ):
        found, wanted = own.reset(), other.reset()
        for _ in range(30):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)
            action = rng.choice(2, 32, p=[0.3, 0.7]).astype(np.int32)
            found, wanted = own.step(action), other.step(action)


def test_continuous_actions():
    with SyncEnv("Pendulum-v1", 2, "jax") as env:
        assert env.spec.action.shape == (1,)
        env.reset()
        rewards = env.step(np.full((2, 1), 9.0, np.float32)).reward  # clipped to its bounds
        assert (rewards < 0).all()


def test_names_and_options_that_gymnax_lacks():
    with pytest.raises(ValueError, match="did you mean 'CartPole-v1'"):
        SyncEnv("CartPole-v2", 1, "jax")
    with pytest.raises(ValueError, match=r"options must be fields .*max_steps_in_episode"):
        SyncEnv("CartPole-v1", 1, "jax", options={"size": 3})


@pytest.mark.slow
@pytest.mark.chosen
def test_gymnax_is_imported_without_pictures_and_networks():
    program = """if True:
        import sys
        from rlstack.jax_envs.libraries.from_gymnax import make_gymnax
        make_gymnax("CartPole-v1", {})
        assert not {"pandas", "seaborn", "matplotlib", "flax.linen"} & set(sys.modules)
        import flax
        from flax import linen
        assert flax.linen.Dense is linen.Dense
        assert isinstance(linen.Dense(3), sys.modules["flax.linen"].Module)
        from gymnax.environments.misc import pong
        assert len(pong.sns.color_palette()) == 10
        assert "pandas" in sys.modules
        assert pong.colors.ListedColormap(["red"]).N == 1
        from matplotlib import colors, pyplot
        assert pong.plt.figure is pyplot.figure and pong.colors.Colormap is colors.Colormap
    """
    subprocess.run([sys.executable, "-c", program], timeout=100, check=True)


def test_without_gymnax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ValueError, match=r"rlstack\[jax-envs\]"):
        make_gymnax("CartPole-v1", {})  # pools keep an environment that was made before


@pytest.mark.parametrize(
    ("name", "limit", "action"), [("MountainCar-v0", 20, 1), ("Breakout-MinAtar", 4, 0)]
)
def test_a_limit_ends_episodes_in_every_version(name, limit, action):
    with SyncEnv(name, 2, "jax", options={"max_steps_in_episode": limit}) as env:
        env.reset()
        ends = []
        for step in range(1, 3 * limit + 4):
            timestep = env.step(np.full(2, action, np.int32))
            if timestep.step_type[0] == LAST:
                ends.append((step, float(timestep.discount[0])))
    assert ends == [(limit, 1.0), (2 * limit + 1, 1.0), (3 * limit + 2, 1.0)]


class Params(NamedTuple):
    """What params of gymnax have."""

    max_steps_in_episode: int = 5

    def replace(self, **changes):
        return self._replace(**changes)


class Counting:
    """An environment as of gymnax: counts; falls after ``fall`` steps, and has a limit."""

    fall = 100

    def observation_space(self, params):
        return type("Box", (), {"low": 0.0, "high": 9.0, "shape": (), "dtype": jnp.float32})()

    def action_space(self, params):
        return type("Discrete", (), {"n": 2})()

    def reset_env(self, key, params):
        return jnp.float32(0), jnp.int32(0)

    def done(self, time, params):
        return time >= self.fall

    def step_env(self, key, time, action, params):
        time = time + 1
        return time.astype(jnp.float32), time, 1.0, self.done(time, params), {}


class OfVersion0(Counting):
    """Its ``done`` is also true at the limit."""

    def done(self, time, params):
        return (time >= self.fall) | (time >= params.max_steps_in_episode)


class OfVersion1(Counting):
    """Tells its limit apart."""

    def is_truncated(self, time, params):
        return time >= params.max_steps_in_episode


@pytest.mark.parametrize("kind", [OfVersion0, OfVersion1])
@pytest.mark.parametrize(("fall", "flags"), [(9, (False, True)), (5, (True, False))])
def test_both_versions_mean_the_same(kind, fall, flags, monkeypatch):
    monkeypatch.setattr(Counting, "fall", fall)
    env, key = GymnaxEnv("counting", kind(), Params()), jax.random.PRNGKey(0)
    check_limit(f"counting {kind} {fall}", (), GymnaxEnv("counting", kind(), Params(1)))
    state, _ = env.reset(key)
    for step in range(1, 6):
        outcome = env.step(key, state, 0)
        state = outcome.state
        found = bool(outcome.terminated), bool(outcome.truncated)
        assert found == (flags if step == 5 else (False, False))


def test_a_limit_that_ends_nothing_is_an_error():
    env = GymnaxEnv("endless", Counting(), Params(1))
    with pytest.raises(
        EnvError, match=r"JAX environment endless: a step limit must end an episode"
    ):
        check_limit("endless", (), env)


def test_a_version_that_is_not_known_is_refused_in_one_line(monkeypatch):
    versions.unknown.cache_clear()
    monkeypatch.setattr(versions, "installed", lambda name: "2.0.1")
    with pytest.raises(EnvError, match=r"gymnax must be at least 0.0.9 and below 2, .* got 2.0.1"):
        make_gymnax("CartPole-v1", {})
    versions.unknown.cache_clear()
