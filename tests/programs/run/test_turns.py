"""PPO learns a game whose seats act in turn, and is evaluated in a synchronous pool."""

import numpy as np
import pytest

import rlstack
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy_replay
from tests.programs import running

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
@pytest.mark.chosen
def test_ppo_learns_to_bid(tmp_path):
    # A bid is the bidder's reward, and the other agent loses it, so high bids are best.
    experiment = Experiment(
        preset="bidding",
        agent=PPOConfig(num_minibatches=1, optimizer=OptimizerConfig(learning_rate=1e-2)),
        env=EnvConfig(
            "rlstack.envs.seats.pettingzoo:AEC",
            num_envs=8,
            type="thread",
            wait_num=4,
            num_workers=8,
            options={"game": "tests.envs.seats.turn_envs:Bidding"},
        ),
        network=NetworkConfig(hidden_sizes=(16,)),
        replay=on_policy_replay(8, 8),
        evaluator=EvaluatorConfig(episodes=4, num_envs=2),
        frames=4_000,
    )
    result = running.run(experiment, tmp_path / "run")
    assert result.eval_episodes == 4
    policy = rlstack.load(tmp_path / "run")
    first = {"observation": np.zeros(2, np.float32), "action_mask": np.ones(10, np.int8)}
    chances = policy.predict(first).probabilities["action"].ravel()
    assert chances @ np.arange(10) > 7.0  # 4.5 at random
