"""Asymmetric actor-critics: a critic sees an entry of the observation that its policy does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.bc import BC, BCConfig
from rlstack.agents.d4pg import D4PG, D4PGConfig
from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.agents.impala import Impala, ImpalaConfig
from rlstack.agents.iql import IQL, IQLConfig
from rlstack.agents.mpo import MPO, MPOConfig
from rlstack.agents.ppg import PPG, PPGConfig
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.agents.sac import SAC, SACConfig
from rlstack.agents.td3 import TD3, TD3Config
from rlstack.agents.tqc import TQC, TQCConfig
from rlstack.agents.vmpo import VMPO, VMPOConfig
from rlstack.exploration import Greedy
from rlstack.families.advantage_weighted import imitator_and_critic
from rlstack.families.off_policy import with_action
from rlstack.networks import (
    CriticConfig,
    NetworkConfig,
    actor_critic,
    deterministic_policy_and_critic,
    deterministic_policy_and_distributional_critic,
    phasic_actor_critic,
    policy_and_critic,
    policy_and_distributional_critic,
    q_network,
)
from rlstack.networks.actor_critic import policy_network
from rlstack.types import merge_leading_dims
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MID,
    NORMALISED,
    ONE_OF_4,
    UNEVEN,
    Setting,
    quick_jit,
    random_timesteps,
)

KEY = jax.random.PRNGKey(3)
ENTRY = "privileged_state"
SPEC = {"state": specs.Array((3,), np.float32), ENTRY: specs.Array((5,), np.float32)}
STEPS = np.array([[FIRST, MID], [MID, LAST], [MID, FIRST]], np.int32)


def config(**options):
    return NetworkConfig(hidden_sizes=(8,), critic_observation=ENTRY, **options)


ALL, ALONE = config(), config(critic_input="state")
ATOMS = config(num_atoms=11)
GRU = config(core="gru", core_size=5)
TWO_CORES = config(core="gru", core_size=5, critic=CriticConfig(core="lstm", core_size=4))
SETTINGS = {
    "asymmetric-ppo": Setting(PPOConfig(optimizer=FAST), SPEC, ONE_OF_4, ALONE, NORMALISED),
    "asymmetric-ppo-recurrent": Setting(PPOConfig(optimizer=FAST), SPEC, ONE_OF_4, TWO_CORES),
    "asymmetric-impala": Setting(ImpalaConfig(optimizer=FAST), SPEC, ONE_OF_4, GRU),
    "asymmetric-sac": Setting(SACConfig(optimizer=FAST), SPEC, UNEVEN, ALL),
    "asymmetric-sac-discrete": Setting(SACConfig(optimizer=FAST), SPEC, ONE_OF_4, ALL),
    "asymmetric-td3": Setting(TD3Config(optimizer=FAST, num_critics=3), SPEC, UNEVEN, ALL),
}
# agent, config, network, action, options
CASES = {
    "ppo": (PPO, PPOConfig, actor_critic, ONE_OF_4, ALL),
    "ppo-alone": (PPO, PPOConfig, actor_critic, ONE_OF_4, ALONE),
    "ppo-gru": (PPO, PPOConfig, actor_critic, ONE_OF_4, GRU),
    "ppo-two-cores": (PPO, PPOConfig, actor_critic, ONE_OF_4, TWO_CORES),
    "ppg": (PPG, PPGConfig, phasic_actor_critic, ONE_OF_4, ALL),
    "vmpo": (VMPO, VMPOConfig, actor_critic, ONE_OF_4, ALL),
    "impala": (Impala, ImpalaConfig, actor_critic, ONE_OF_4, GRU),
    "sac": (SAC, SACConfig, policy_and_critic, UNEVEN, ALL),
    "sac-discrete": (SAC, SACConfig, policy_and_critic, ONE_OF_4, ALONE),
    "tqc": (TQC, TQCConfig, policy_and_distributional_critic, UNEVEN, ATOMS),
    "td3": (TD3, TD3Config, deterministic_policy_and_critic, UNEVEN, ALONE),
    "d4pg": (D4PG, D4PGConfig, deterministic_policy_and_distributional_critic, UNEVEN, ATOMS),
    "mpo": (MPO, MPOConfig, policy_and_critic, UNEVEN, ALL),
    "iql": (IQL, IQLConfig, imitator_and_critic, UNEVEN, ALL),
}

QUICK = ("ppo", "ppo-gru", "impala", "sac", "td3")


def with_entry(timestep, value):
    return timestep._replace(observation={**timestep.observation, ENTRY: value})


def make(name):
    agent, cfg, network, action, options = CASES[name]
    return agent(cfg(), SPEC, action, lambda *spec: network(*spec, options), Greedy)


def critic_of(agent):
    """A function (params, timestep) -> every number that the critic gives."""
    if hasattr(agent.network, "unroll"):
        state = agent.network.initial_state(2)
        return lambda params, steps: agent.network.unroll(None, params, steps, state)[0].value
    critic = agent.network.critic

    def values(params, steps):
        flat = merge_leading_dims(steps)
        if not isinstance(agent.action_spec, specs.DiscreteArray):
            flat = with_action(flat, jnp.full((len(flat.reward), 2), 0.3))
        one = jax.tree.map(lambda x: x[0], params.critics)
        return critic.apply(None, one, flat, ())[0]

    return values


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.chosen])
        for name in CASES
    ],
)
def test_acting_does_not_depend_on_the_entry_and_the_critic_does(name):
    agent = make(name)
    params = quick_jit(agent.initial_params)(KEY)
    steps = random_timesteps(SPEC, STEPS)
    other = with_entry(steps, steps.observation[ENTRY] + 2)
    act = quick_jit(agent.actor_step)
    state, other_state = agent.initial_state(2), agent.initial_state(2)
    for t in range(len(STEPS)):
        one, two = (jax.tree.map(lambda x, t=t: x[t], tree) for tree in (steps, other))
        output, state = act(KEY, params, one, state)
        other_output, other_state = act(KEY, params, two, other_state)
        np.testing.assert_array_equal(output.action, other_output.action)
    values = quick_jit(critic_of(agent))
    assert np.abs(values(params, steps) - values(params, other)).max() > 1e-4
    gradient = jax.grad(lambda entry: critic_of(agent)(params, with_entry(steps, entry)).sum())
    assert (np.abs(gradient(jnp.asarray(steps.observation[ENTRY]))) > 0).any()


def test_a_value_by_hand():
    """With one linear layer left by relu at positive inputs, the value is a sum of products."""
    cfg = config(activation="relu", critic_input="state")
    network = actor_critic(SPEC, ONE_OF_4, cfg)
    params = network.init(KEY)
    layers = {path: dict(module) for path, module in params.items()}
    torso = next(path for path in layers if "value_torso" in path)
    head = next(path for path in layers if "value_head" in path)
    weights = np.zeros((5, 8), np.float32)
    weights[0, 0], weights[4, 1] = 2.0, 3.0
    layers[torso] = {"w": weights, "b": np.full(8, 0.5, np.float32)}
    layers[head] = {"w": np.arange(1, 9, dtype=np.float32)[:, None], "b": np.ones(1, np.float32)}
    steps = random_timesteps(SPEC, STEPS[0])
    entry = np.array([[1, 0, 0, 0, 2], [0, 9, 9, 9, 0]], np.float32)
    output, _ = network.apply(None, layers, with_entry(steps, entry), ())
    # 1 + (2 + 0.5) * 1 + (6 + 0.5) * 2 + 0.5 * (3 + ... + 8) = 33; and 1 + 0.5 * 36 = 19.
    np.testing.assert_allclose(output.value, [33, 19], rtol=1e-6)


@pytest.mark.parametrize(("name", "inputs"), [("sac", 3 + 5 + 2), ("td3", 5 + 2), ("iql", 10)])
def test_the_layers_have_weights_for_what_they_see(name, inputs):
    params = quick_jit(make(name).initial_params)(KEY)
    first = min(path for path in params.critics if "torso" in path)
    assert params.critics[first]["w"].shape[1] == inputs
    first = min(path for path in params.policy if "torso" in path)
    assert params.policy[first]["w"].shape[0] == 3


def test_without_the_option_critics_see_what_they_saw():
    """Of SAC's networks, an entry critic_state has always been hidden from both."""
    spec = {"state": SPEC["state"], "critic_state": SPEC[ENTRY]}
    for seen, size in ((spec, 3 + 2), (SPEC, 3 + 5 + 2)):
        network = policy_and_critic(seen, UNEVEN, NetworkConfig(hidden_sizes=(8,)))
        params = network.critic.init(KEY)
        assert params[min(params)]["w"].shape[0] == size
    named = NetworkConfig(hidden_sizes=(8,), critic_observation="critic_state")
    params = policy_and_critic(spec, UNEVEN, named).critic.init(KEY)
    assert params[min(params)]["w"].shape[0] == 3 + 5 + 2


