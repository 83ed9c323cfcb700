"""Steps at which a seat is not in its game are FIRST before FIRST: no agent learns from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agent import EpochAgent
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.exploration import Sample
from rlstack.families.normalised import normalised
from rlstack.families.policy_gradient import PolicyGradientOutput
from rlstack.math.n_step import n_step
from rlstack.networks import ActorCriticOutput, from_functions
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import (
    FIRST,
    GRU,
    LAST,
    MID,
    ONE_OF_4,
    VECTOR,
    Case,
    Setting,
    acted_batch,
    assert_close,
    quick_jit,
)
from tests.agents import test_policy_gradient, test_ppo, test_pqn

# A seat leaves in step 3 and joins again in step 6; another one joins in step 2.
COLUMNS = [
    [FIRST, MID, MID, LAST, FIRST, FIRST, FIRST, MID, MID],
    [FIRST, FIRST, FIRST, MID, MID, LAST, FIRST, MID, MID],
]
ABSENT = [[4, 5], [0, 1]]  # the first two of each row of FIRST, and nothing of the rest
SETTINGS = {
    "ppo": test_ppo.SETTINGS["ppo-separate"],
    "ppo-gru": Setting(test_ppo.PPO_SMALL, VECTOR, ONE_OF_4, GRU),
    "impala": test_policy_gradient.SETTINGS["impala"],
    "a2c-gru": test_policy_gradient.SETTINGS["a2c-gru"],
    "reinforce": test_policy_gradient.SETTINGS["reinforce"],
    "pqn": test_pqn.SETTINGS["pqn"],
}
QUICK = ("ppo", "reinforce")


def unrolls(c):
    """A batch with absent steps, and the same batch without them."""
    batch = acted_batch(c, c.params, np.array(COLUMNS, np.int32).T)
    kept = [np.delete(np.arange(9), gone) for gone in ABSENT]

    def keep(x):
        return np.stack([x[rows, column] for column, rows in enumerate(kept)], axis=1)

    return batch, batch._replace(trajectory=jax.tree.map(keep, batch.trajectory))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.chosen])
        for name in SETTINGS
    ],
)
def test_loss_and_gradients_are_those_without_the_absent_steps(name):
    c = Case(SETTINGS[name])
    agent, found = c.agent, []
    for batch in unrolls(c):
        data = batch
        if isinstance(agent, EpochAgent):  # all rows as one minibatch
            _, data, _ = agent.prepare(c.params, c.learner_state, batch)
        grads, output = quick_jit(agent.compute_gradients)(c.params, c.learner_state, data)
        found.append((grads, output.logs))
    assert_close(*found)


def test_ppos_losses_of_a_seat_that_left_by_hand():
    """Two seats; the second one leaves in its first step, and its other rows count nowhere."""

    def zeros(params, key, seen):
        return ActorCriticOutput(jnp.zeros((len(seen), 4)), jnp.zeros(len(seen)))

    network = from_functions(lambda key, seen: {}, zeros, VECTOR)
    cfg = PPOConfig(discount=0.5, gae_lambda=1.0, clip_ratio=0.5, value_clip=0.0, num_minibatches=1)
    agent = PPO(cfg, VECTOR, ONE_OF_4, lambda *_: network, Sample)
    kinds = np.array([[FIRST, MID, MID, LAST], [FIRST, LAST, FIRST, FIRST]], np.int32).T
    reward = np.array([[0, 1, 2, 3], [0, 4, 0, 0]], np.float32).T
    discount = np.array([[1, 1, 1, 0], [1, 0, 1, 1]], np.float32).T
    timestep = TimeStep(kinds, reward, discount, np.zeros((4, 2, 3), np.float32))
    ratios = np.array([[1.0, 1.2, 0.9, 1.0], [1.1, 9.0, 9.0, 9.0]]).T  # 9 would be clipped
    acted = PolicyGradientOutput(
        action=np.zeros((4, 2), np.int32),
        behaviour_log_prob=np.log(0.25 / ratios).astype(np.float32),
        value=np.zeros((4, 2), np.float32),
    )
    trajectory = Transition(timestep, acted, (), np.zeros((4, 2), np.int32))
    state = agent.initial_learner_state(jax.random.PRNGKey(0), {})
    _, rows, _ = agent.prepare({}, state, Batch(trajectory, np.ones(2, np.float32)))
    loss, logs = agent.loss({}, rows)
    advantages = np.array([1 + 2 / 2 + 3 / 4, 2 + 3 / 2, 3, 4])  # of the four transitions
    standard = (advantages - advantages.mean()) / (advantages.std() + cfg.advantage_epsilon)
    np.testing.assert_allclose(
        logs["policy_loss"], -(standard * [1.0, 1.2, 0.9, 1.1]).mean(), rtol=1e-4
    )
    np.testing.assert_allclose(logs["value_loss"], (advantages**2).mean() / 2, rtol=1e-5)
    np.testing.assert_allclose(logs["entropy"], np.log(4), rtol=1e-5)
    assert logs["clip_fraction"] == 0
    assert np.isfinite(loss)


def test_an_item_that_begins_with_an_absent_step_has_no_transition():
    c = Case(SETTINGS["impala"])
    batch, _ = unrolls(c)
    starts = [jax.tree.map(lambda x, t=t: x[t : t + 3], batch.trajectory) for t in range(7)]
    valid = np.array([n_step(start, 0.9).valid for start in starts])
    assert valid[:, 0].tolist() == [True, True, True, False, False, False, True]
    assert valid[:, 1].tolist() == [False, False, True, True, True, False, True]


@pytest.mark.slow
@pytest.mark.chosen
def test_statistics_are_those_without_the_absent_steps():
    cfg = NormalisationConfig(observations=True, rewards="return")
    c = Case(SETTINGS["reinforce"])
    agent = normalised(c.agent, cfg)
    params = agent.initial_params(c.key)
    state = agent.initial_learner_state(c.key, params)
    c.agent, c.act = agent, quick_jit(agent.actor_step)
    c.params = params
    after, expected = (agent._take(params, state, batch)[0].pending for batch in unrolls(c))
    assert_close(after, expected)
    assert float(after.observation.num_seen) == 2 * 8 - 4
