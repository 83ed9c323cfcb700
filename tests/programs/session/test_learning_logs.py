"""The learning rate in force, explained variance, and logs to the last frame, in every topology."""

import dataclasses
import json

import numpy as np
import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig
from tests.programs.running import TOPOLOGIES, nothing_left, ppo, run

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")
_UPDATES, _RATE = 60, 1e-3  # so many that a program logs more than one line


def of_topology(topology):
    """PPO with a learning rate that falls to 0 over its updates, two optimizer steps each."""
    rate = OptimizerConfig(learning_rate=_RATE, anneal_steps=2 * _UPDATES)
    agent = PPOConfig(num_epochs=2, num_minibatches=1, optimizer=rate, value_head_optimizer=rate)
    experiment = ppo("single_process", frames=10**6, updates=_UPDATES)
    if topology == "fused":
        env = EnvConfig("rlstack.jax_envs.toy:Catch", 8, "jax")
        experiment = dataclasses.replace(experiment, env=env)
    return dataclasses.replace(experiment, agent=agent, topology=topology)


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        *(
            pytest.param(name, marks=pytest.mark.chosen)
            for name in ("single_process", "fused", "heavy_env")
        ),
        *TOPOLOGIES[1:],
    ],
)
def test_logs_have_the_learning_rate_and_explained_variance_to_the_last_frame(tmp_path, topology):
    with nothing_left():
        result = run(of_topology(topology), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    learned = [line for line in lines if "learner/loss" in line]
    rates = [line["learner/learning_rate"] for line in learned]
    # The first line is the mean over a few updates, and the last includes the last update.
    assert _RATE > rates[0] > rates[-1] > 0
    assert rates == sorted(rates, reverse=True)
    assert [line["learner/learning_rate/value_head"] for line in learned] == rates
    explained = np.array([line["learner/explained_variance"] for line in learned])
    assert np.isfinite(explained).all()
    assert (explained <= 1).all()
    assert explained.std() > 0
    # Both curves, of training and of evaluation, end where the run does.
    counted = [line for line in lines if "learner/steps" in line]
    assert counted[-1]["env_frames"] == result.env_frames
    assert counted[-1]["learner/steps"] == result.learner_steps == _UPDATES
    judged = [line for line in lines if "evaluator/episode_return" in line]
    assert judged[-1]["env_frames"] == result.env_frames
