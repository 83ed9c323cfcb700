"""TD3+BC: the policy's loss by plain numpy; the rest is TD3's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.td3 import TD3
from rlstack.agents.td3_bc import TD3BC, TD3BCConfig
from rlstack.exploration import Greedy
from rlstack.families.off_policy import DeterministicOutput
from tests.agent_cases import FAST, FIRST, LAST, MID, UNEVEN, VECTOR, Setting, quick_jit
from tests.agents.linear_control import DISCOUNT, SGD, make_batch, networks, unit, values_of

SETTINGS = {"td3-bc": Setting(TD3BCConfig(optimizer=FAST), VECTOR, UNEVEN)}

KEY = jax.random.PRNGKey(7)


def make(**config):
    cfg = TD3BCConfig(**{"discount": DISCOUNT, "optimizer": SGD, **config})
    return TD3BC(cfg, VECTOR, UNEVEN, lambda *_: networks(2), Greedy)


def items():
    return make_batch(
        [[MID, MID], [FIRST, LAST], [LAST, FIRST], [FIRST, FIRST]], DeterministicOutput
    )


@pytest.mark.parametrize("weight", [0.0, 2.5])
def test_the_policys_loss_by_hand(weight):
    agent, batch = make(critic_weight=weight), items()
    params = agent.initial_params(KEY)
    loss = quick_jit(agent.policy_loss)(params.policy, params.critics, batch)
    first = batch.trajectory.timestep.observation[0, :2]  # the others are no transitions
    action = np.tanh(first @ np.asarray(params.policy))
    value = values_of(params.critics, first, action)[:, 0]
    distance = (action - unit(batch.trajectory.agent_output.action[0, :2])) ** 2
    expected = -weight * value.mean() / np.abs(value).mean() + distance.mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_the_scale_of_the_values_is_no_part_of_the_gradient():
    agent, batch = make(), items()
    params = agent.initial_params(KEY)
    large = jax.tree.map(lambda x: 100.0 * x, params.critics)
    gradient = quick_jit(jax.grad(agent.policy_loss))
    np.testing.assert_allclose(
        gradient(params.policy, params.critics, batch),
        gradient(params.policy, large, batch),
        rtol=1e-4,
    )
    # By finite differences, with the mean size held.
    first = batch.trajectory.timestep.observation[0, :2]
    size = np.abs(values_of(params.critics, first, np.tanh(first @ params.policy))[:, 0]).mean()

    def held(policy):
        action = np.tanh(first @ policy)
        value = values_of(params.critics, first, action)[:, 0]
        distance = (action - unit(batch.trajectory.agent_output.action[0, :2])) ** 2
        return -2.5 * value.mean() / size + distance.mean()

    policy = np.asarray(params.policy, np.float64)
    for i in range(policy.size):
        step = np.zeros(policy.size)
        step[i] = 1e-5
        step = step.reshape(policy.shape)
        slope = (held(policy + step) - held(policy - step)) / 2e-5
        found = np.asarray(gradient(params.policy, params.critics, batch)).ravel()[i]
        np.testing.assert_allclose(found, slope, rtol=1e-3, atol=1e-5)


def test_the_critics_and_targets_are_those_of_td3():
    assert TD3BC.loss is TD3.loss
    assert TD3BC.update_learner_state is TD3.update_learner_state
    nothing = make_batch([[LAST, FIRST]] * 2, DeterministicOutput)
    agent = make()
    params = agent.initial_params(KEY)
    assert float(agent.policy_loss(params.policy, params.critics, nothing)) == 0.0
    assert jnp.isfinite(jax.grad(agent.policy_loss)(params.policy, params.critics, nothing)).all()
    with pytest.raises(ValueError, match="critic_weight must be at least 0"):
        make(critic_weight=-1.0)
