"""Learning from a batch in parts gives what the whole batch gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.checks import WrongKindError
from rlstack.networks import NetworkConfig, in_parts, q_network
from tests.agent_cases import (
    ONE_OF_4,
    VECTOR,
    assert_close,
    case,
    quick_jit,
    random_timesteps,
)
from tests.learning.test_learner import KEYS, Replay, make, sample

# Standardised advantages over masked rows, drawn actions and noise, states, drawn fractions.
QUICK = ["ppo-masked"]
OTHERS = [
    "sac",
    "ppo-gru-normalised",
    "ppo-entities",
    "impala-lstm",
    "rainbow",
    "iqn",
    "r2d2",
    "td3",
]
OTHERS += ["bc-structured"]


def learn_both(name):
    found = case(name)
    parts = found.agent.with_network(functools.partial(in_parts, parts=2))
    whole, divided = (
        learn(found.params, found.learner_state, found.batch)
        for learn in (found.learn, quick_jit(parts.learner_step))
    )
    assert_close(whole, divided, atol=2e-5, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", QUICK)
def test_parts_learn_what_the_whole_batch_does(name):
    learn_both(name)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", OTHERS)
def test_other_agents_learn_the_same_in_parts(name):
    learn_both(name)


def gradient(parts):
    """Compiles a gradient of a large batch; returns it, its inputs, and its temporary bytes."""
    network = q_network(VECTOR, ONE_OF_4, NetworkConfig(hidden_sizes=(64,) * 4))
    params = network.init(jax.random.PRNGKey(0))
    run = in_parts(network, parts) if parts > 1 else network
    timestep = random_timesteps(VECTOR, np.ones(4096))

    def loss(params, timestep):
        return jnp.square(run.apply(None, params, timestep, ())[0]).mean()

    compiled = jax.jit(jax.grad(loss)).lower(params, timestep).compile()
    return compiled, (params, timestep), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.chosen
def test_parts_need_less_memory():
    (whole, inputs, much), (parts, _, little) = gradient(1), gradient(16)
    assert_close(whole(*inputs), parts(*inputs), atol=1e-6)
    assert little < much / 4


def test_parts_must_divide_the_rows():
    with pytest.raises(ValueError, match=r"micro_batches must divide the 4 rows .* got 3"):
        make("dqn", micro_batches=3).step(sample())
    with pytest.raises(ValueError, match="micro_batches must be at least 1; got 0"):
        make("dqn", micro_batches=0)


def test_networks_of_another_kind_are_refused():
    with pytest.raises(WrongKindError, match="micro_batches must be 1"):
        in_parts(object(), 2)


def test_networks_with_state_are_refused():
    network = q_network(VECTOR, ONE_OF_4, NetworkConfig(hidden_sizes=(8,), norm="batch"))
    with pytest.raises(ValueError, match="micro_batches must be 1 for networks with state"):
        in_parts(network, 2)


def test_a_learner_learns_in_parts():
    replay = Replay(sample())
    whole, parts = make(), make(replay=replay, micro_batches=2)
    assert_close(whole.step(sample()), parts.step(sample()), atol=1e-5)
    assert_close(whole.save(), parts.save(), atol=1e-5)
    assert replay.told[0][1].shape == KEYS.shape
