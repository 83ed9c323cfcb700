"""The Rust client: its own tests, and its example games as environments."""

import os
import subprocess

import numpy as np
import pytest

from rlstack.entity.inverted import SocketGame
from rlstack.envs import SyncEnv
from tests.entity.inverted.test_inverted import random_actions
from tests.entity.rust_crate import CRATE, NEEDS_CARGO, cargo
from tests.entity.rust_crate import examples as examples  # a fixture

pytestmark = [NEEDS_CARGO, pytest.mark.timeout(180)]


@pytest.mark.slow
@pytest.mark.chosen
def test_the_crates_own_tests_pass():
    assert "25 passed" in cargo("test", "--lib")


@pytest.mark.slow
@pytest.mark.chosen
def test_the_crates_documentation_runs():
    assert "2 passed" in cargo("test", "--doc")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "check",
    [["fmt", "--check"], ["clippy", "--all-targets", "--offline", "--", "--deny", "warnings"]],
    ids=["fmt", "clippy"],
)
def test_the_crate_is_formatted_and_has_no_warnings(check):
    if subprocess.run(["cargo", check[0], "--version"], capture_output=True).returncode:
        pytest.skip(f"cargo {check[0]} is not installed")
    environ = {**os.environ, "CARGO_TARGET_DIR": str(CRATE / "target")}
    done = subprocess.run(
        ["cargo", *check], cwd=CRATE, env=environ, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_examples_play(examples):
    score = cargo("run", "--example", "count", "--", "random")
    assert abs(float(score) - 0.25) < 0.06
    rng = np.random.default_rng(0)
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
