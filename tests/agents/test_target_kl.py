"""PPO's target KL: the epochs of an update end before the first minibatch above it."""

import dataclasses

import jax
import numpy as np
import pytest

from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.configs.learner import LearnerConfig
from rlstack.learning.learner import Learner
from rlstack.replay import Sample
from rlstack.types import LearnerOutput
from tests.agent_cases import FAST, NORMALISED, ONE_OF_4, VECTOR, Case, Setting

CFG = PPOConfig(num_epochs=4, num_minibatches=2, optimizer=FAST, entropy_cost=0.0)


def learned(made, batch, minibatches="scan"):
    learner = Learner(LearnerConfig(minibatches=minibatches), made.agent, None, made.key)
    logs = learner.step(Sample(batch, np.arange(len(batch.weights), dtype=np.uint64)))
    return jax.tree.leaves((learner.params, learner.learner_state)), logs


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("normalisation", [None, NORMALISED])
def test_the_epochs_end_at_the_target(normalisation):
    free = Setting(CFG, VECTOR, ONE_OF_4)
    if normalisation is not None:
        free = free._replace(normalisation=normalisation)
    batch = Case(free).batch
    without, logs = learned(Case(free), batch)
    assert "minibatches" not in logs and logs["kl"] > 1e-4

    def limited(target):
        return Case(free._replace(cfg=dataclasses.replace(CFG, target_kl=target)))

    # A limit that is never reached changes nothing.
    far, far_logs = learned(limited(1e9), batch)
    assert far_logs["minibatches"] == 8
    for left, right in zip(without, far, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)
    # A limit in between drops the minibatches from the first one above it, in a scan and in calls.
    near = limited(float(logs["kl"]) / 4)
    scanned, scan_logs = learned(near, batch)
    called, call_logs = learned(near, batch, "calls")
    assert 1 < scan_logs["minibatches"] < 8
    assert scan_logs["minibatches"] == call_logs["minibatches"]
    for left, right in zip(scanned, called, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)
    assert any(not np.allclose(a, b, atol=1e-5) for a, b in zip(scanned, without, strict=True))
    counts = [int(x) for x in scanned if x.dtype == np.int32 and x.shape == ()]
    assert int(scan_logs["minibatches"]) - 1 in counts  # the last one was dropped


class _Drifting(PPO):
    """Its policy has moved by these amounts at the minibatches of an update."""

    def __init__(self):  # without a network
        self.cfg, self.may_stop = PPOConfig(target_kl=0.02), True

    def batch_logs(self, rows):
        return {}

    def prepare(self, params, learner_state, batch):
        return learner_state, batch, np.arange(len(batch))[:, None]

    def update(self, params, learner_state, minibatch):
        return params + 1, learner_state, LearnerOutput({"kl": minibatch[0]})


@pytest.mark.parametrize(
    ("kl", "gone_over", "made"),
    [
        ([0.0, 0.01, 0.0199, 0.0201, 0.0], 4, 3),  # the one above the target is dropped
        ([0.0, 0.025, 0.0], 2, 1),
        ([0.021], 1, 0),
        ([0.0, 0.0199, 0.0199], 3, 3),
    ],
)
def test_the_target_is_what_the_option_says(kl, gone_over, made):
    params, _, output = _Drifting().learner_step(0, (), np.array(kl, np.float32))
    assert (int(params), int(output.logs["minibatches"])) == (made, gone_over)


def test_a_negative_target_is_refused():
    with pytest.raises(ValueError, match="target_kl must be at least 0"):
        PPOConfig(target_kl=-0.1)
