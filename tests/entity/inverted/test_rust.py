"""The Rust client: its own tests, and its example games as environments."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlstack.entity.inverted import SocketGame
from rlstack.envs import SyncEnv
from tests.entity.inverted.test_inverted import random_actions

CRATE = Path(__file__).resolve().parents[3] / "clients" / "rust"
pytestmark = [
    pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed"),
    pytest.mark.timeout(180),
]


def cargo(target, *arguments):
    command = ["cargo", *arguments, "--offline", "--locked", "--target-dir", str(target)]
    done = subprocess.run(command, cwd=CRATE, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


def test_the_crates_own_tests_pass(target):
    assert "16 passed" in cargo(target, "test")


def test_the_examples_play(target):
    score = cargo(target, "run", "--example", "count", "--", "random")
    assert abs(float(score) - 0.25) < 0.06
    rng = np.random.default_rng(0)
    examples = target / "debug" / "examples"
    with SyncEnv(SocketGame, 2, options={"command": str(examples / "count")}) as pool:
        timestep, rewards = pool.reset(), []
        while len(rewards) < 100:
            beans = timestep.observation["count"]["Bean"]
            right = len(rewards) < 50
            actions = random_actions(rng, pool, timestep)
            if right:
                actions = {"count": beans[:, None]}
            timestep = pool.step(actions)
            assert timestep.last().all()
            np.testing.assert_array_equal(timestep.reward == 1.0, actions["count"][:, 0] == beans)
            rewards += timestep.reward.tolist()
            timestep = pool.step(actions)
            assert timestep.first().all()
        assert sum(rewards[:50]) == 50
    race = {"command": str(examples / "race"), "agents": 2}
    with SyncEnv(SocketGame, 2, options=race) as pool:
        timestep = pool.reset()
        for tick in range(4):
            assert (timestep.observation["actors"]["run"][1, 0] >= 0) == (tick % 2 == 0)
            timestep = pool.step({"run": np.ones((2, 1), np.int32)})
        assert timestep.last().all()
        np.testing.assert_array_equal(timestep.observation["features"]["Me"][:, 0, 0], [4, 2])
