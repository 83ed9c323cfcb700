"""A sampler by recency against uniform sampling, on a task whose rewards change."""

import dataclasses

import gymnasium
import numpy as np
import pytest

from rlstack.configs.acting import EvaluatorConfig
from tests.programs import running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chosen,
    pytest.mark.timeout(300),
]

FRAMES, ENVS, LENGTH = 4000, 4, 10
CHANGE = FRAMES // ENVS // 2  # steps of one environment until the other choice pays


class Changing(gymnasium.Env):
    """One of two choices pays 1 a step, and the other one later; the observation says nothing."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        return np.ones(1, np.float32), {}

    def step(self, action):
        pays = int(self._steps >= CHANGE)
        self._steps += 1
        over = self._steps % LENGTH == 0
        return np.ones(1, np.float32), float(action == pays), False, over, {}


class Recent:
    """The chance of an item halves with each 100 newer ones."""

    def __call__(self, rng, items, batch_size):
        age = rng.exponential(100 / np.log(2), batch_size).astype(int)
        return len(items) - 1 - age % len(items)


def late_return(sampler, directory):
    """The mean return of training episodes in the last quarter of the run."""
    experiment = running.dqn(
        "single_process",
        frames=FRAMES,
        env={"name": f"{__name__}:Changing", "type": "for_loop", "num_envs": ENVS},
    )
    agent = dataclasses.replace(
        experiment.agent, discount=0.0, epsilon_frames=500, epsilon_end=0.1, target_rate=0.05
    )
    replay = dataclasses.replace(
        experiment.replay, unroll_length=1, max_size=FRAMES, sampler_factory=sampler
    )
    experiment = dataclasses.replace(
        experiment,
        agent=agent,
        replay=replay,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        loggers=("jsonl",),
    )
    running.run(experiment, directory)
    lines = running.metrics(directory)
    late = [
        line["actor/episode_return"]
        for line in lines
        if line["env_frames"] > 0.75 * FRAMES and "actor/episode_return" in line
    ]
    assert late
    return np.mean(late)


def test_recent_items_learn_what_has_changed(tmp_path):
    recent, uniform = (
        late_return(sampler, tmp_path / name)
        for sampler, name in ((Recent, "recent"), ("", "uniform"))
    )
    assert recent > 0.8 * LENGTH  # the best is 9.5, because a tenth of the choices are random
    assert uniform < 0.5 * LENGTH
