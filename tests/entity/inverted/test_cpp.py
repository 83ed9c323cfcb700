"""The C++ client: its example game compiles and plays, so the protocol is language-neutral."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlstack.entity.inverted import SocketGame
from rlstack.envs import SyncEnv

CLIENT = Path(__file__).resolve().parents[3] / "clients" / "cpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed (g++ or clang++)"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    program = tmp_path_factory.mktemp("cpp") / "count"
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", "count.cpp", "-o", program]
    done = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("address", ["", "unix:{}/socket"])
def test_the_game_plays(count, tmp_path, address):
    options = {"command": str(count), "address": address.format(tmp_path)}
    rng = np.random.default_rng(0)
    with SyncEnv(SocketGame, 2, "thread", options=options) as pool:
        timestep, seen = pool.reset(), set()
        for _ in range(40):
            assert timestep.first().all()
            beans = timestep.observation["count"]["Bean"]
            actions = rng.integers(0, 4, (2, 1), np.int32)
            timestep = pool.step({"count": actions})
            assert timestep.last().all() and not timestep.discount.any()
            np.testing.assert_array_equal(timestep.reward == 1, actions[:, 0] == beans)
            seen |= set(beans.tolist())
            timestep = pool.step({"count": actions})
        assert seen == {0, 1, 2, 3}
        assert pool.stats()["restarts"] == 0


def test_a_game_without_a_trainer_says_what_it_needs(count):
    done = subprocess.run([count], capture_output=True, text=True, timeout=10, env={})
    assert done.returncode == 1
    assert "RLSTACK_GAME_ADDRESS is not set" in done.stderr
