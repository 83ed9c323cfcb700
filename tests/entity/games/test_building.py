"""The games as built by pools, configs and worker processes."""

import inspect
import pickle

import numpy as np
import pytest

from rlstack.entity.games import GAMES
from rlstack.entity.games import __dict__ as names
from rlstack.entity.games.mine_sweeper import MineSweeper
from rlstack.envs import SyncEnv
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import EnvConfig


def draw(spec, observation, rng):
    """A random legal action of every environment, from the masks alone."""
    action = {}
    for name, entry in spec.items():
        mask = observation["action_mask"][name]
        legal = mask.reshape((len(mask), entry.shape[0], -1))
        noise = np.where(legal, rng.random(legal.shape), -1.0)
        action[name] = noise.argmax(axis=-1).astype(np.int32)
    return action


@pytest.mark.parametrize("name", GAMES)
def test_random_actions_play_every_game_in_a_pool(name):
    rng, ends = np.random.default_rng(0), 0
    with make_env(EnvConfig(f"rlstack.entity.games:{name}", num_envs=3), seed=2) as pool:
        timestep = pool.reset()
        for _ in range(600):
            timestep = pool.step(draw(pool.spec.action, timestep.observation, rng))
            assert np.isfinite(timestep.reward).all()
            ends += int(timestep.last().sum())
            assert not timestep.discount[
                timestep.last()
            ].any()  # no game reaches its step limit in these steps
    assert ends >= 3


def test_options_go_to_the_game_and_seeds_to_each_environment():
    cfg = EnvConfig("rlstack.entity.games:MineSweeper", 4, options={"num_mines": 3})
    with make_env(cfg, seed=1) as pool:
        mines = pool.reset().observation["features"]["Mine"]
    assert mines.shape == (4, 3, 2)
    assert len({row.tobytes() for row in mines}) == 4


def test_a_builder_shows_the_options_of_its_game():
    builder = GAMES["MineSweeper"]
    assert builder.game is MineSweeper
    assert inspect.signature(builder) == inspect.signature(MineSweeper)
    assert all(names[name] is built for name, built in GAMES.items())
    assert len(builder(num_robots=1).game.reset().features["Robot"]) == 1


@pytest.mark.timeout(60)
def test_builders_go_to_worker_processes():
    builder = pickle.loads(pickle.dumps(GAMES["Xor"]))
    assert builder.game is GAMES["Xor"].game
    with SyncEnv(builder, 2, "process", seed=1, num_workers=2) as pool:
        features = pool.reset().observation["features"]
    with SyncEnv(GAMES["Xor"], 2, "for_loop", seed=1) as pool:
        expected = pool.reset().observation["features"]
    assert np.array_equal(features["Input"], expected["Input"])


def test_an_episode_that_is_over_at_once_is_skipped():
    with SyncEnv(GAMES["Minefield"], 1, "for_loop", options={"num_steps": 1}, seed=0) as pool:
        timestep = pool.reset()
        for _ in range(3000):
            place, goal = (timestep.observation["features"][k][0, 0] for k in ("Vehicle", "Target"))
            if timestep.first()[0]:
                assert np.hypot(*(place[:2] - goal)) > 5
            timestep = pool.step({"steer": np.zeros((1, 1), np.int32)})
