"""Steps at which a seat is not in its game are FIRST before FIRST: no agent learns from them."""

import jax
import numpy as np
import pytest

from rlstack.agent import EpochAgent
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.families.normalised import normalised
from rlstack.math.n_step import n_step
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


def test_an_item_that_begins_with_an_absent_step_has_no_transition():
    c = Case(SETTINGS["impala"])
    batch, _ = unrolls(c)
    starts = [jax.tree.map(lambda x, t=t: x[t : t + 3], batch.trajectory) for t in range(7)]
    valid = np.array([n_step(start, 0.9).valid for start in starts])
    assert valid[:, 0].tolist() == [True, True, True, False, False, False, True]
    assert valid[:, 1].tolist() == [False, False, True, True, True, False, True]


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
