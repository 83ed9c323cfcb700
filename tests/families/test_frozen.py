"""Params that do not learn act with the counts of their run."""

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.exploration import Counts
from rlstack.families.frozen import Frozen, FrozenParams
from tests.agent_cases import MID, CountingAgent, random_timesteps, settings


class Telling(CountingAgent):
    """Acts with the params and the counts of its state."""

    def initial_state(self, batch_size):
        zeros = jnp.zeros(batch_size, jnp.int32)
        return {"inside": Counts(zeros, zeros)}

    def actor_step(self, rng_key, params, timestep, state):
        counts = state["inside"]
        moved = counts._replace(env_steps=counts.env_steps + 1, episodes=counts.episodes + 1)
        return (params + 0 * counts.env_steps, counts), {"inside": moved}


def test_params_bring_the_steps_of_their_run_and_episodes_go_on():
    agent = Frozen(Telling())
    state, key = agent.initial_state(2), jax.random.PRNGKey(0)
    timestep = random_timesteps(settings()["dqn"].obs_spec, [MID, MID])
    for params, steps in ((5, 70), (6, 30), (5, 70)):
        frozen = FrozenParams(params, jnp.int32(steps))
        (own, counts), state = jax.jit(agent.actor_step)(key, frozen, timestep, state)
        assert own.tolist() == [params] * 2
        np.testing.assert_array_equal(counts.env_steps, [steps] * 2)
    np.testing.assert_array_equal(state["inside"].episodes, [3, 3])
    assert agent.initial_params(key) == FrozenParams(0, 0)
