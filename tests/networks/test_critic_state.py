"""A critic that sees more than the policy: entries of observations that no action depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack import exploration
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.families.normalised import normalised
from rlstack.networks import NetworkConfig, actor_critic, observation_features, q_network
from rlstack.networks.torsos import without_critic_state
from tests.agent_cases import FIRST, LAST, MID, NORMALISED, ONE_OF_4, quick_jit, random_timesteps

KEY = jax.random.PRNGKey(0)
OBSERVED = {
    "observation": specs.Array((3,), np.float32),
    "action_mask": specs.BoundedArray((4,), np.float32, 0, 1),
}
SPEC = {
    **OBSERVED,
    "critic_state": {"a": specs.Array((5,), np.float32), "b": specs.DiscreteArray(2)},
}
TORSOS = ("policy_torso", "value_torso")
STEPS = np.array([[FIRST, MID], [MID, LAST], [MID, FIRST]], np.int32)
SETTINGS = {
    "mlp": NetworkConfig(hidden_sizes=(8,)),
    "state": NetworkConfig(hidden_sizes=(8,), critic_input="state"),
    "recurrent": NetworkConfig(hidden_sizes=(8,), core="lstm", core_size=5),
    "stateful": NetworkConfig(hidden_sizes=(8,), norm="batch_renorm", core="gru", core_size=5),
}


def other_state(timesteps):
    """The same steps with another state for the critic."""
    seen = timesteps.observation
    state = {"a": seen["critic_state"]["a"] + 2.0, "b": 1 - seen["critic_state"]["b"]}
    return timesteps._replace(observation={**seen, "critic_state": state})


@pytest.mark.parametrize("name", SETTINGS)
def test_only_the_value_depends_on_the_state(name):
    network = actor_critic(SPEC, ONE_OF_4, SETTINGS[name])
    params = quick_jit(network.init)(KEY)
    steps, state = random_timesteps(SPEC, STEPS), network.initial_state(2)
    unroll = quick_jit(network.unroll)
    (output, after), (other, other_after) = (
        unroll(None, params, seen, state) for seen in (steps, other_state(steps))
    )
    np.testing.assert_array_equal(output.policy, other.policy)
    assert np.abs(output.value - other.value).min() > 1e-6
    jax.tree.map(np.testing.assert_array_equal, after, other_after)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_policy_has_no_gradient_and_no_weights_of_the_state(name):
    network = actor_critic(SPEC, ONE_OF_4, SETTINGS[name])
    params = quick_jit(network.init)(KEY)
    steps, state = random_timesteps(SPEC, STEPS), network.initial_state(2)

    def outputs(entry):
        seen = steps.observation
        seen = {**seen, "critic_state": {**seen["critic_state"], "a": entry}}
        return network.unroll(None, params, steps._replace(observation=seen), state)[0]

    entry = jnp.asarray(steps.observation["critic_state"]["a"])
    of_policy = quick_jit(jax.grad(lambda x: outputs(x).policy[..., 0].sum()))(entry)
    of_value = quick_jit(jax.grad(lambda x: outputs(x).value.sum()))(entry)
    assert (of_policy == 0).all() and (of_value != 0).any()
    weights = getattr(params, "weights", params)
    layers = {path: module["w"] for path, module in weights.items() if "w" in module}
    inputs = {torso: [len(w) for path, w in layers.items() if torso in path] for torso in TORSOS}
    seen = 5 + 2 + (0 if name == "state" else 3)
    assert inputs == {"policy_torso": [3], "value_torso": [seen]}


def test_the_value_alone_sees_the_state_or_also_the_observation():
    def value_of(cfg, observation):
        network = actor_critic(SPEC, ONE_OF_4, cfg)
        steps = random_timesteps(SPEC, STEPS[0])
        changed = {**steps.observation, "observation": observation}
        params = quick_jit(network.init)(KEY)
        return network.apply(None, params, steps._replace(observation=changed), ())

    zeros, ones = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    for name, differs in (("mlp", True), ("state", False)):
        values = [value_of(SETTINGS[name], x)[0].value for x in (zeros, ones)]
        assert np.array_equal(*values) != differs


@pytest.mark.slow
@pytest.mark.chosen
def test_an_agent_with_normalisation_acts_the_same_with_any_state():
    cfg = PPOConfig(num_minibatches=1)
    network = lambda *spec: actor_critic(*spec, SETTINGS["mlp"])  # noqa: E731
    agent = normalised(PPO(cfg, SPEC, ONE_OF_4, network, exploration.Sample), NORMALISED)
    params = agent.initial_params(KEY)
    steps, state = random_timesteps(SPEC, STEPS[1]), agent.initial_state(2)
    act = quick_jit(agent.actor_step)
    outputs = [act(KEY, params, seen, state)[0] for seen in (steps, other_state(steps))]
    np.testing.assert_array_equal(outputs[0].action, outputs[1].action)
    logs = [output.behaviour_log_prob for output in outputs]
    np.testing.assert_array_equal(*logs)
    assert (outputs[0].value != outputs[1].value).all()


def test_networks_without_a_critic_do_not_see_it():
    steps = random_timesteps(SPEC, STEPS[1])
    seen = observation_features(SPEC, steps.observation)
    np.testing.assert_array_equal(seen, steps.observation["observation"])
    network = q_network(SPEC, ONE_OF_4, SETTINGS["mlp"])
    params = quick_jit(network.init)(KEY)
    values = [network.apply(None, params, s, ())[0] for s in (steps, other_state(steps))]
    np.testing.assert_array_equal(*values)
    assert without_critic_state(SPEC) == OBSERVED


def test_a_shared_torso_is_refused():
    with pytest.raises(ValueError, match=r"shared must be False.*--network.shared False"):
        actor_critic(SPEC, ONE_OF_4, NetworkConfig(shared=True))
    with pytest.raises(ValueError, match="critic_input must be one of all, state"):
        NetworkConfig(critic_input="everything")
