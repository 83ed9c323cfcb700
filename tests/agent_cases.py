"""Shared by the agent tests: agents for every kind of environment, and data for them."""

import dataclasses
import functools
import importlib
import pkgutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

import tests.agents
from rlstack.agent import Agent, EpochAgent
from rlstack.agents import AGENTS
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.exploration import Greedy
from rlstack.families.normalised import normalised
from rlstack.families.policy_gradient import PolicyGradientAgent
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.types import Batch, StepType, TimeStep, Transition
from tests.networks import ragged_cases

LENGTH, BATCH = 5, 4  # T and B of the batches below
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST

VECTOR = specs.Array((3,), np.float32)
IMAGE = specs.BoundedArray((36, 36, 1), np.uint8, 0, 255)
# A float mask, which observation statistics must not change.
MASKED = {"observation": VECTOR, "action_mask": specs.BoundedArray((4,), np.float32, 0, 1)}
NESTED = {"flag": specs.DiscreteArray(3), "place": VECTOR}
ONE_OF_4 = specs.DiscreteArray(4)
SEVERAL = specs.BoundedArray((2,), np.int32, [0, 1], [2, 2])
REAL = specs.BoundedArray((2,), np.float32, -1.0, 1.0)
UNEVEN = specs.BoundedArray((2,), np.float32, [-2.0, 0.0], [2.0, 6.0])
STRUCTURED = {"aim": REAL, "move": specs.DiscreteArray(3)}
ENTITIES = ragged_cases.CODEC.observation_spec  # with three kinds of actions

FAST = OptimizerConfig(learning_rate=3e-3)
SMALL = NetworkConfig(hidden_sizes=(8,))
NOISY = NetworkConfig(hidden_sizes=(8,), noisy_sigma=0.1)
LSTM, GRU = (NetworkConfig(hidden_sizes=(8,), core=core, core_size=6) for core in ("lstm", "gru"))
MINGRU, S5 = (dataclasses.replace(LSTM, core=core) for core in ("mingru", "s5"))
GTRXL = dataclasses.replace(LSTM, core="gtrxl", core_memory=3, core_heads=2)
NORMALISED = NormalisationConfig(observations=True, rewards="return", reward_clip=5.0)


class CountingAgent(Agent):
    """An agent whose state counts the steps of the episode; its action is params + count."""

    def __init__(self):
        super().__init__(None, None, None, lambda *_: None, lambda: None)

    def initial_params(self, rng_key):
        return 0

    def initial_state(self, batch_size):
        return {"count": jnp.zeros(batch_size, jnp.int32)}

    def initial_learner_state(self, rng_key, params):
        return ()

    def actor_step(self, rng_key, params, timestep, state):
        count = state["count"] + 1
        return {"action": params + count}, {"count": count}


# Tests compile many functions and run each only briefly.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Setting(NamedTuple):
    """One agent in one kind of environment."""

    cfg: Any
    obs_spec: Any
    action_spec: Any
    network: NetworkConfig = SMALL
    normalisation: NormalisationConfig = NormalisationConfig()
    learns: bool = True  # False for agents whose params are empty and stay empty
    is_chance: bool = False  # whether even the greedy agent samples its actions
    extras_spec: Any = ()


def largest(observation):
    """A rule: the index of the largest of three observed values."""
    return jnp.argmax(observation, axis=-1)


def towards(observation):
    """A rule with a two-part action."""
    return {"aim": jnp.tanh(observation["place"][:, :2]), "move": observation["flag"]}


@functools.cache
def settings():
    """Returns the settings of all agents, by name, from SETTINGS in each agent's test."""
    found = {}
    for module in pkgutil.iter_modules(tests.agents.__path__):
        tested = importlib.import_module(f"tests.agents.{module.name}")
        found |= getattr(tested, "SETTINGS", {})
    return found


