"""The soak tells growth from noise."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks import soak

SECONDS = np.arange(0.0, 1200.0, 2.0)


def noise(scale):
    return np.random.default_rng(0).normal(0.0, scale, len(SECONDS))


def test_noise_and_saw_teeth_are_flat():
    teeth = 200.0 + SECONDS % 60.0 / 10.0
    for values in (200.0 + noise(5.0), teeth, 200.0 - SECONDS / 100.0):
        assert soak.fit("actor/0", "memory MB", SECONDS, values).is_flat


def test_a_leak_is_found_with_its_slope():
    leaking = soak.fit("actor/0", "memory MB", SECONDS, 200.0 + SECONDS / 60.0 + noise(5.0))
    assert not leaking.is_flat  # 1 MB a minute
    assert leaking.per_hour == pytest.approx(60.0, rel=0.1)
    threads = soak.fit("learner", "threads", SECONDS, 20.0 + SECONDS // 200.0)
    assert not threads.is_flat


@pytest.mark.slow
@pytest.mark.launchpad
@pytest.mark.timeout(400, method="thread")
def test_a_short_soak():
    pytest.importorskip("launchpad")
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert "learner " in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
