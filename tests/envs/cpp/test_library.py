"""EnvPool is imported without Matplotlib, and draws as it does otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlstack.envs.cpp import library

_DRAWN = """
import hashlib, sys
if sys.argv[1] == "deferred":
    from rlstack.envs.cpp import library
    envpool = library.load()
    assert "matplotlib" not in sys.modules
    assert library.load() is envpool
else:
    import envpool
    assert "matplotlib" in sys.modules, "put nothing off any more"
env = envpool.make_gymnasium("Game2048-v1", num_envs=2, seed=3, render_mode="rgb_array")
env.reset()
before = env.render()
env.step(env.action_space.sample()[None].repeat(2, 0) * 0)
print(hashlib.sha256(before.tobytes() + env.render().tobytes()).hexdigest())
"""


def _drawn(how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _DRAWN, how], capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.skipif("Game2048-v1" not in library.names(), reason="needs EnvPool 1.2.7")
def test_matplotlib_is_imported_when_something_is_drawn():
    assert _drawn("deferred") == _drawn("at once")