class Case:
    """An agent with its functions compiled once, initial params and a batch of data."""

    def __init__(self, setting: Setting):
        entry = AGENTS[type(setting.cfg)]
        network = functools.partial(entry.network, cfg=setting.network)

        def make(policy):
            agent = entry.agent(setting.cfg, setting.obs_spec, setting.action_spec, network, policy)
            return normalised(agent, setting.normalisation)

        self.setting = setting
        jit = jax.jit if setting.obs_spec is IMAGE else quick_jit
        self.agent = make(functools.partial(entry.policy, setting.cfg, BATCH))
        self.greedy = make(Greedy)
        self.act = jit(self.agent.actor_step)
        self.act_greedily = jit(self.greedy.actor_step)
        self.learn = jit(self.agent.learner_step)
        if isinstance(self.agent, EpochAgent):
            self.prepare = jit(self.agent.prepare)
        if isinstance(self.agent, PolicyGradientAgent):
            self.loss = jit(self.agent.loss)
            self.unroll = jit(self.agent.network.unroll)
            self.gradient = jit(jax.grad(self.agent.loss, has_aux=True))
        self.key = jax.random.PRNGKey(3)
        self.init = jit(self.agent.initial_params)

    @functools.cached_property
    def params(self):
        return self.init(self.key)

    @functools.cached_property
    def learner_state(self):
        return self.agent.initial_learner_state(self.key, self.params)

    @functools.cached_property
    def batch(self):
        return acted_batch(self, self.params, step_types())


@functools.cache
def case(name):
    return Case(settings()[name])


def step_types():
    """[T+1, B]; columns: no boundary, FIRST at the start, an end inside, an end at the end."""
    columns = [
        [MID, MID, MID, MID, MID, MID],
        [FIRST, MID, MID, MID, MID, MID],
        [MID, MID, LAST, FIRST, MID, MID],
        [FIRST, MID, MID, MID, MID, LAST],
    ]
    return np.array(columns, np.int32).T


def random_array(rng, spec, leading):
    shape = (*leading, *spec.shape)
    if spec is MASKED["action_mask"]:
        mask = rng.integers(0, 2, shape).astype(spec.dtype)
        mask[..., 1], mask[..., 2] = 0, 1  # one action is always legal
        return mask
    if not np.issubdtype(spec.dtype, np.integer):
        return rng.normal(size=shape).astype(spec.dtype)
    return rng.integers(spec.minimum, spec.maximum, shape, endpoint=True).astype(spec.dtype)


def random_timesteps(obs_spec, step_type, seed=0, discount=None):
    """Returns steps [T+1, B, ...] or [B, ...] with these step types; ends are terminations."""
    rng = np.random.default_rng(seed)
    step_type = np.asarray(step_type, np.int32)
    reward = rng.normal(size=step_type.shape).astype(np.float32)
    return TimeStep(
        step_type,
        np.where(step_type == FIRST, 0, reward).astype(np.float32),
        np.where(step_type == LAST, 0, 1).astype(np.float32) if discount is None else discount,
        random_observations(rng, obs_spec, step_type.shape),
    )


def random_observations(rng, obs_spec, leading):
    if obs_spec is not ENTITIES:
        return jax.tree.map(lambda spec: random_array(rng, spec, leading), obs_spec)
    rows = ragged_cases.observations(np.prod(leading), int(rng.integers(1000)))
    return jax.tree.map(lambda x: x.reshape((*leading, *x.shape[1:])), rows)


def acted_batch(case, params, step_type, seed=0, discount=None):
    """Returns a numpy Batch as from actor and replay; the agent acts on random steps."""
    timesteps = random_timesteps(case.setting.obs_spec, step_type, seed, discount)
    rng = np.random.default_rng(seed + 200)
    timesteps = timesteps._replace(
        extras=random_observations(rng, case.setting.extras_spec, step_type.shape)
    )
    # The first state is not the initial one: most unrolls begin within an episode.
    earlier = random_timesteps(case.setting.obs_spec, step_type[0], seed + 100)
    _, state = case.act(case.key, params, earlier, case.agent.initial_state(step_type.shape[1]))
    steps = []
    for t, key in enumerate(jax.random.split(jax.random.PRNGKey(seed), len(step_type))):
        timestep = jax.tree.map(lambda x, t=t: x[t], timesteps)
        state = case.agent.reset_state(state, jnp.asarray(timestep.first()))
        output, next_state = case.act(key, params, timestep, state)
        version = np.zeros(step_type.shape[1], np.int32)
        steps.append(Transition(timestep, output, state, version))
        state = next_state
    trajectory = jax.tree.map(lambda *rows: np.stack([np.asarray(x) for x in rows]), *steps)
    return Batch(trajectory, np.ones(step_type.shape[1], np.float32))


def assert_close(a, b, atol=1e-5, rtol=1e-4):
    """Asserts two pytrees equal in structure and, up to rounding, in value."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=rtol)


def leaves_differ(a, b):
    """Whether any leaf differs."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(not np.array_equal(x, y) for x, y in pairs)
