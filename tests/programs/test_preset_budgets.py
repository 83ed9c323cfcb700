"""The budgets of presets: updates, copies of targets and gradient steps, by hand."""

import pytest

from rlstack.programs.config.presets import preset
from tests.programs.test_preset_sources import steps_of_an_update


@pytest.mark.parametrize(
    ("name", "starts", "updates", "copies"),
    [
        # (10,000,000 - 20,000) / 4 updates, a copy after each 2,000.
        ("breakout-dqn", 20_000, 2_495_000, 1_247),
        # (50,000,000 - 20,000) / 4 updates.
        ("breakout-rainbow", 20_000, 12_495_000, 6_247),
        # 10,000,000 / 40 sequences, of which 500 come first; each is drawn 4 times, 64 at a time.
        ("pong-r2d2", 500 * 40, 15_593, 38),
    ],
)
def test_replay_of_atari_gives_enough_updates_and_copies_of_the_target(
    name, starts, updates, copies
):
    experiment = preset(name)
    replay = experiment.replay
    period = replay.period or 1
    assert replay.min_size * period == starts
    inserts = experiment.frames // period - replay.min_size
    made = int(inserts * replay.samples_per_insert // replay.batch_size)
    assert made == updates
    assert made // experiment.agent.target_period == copies
    assert starts <= experiment.frames / 50


@pytest.mark.parametrize(
    ("name", "updates", "gradient_steps"),
    [
        # 10,000,000 / (8 x 128) batches of 4 epochs of 4 minibatches.
        ("pong-ppo", 9_765, 156_240),
        ("breakout-ppo", 9_765, 156_240),
        ("pong-small-ppo", 1_953, 31_248),
        # 5,400,000 and 10,000,000 / (96 x 64) batches of 4 epochs of 12 minibatches.
        ("pong-gpu-ppo", 878, 42_144),
        ("breakout-gpu-ppo", 1_627, 78_096),
        # 10,000,000 / (32 x 20).
        ("pong-impala", 15_625, 15_625),
    ],
)
def test_on_policy_atari_ends_with_a_learning_rate_of_0(name, updates, gradient_steps):
    experiment = preset(name)
    assert experiment.frames // steps_of_an_update(experiment) == updates
    assert experiment.agent.optimizer.anneal_steps == gradient_steps


def test_small_r2d2_runs_have_the_constants_of_the_mean_that_they_were_tuned_for():
    """Of a mean over 20 and 12 transitions: norm 40 and eps 1e-5."""
    for name, learned, norm, eps in (
        ("memory-cartpole-r2d2", 20, 800.0, 2e-4),
        ("memorycue-r2d2", 12, 480.0, 1.2e-4),
    ):
        experiment = preset(name)
        assert experiment.replay.unroll_length - experiment.agent.burn_in == learned
        assert experiment.agent.max_grad_norm == norm
        assert experiment.agent.optimizer.eps == pytest.approx(eps)
