"""Agents learn in published environments, through the usual pools, to the returns stated here.

The packages are in the extra `dev`; a test whose package is missing is skipped.
"""

import dataclasses

import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import falling, on_policy_replay
from tests.learning.test_learning import FAST_PPO, learned_return

pytestmark = [pytest.mark.slow, pytest.mark.chosen, pytest.mark.timeout(240)]


def on(name, *, frames, options, env_type="for_loop", unroll=16, episodes=32, **rest):
    num_envs = 16
    return Experiment(
        preset="published",
        agent=rest.pop("agent", FAST_PPO),
        env=EnvConfig(name, num_envs=num_envs, type=env_type, num_workers=2, options=options),
        replay=on_policy_replay(num_envs, unroll),
        evaluator=EvaluatorConfig(episodes=episodes, num_envs=min(num_envs, episodes)),
        frames=frames,
        seed=1,
        **rest,
    )


def test_ppo_learns_bsuites_catch():
    pytest.importorskip("bsuite")
    found = on("tests.envs.published.builders:catch", frames=30_000, options={})
    assert learned_return(found) > 0.8  # random: -0.6


def test_ppo_learns_minatars_breakout():
    pytest.importorskip("minatar")
    found = on(
        "tests.envs.published.builders:minatar",
        frames=80_000,
        options={"name": "MinAtar/Breakout-v1"},
        agent=dataclasses.replace(FAST_PPO, entropy_cost=0.01),
    )
    assert learned_return(found) > 2.5  # random: 0.5


def test_ppo_learns_dm_controls_cartpole():
    pytest.importorskip("dm_control")
    found = on(
        "tests.envs.published.builders:control",
        frames=32_000,
        unroll=32,
        episodes=16,
        options={"domain": "cartpole", "task": "balance"},
        agent=dataclasses.replace(FAST_PPO, entropy_cost=0.0),
    )
    assert learned_return(found) > 225  # of 250 steps, each with a reward of at most 1


def test_ppo_learns_a_minigrid():
    pytest.importorskip("minigrid")
    found = on(
        "tests.envs.published.builders:minigrid",
        frames=40_000,
        options={"name": "MiniGrid-Empty-5x5-v0"},
        env_type="process",
        # 40,000 frames. With a fixed rate half of the seeds forget the way again.
        agent=dataclasses.replace(FAST_PPO, optimizer=falling(2e-3, 2_500)),
        network=NetworkConfig(scale_pixels=False),
    )
    assert learned_return(found) > 0.9  # the best path: 0.955


def test_ppo_learns_gymnasiums_frozen_lake():
    found = on("FrozenLake-v1", frames=30_000, options={"is_slippery": False})
    assert learned_return(found) == 1.0
