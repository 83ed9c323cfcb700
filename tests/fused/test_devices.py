"""The topology fused on several devices: as on one, up to the order of sums."""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from rlstack.programs.config.experiment import LearnerConfig
from rlstack.programs.run import train
from rlstack.programs.run.fused import Fused
from tests.fused.test_fused_run import dqn, ppo, run, saved
from tests.programs.running import params, same

_DEVICES = 4
_LINES = ["ppo", "dqn", "resumed", "moved"]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(400)
def test_four_devices_learn_what_one_learns():
    flags = f"--xla_force_host_platform_device_count={_DEVICES} --xla_backend_optimization_level=0"
    env = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", "from tests.fused import test_devices as t; t.four_devices()"],
        cwd=Path(__file__).resolve().parents[2],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == _LINES


def four_devices():
    """Runs in the process of the test above."""
    assert len(jax.local_devices()) == _DEVICES
    made = []
    close = Fused.close
    Fused.close = lambda self: (made.append(self), close(self))
    learner = LearnerConfig(devices=tuple(range(_DEVICES)))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for make in (ppo, dqn):
            one, four = root / f"{make.__name__}-1", root / f"{make.__name__}-4"
            run(make(), one)
            result = run(make(learner=learner), four)
            assert result.learner_steps == 20
            # Sums over a batch are made of one sum for each device. 20 updates with Adam make of
            # rounding errors of 1e-7 at most some 1e-5.
            for x, y in zip(params(one), params(four), strict=True):
                np.testing.assert_allclose(x, y, atol=2e-5)
            _check_places(made[-1])
            print(make.__name__)
        run(ppo(learner=learner, updates=10), root / "half")
        train.resume(root / "half", updates=20, stream=io.StringIO())
        assert saved(root / "half") == saved(root / "ppo-4")
        assert same(params(root / "half"), params(root / "ppo-4"))
        print("resumed")
        # A run of four devices goes on with one.
        config = root / "half" / "config.json"
        experiment = json.loads(config.read_text())
        experiment["learner"]["devices"] = []
        config.write_text(json.dumps(experiment))
        assert train.resume(root / "half", updates=22, stream=io.StringIO()).learner_steps == 22
        assert len(jax.tree.leaves(made[-1].state.learning)[0].devices()) == 1
        print("moved")


def _check_places(fused):
    """Environments are divided, and everything that learns is on each device."""
    state = fused.state
    for x in jax.tree.leaves((state.acting.env, state.acting.timestep)):
        assert x.addressable_shards[0].data.shape[0] * _DEVICES == x.shape[0]
    for x in jax.tree.leaves(state.learning):
        assert x.is_fully_replicated and len(x.devices()) == _DEVICES
    assert fused._run._cache_size() == 1
    for x in jax.tree.leaves(fused.learner.params):
        assert len(x.devices()) == 1
