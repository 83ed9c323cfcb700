"""PQN: its targets and its loss by hand, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents import AGENTS
from rlstack.agents.pqn import PQN, PQNConfig
from rlstack.exploration import Greedy
from rlstack.networks import NetworkConfig, q_network
from rlstack.types import Batch
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    LSTM,
    MASKED,
    MID,
    ONE_OF_4,
    VECTOR,
    Setting,
    acted_batch,
    case,
    quick_jit,
)

_LAYER = NetworkConfig(hidden_sizes=(8,), norm="layer")
SETTINGS = {
    "pqn": Setting(PQNConfig(num_minibatches=2, optimizer=FAST), MASKED, ONE_OF_4, _LAYER),
    "pqn-lstm": Setting(PQNConfig(num_minibatches=2, optimizer=FAST), VECTOR, ONE_OF_4, LSTM),
}

DISCOUNT, LAMBDA = 0.9, 0.6
# Columns: a termination inside, a time limit inside, no boundary.
STEP_TYPE = np.array([[MID, MID, MID], [MID, LAST, MID], [LAST, FIRST, MID], [FIRST, MID, MID]])


def make(**config):
    cfg = PQNConfig(discount=DISCOUNT, return_lambda=LAMBDA, num_minibatches=1, **config)
    return PQN(cfg, VECTOR, ONE_OF_4, lambda *specs: q_network(*specs, _LAYER), Greedy)


def trajectory():
    """An acted trajectory of the agent's network; the second column ends by a time limit."""
    discount = np.where(STEP_TYPE == LAST, 0.0, 1.0).astype(np.float32)
    discount[1, 1] = 1.0
    agent_case = case("pqn-lstm")
    batch = acted_batch(agent_case, agent_case.params, STEP_TYPE, discount=discount)
    return batch.trajectory


def by_hand(rewards, discounts, values, step_types):
    """The Q(lambda) returns of one environment, in plain Python; None where no transition is."""
    found = [None] * len(rewards)
    following = values[-1]
    for t in reversed(range(len(rewards))):
        if step_types[t + 1] == FIRST:  # the episode ended at t: nothing flows across
            following = values[t]
            continue
        mixed = (1 - LAMBDA) * values[t + 1] + LAMBDA * following
        following = found[t] = rewards[t] + DISCOUNT * discounts[t] * mixed
    return found


def test_targets_are_the_papers_returns():
    steps = trajectory()
    targets = np.asarray(make().targets(steps))
    timestep, values = steps.timestep, steps.agent_output.value
    for env in range(3):
        wanted = by_hand(
            timestep.reward[1:, env],
            timestep.discount[1:, env],
            values[:, env],
            STEP_TYPE[:, env],
        )
        assert (wanted[2] is None) == (env == 0)
        for t, target in enumerate(wanted):
            if target is not None:
                np.testing.assert_allclose(targets[t, env], target, rtol=1e-5)


def test_the_loss_is_half_the_mean_squared_error_over_true_transitions():
    agent, steps = make(), trajectory()
    params = agent.initial_params(jax.random.PRNGKey(1))
    state = agent.initial_learner_state(jax.random.PRNGKey(2), params)
    _, rows, schedule = quick_jit(agent.prepare)(params, state, Batch(steps, np.ones(3)))
    assert sorted(np.asarray(schedule)[0].tolist()) == list(range(9))
    loss, logs = agent.loss(params, rows)
    targets, valid = agent.targets(steps), STEP_TYPE[1:] != FIRST
    errors = []
    for t, env in zip(*np.nonzero(valid), strict=True):
        timestep = jax.tree.map(lambda x, t=t, env=env: x[t][env : env + 1], steps.timestep)
        values = agent.network.apply(None, params, timestep, ())[0][0]
        errors.append(float(targets[t, env] - values[steps.agent_output.action[t, env]]))
    assert len(errors) == 7
    np.testing.assert_allclose(loss, 0.5 * np.mean(np.square(errors)), rtol=1e-4)
    np.testing.assert_allclose(logs["td_error"], np.mean(np.abs(errors)), rtol=1e-4)


def test_acting_stores_the_value_of_the_best_legal_action():
    c = case("pqn")
    steps = c.batch.trajectory
    values, _ = c.agent.network.apply(
        None, c.params, jax.tree.map(lambda x: jnp.asarray(x[0]), steps.timestep), ()
    )
    legal = np.where(steps.timestep.observation["action_mask"][0] > 0, values, -np.inf)
    np.testing.assert_allclose(steps.agent_output.value[0], legal.max(-1), rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"return_lambda": 1.5}, {"num_epochs": 0}, {"epsilon_end": -0.1}]
)
def test_configs_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        PQNConfig(**changes)


def test_noisy_layers_are_refused():
    with pytest.raises(ValueError, match=r"noisy_sigma must be 0 .* got 0\.5"):
        AGENTS[PQNConfig].network(MASKED, ONE_OF_4, NetworkConfig(noisy_sigma=0.5))


def test_more_minibatches_than_steps_are_refused():
    c = case("pqn")
    agent = PQN(
        PQNConfig(num_minibatches=100), MASKED, ONE_OF_4, lambda *s: q_network(*s, _LAYER), Greedy
    )
    with pytest.raises(ValueError, match="at most the 20 rows of a batch"):
        agent.prepare(c.params, c.learner_state, c.batch)
