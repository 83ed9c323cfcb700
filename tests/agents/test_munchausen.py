"""Munchausen DQN: its targets by hand."""

import jax
import numpy as np
import pytest

from rlstack.agents.munchausen import Munchausen, MunchausenConfig
from rlstack.exploration import Greedy
from rlstack.math.n_step import n_step
from tests.agent_cases import FAST, LAST, MASKED, MID, ONE_OF_4, VECTOR, Setting, quick_jit
from tests.agents.test_dqn import DISCOUNT, KEY, ONLINE, TARGET, linear_network, make_batch

SETTINGS = {"munchausen": Setting(MunchausenConfig(optimizer=FAST), MASKED, ONE_OF_4)}

TEMPERATURE, CLIP = 0.5, -1.0


def make(**config):
    cfg = MunchausenConfig(discount=DISCOUNT, temperature=TEMPERATURE, **config)
    return Munchausen(cfg, VECTOR, ONE_OF_4, lambda *_: linear_network(), Greedy)


def by_hand(item, reward, discount, before, after, action, bonus):
    """Equation 2 of the paper for one transition, in plain Python."""

    def log_policy(observation):
        values = observation @ TARGET.astype(float)
        weights = np.exp(values / TEMPERATURE)
        return values, np.log(weights / weights.sum())

    _, log_pi = log_policy(before[item])
    helped = bonus * max(CLIP, min(0.0, TEMPERATURE * log_pi[action[item]]))
    values, log_pi = log_policy(after[item])
    soft = sum(
        np.exp(log_pi[a]) * (values[a] - TEMPERATURE * log_pi[a]) for a in range(len(values))
    )
    return reward[item] + helped + DISCOUNT * discount[item] * soft


@pytest.mark.parametrize("bonus", [0.0, 0.9])
def test_targets_are_the_papers(bonus):
    batch = make_batch([[MID, MID], [MID, LAST], [MID, LAST]] + [[MID, MID]] * 5)
    batch.trajectory.timestep.discount[1, 2] = 1  # a time limit
    transition = n_step(batch.trajectory, DISCOUNT)
    targets = quick_jit(make(bonus=bonus).targets)(KEY, TARGET, transition)
    steps = batch.trajectory.timestep
    expected = [
        by_hand(
            item,
            steps.reward[1],
            steps.discount[1],
            steps.observation[0],
            steps.observation[1],
            batch.trajectory.agent_output.action[0],
            bonus,
        )
        for item in range(8)
    ]
    np.testing.assert_allclose(targets, expected, rtol=1e-4)


def test_the_bonus_is_clipped_and_the_target_is_a_constant():
    batch = make_batch([[MID, MID]] * 16)
    transition = n_step(batch.trajectory, DISCOUNT)
    plain, helped = (make(bonus=b).targets(KEY, TARGET, transition) for b in (0.0, 1.0))
    lost = np.asarray(helped - plain)
    assert lost.min() == pytest.approx(CLIP, abs=1e-5) and lost.max() < 0 and lost.max() > CLIP
    agent = make()
    moved = jax.grad(lambda target: agent.loss(KEY, ONLINE, target, batch)[0])(TARGET)
    assert not np.any(moved)


@pytest.mark.parametrize("changes", [{"bonus": 1.5}, {"bonus_clip": 0.5}, {"double": False}])
def test_configs_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        make(**changes)