def test_a_cloned_policy_does_not_see_the_entry():
    agent = BC(BCConfig(), SPEC, ONE_OF_4, lambda *spec: policy_network(*spec, ALL), Greedy)
    params = agent.initial_params(KEY)
    assert [x.shape[0] for path, x in sizes(params) if "torso" in path] == [3]


def sizes(params):
    return [(path, module["w"]) for path, module in params.items() if "w" in module]


def test_entries_that_do_not_fit_are_errors():
    with pytest.raises(
        ValueError, match=r"critic_observation must name an entry.*got 'secret' for"
    ):
        actor_critic(SPEC, ONE_OF_4, NetworkConfig(critic_observation="secret"))
    with pytest.raises(ValueError, match="for a plain array"):
        policy_and_critic(SPEC["state"], UNEVEN, ALL)
    alone = {"action_mask": specs.BoundedArray((4,), np.float32, 0, 1), ENTRY: SPEC[ENTRY]}
    with pytest.raises(ValueError, match="leave the policy another one"):
        actor_critic(alone, ONE_OF_4, ALL)
    with pytest.raises(ValueError, match=r"shared must be False.*entry privileged_state"):
        actor_critic(SPEC, ONE_OF_4, config(shared=True))
    with pytest.raises(ValueError, match="critic_observation must be None for a network of"):
        q_network(SPEC, ONE_OF_4, ALL)
    with pytest.raises(ValueError, match="critic_input must be all for a critic that sees what"):
        policy_and_critic(SPEC, UNEVEN, NetworkConfig(critic_input="state"))
    with pytest.raises(ValueError, match="critic_observation must be None"):
        DQN(DQNConfig(), SPEC, ONE_OF_4, lambda *spec: q_network(*spec, ALL), Greedy)
