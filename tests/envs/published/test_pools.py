"""Published environments step in the pools; tests/learning trains agents on them."""

import jax
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.types import StepType

CASES = {
    "bsuite": ("tests.envs.published.builders:catch", {}),
    "minatar": (
        "tests.envs.published.builders:minatar",
        {"name": "MinAtar/Breakout-v1", "steps": 20},
    ),
    "dm_control": (
        "tests.envs.published.builders:control",
        {"domain": "cartpole", "task": "balance"},
    ),
    "minigrid": ("tests.envs.published.builders:minigrid", {"name": "MiniGrid-Empty-5x5-v0"}),
    "gymnasium": ("FrozenLake-v1", {"is_slippery": False}),
}


@pytest.mark.parametrize("package", CASES)
@pytest.mark.timeout(120)
def test_it_steps_through_episodes(package):
    pytest.importorskip(package)
    name, options = CASES[package]
    rng = np.random.default_rng(0)
    with SyncEnv(name, 2, "for_loop", seed=3, options=options) as env:
        action = env.spec.action
        timesteps = [env.reset()]
        for _ in range(120):
            if np.issubdtype(action.dtype, np.integer):
                chosen = rng.integers(0, action.num_values, (2, *action.shape))
            else:
                chosen = rng.uniform(-1, 1, (2, *action.shape))
            timesteps.append(env.step(chosen))
    types = np.array([timestep.step_type for timestep in timesteps])
    assert (types[0] == StepType.FIRST).all() and (types[1] != StepType.FIRST).any()
    if package != "dm_control":  # its episodes have 250 steps
        assert (types == StepType.LAST).any(axis=0).all()
    specs = jax.tree.leaves(env.spec.observation)
    for timestep in timesteps:
        for spec, x in zip(specs, jax.tree.leaves(timestep.observation), strict=True):
            assert x.shape == (2, *spec.shape) and x.dtype == spec.dtype
            assert np.isfinite(x).all()
