"""Files as a user writes them, with a slot `# NAME` in each function that a run calls.

A case puts a mistake into one slot. The others are comments.
"""

AGENT = """
pass  # top
from dataclasses import dataclass
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from rlstack import distributions, exploration
from rlstack.agent import Agent, EpochAgent
from rlstack.agents import register
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.checks import Checked
from rlstack.math import returns
from rlstack.networks import actor_critic
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import like, preset
from rlstack.replay import ReplayConfig
from rlstack.types import LearnerOutput


@dataclass(frozen=True)
class Config(Checked):
    rate: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        pass  # config


class Output(NamedTuple):
    action: Any


class State(NamedTuple):
    opt_state: Any
    key: Any


def own_optimizer(rate):
    def update(updates, state, params=None):
        pass  # transform
        return jax.tree.map(lambda x: -rate * x, updates), state

    return optax.GradientTransformation(lambda params: (), update)


def own_policy(cfg, num_envs):
    def policy(rng_key, distribution, counts):
        pass  # exploration
        return distribution.sample(rng_key)

    return policy


def own_network(obs_spec, action_spec, cfg, **rest):
    pass  # network_function
    return actor_critic(obs_spec, action_spec, cfg, **rest)


@register(Config, network=own_network, policy=own_policy)
class Own(Agent):
    def __init__(self, cfg, *parts):
        super().__init__(cfg, *parts)
        pass  # init
        self.optimizer = own_optimizer(cfg.rate)

    def initial_params(self, rng_key):
        pass  # initial_params
        return self.network.init(rng_key)

    def initial_state(self, batch_size):
        pass  # initial_state
        return exploration.initial_counts(batch_size)

    def reset_state(self, state, first):
        pass  # reset_state
        return state

    def initial_learner_state(self, rng_key, params):
        pass  # initial_learner_state
        return State(self.optimizer.init(params), rng_key)

    def actor_step(self, rng_key, params, timestep, state):
        output, _ = self.network.apply(None, params, timestep, ())
        pass  # actor_step
        policy = distributions.from_parameters(self.action_spec, output.policy)
        return Output(self.policy(rng_key, policy, state)), state

    def loss(self, params, trajectory):
        output, _ = self.network.unroll(None, params, trajectory.timestep, ())
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        mask, discount = ~after.first(), 0.99 * after.discount
        pass  # loss
        target = returns.lambda_returns(after.reward, discount, output.value, 0.9, mask)
        policy = distributions.from_parameters(self.action_spec, output.policy[:-1])
        log_prob = policy.log_prob(trajectory.agent_output.action[:-1])
        return ((output.value[:-1] - target) ** 2 - log_prob * target).mean()

    def compute_gradients(self, params, learner_state, batch):
        pass  # compute_gradients
        loss, grads = jax.value_and_grad(self.loss)(params, batch.trajectory)
        return grads, LearnerOutput({"loss": loss, "grad_norm": optax.global_norm(grads)})

    def apply_gradients(self, params, learner_state, grads):
        pass  # apply_gradients
        updates, opt_state = self.optimizer.update(grads, learner_state.opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    def update_learner_state(self, params, learner_state, opt_state):
        pass  # update_learner_state
        return learner_state._replace(opt_state=opt_state)


@dataclass(frozen=True)
class EpochConfig(PPOConfig):
    pass


@register(EpochConfig, network=actor_critic, compares_with_acting=True)
class OwnEpochs(PPO):
    def prepare(self, params, learner_state, batch):
        pass  # prepare
        return super().prepare(params, learner_state, batch)

    def loss(self, params, rows):
        pass  # epoch_loss
        return super().loss(params, rows)


@preset
def NAME_own(name):
    '''An agent of one's own.'''
    pass  # preset
    return Experiment(
        preset=name,
        agent=Config(),
        env=EnvConfig("CartPole-v1", num_envs=4),
        replay=ReplayConfig(sampler="fifo", batch_size=4, unroll_length=8, max_size=8),
        frames=200,
    )


@preset
def NAME_epochs(name):
    '''An agent with epochs.'''
    return like("cartpole-ppo", name, agent=EpochConfig(num_epochs=1, num_minibatches=1))
"""

PARTS = """
pass  # top_of_parts
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.evaluator import Evaluator
from rlstack.networks import feed_forward, q_network
from rlstack.configs.network import NetworkConfig


def network(obs_spec, action_spec):
    pass  # network_factory
    made = q_network(obs_spec, action_spec, NetworkConfig(hidden_sizes=(8,)))

    def apply(rng_key, params, timestep, state):
        pass  # network_apply
        return made.apply(rng_key, params, timestep, state)

    return made._replace(apply=apply)


def haiku_network(obs_spec, action_spec):
    def forward(observation):
        pass  # haiku_module
        return hk.nets.MLP([8, 2])(observation)

    return feed_forward(forward, obs_spec)


class Sampler:
    def __init__(self):
        pass  # sampler_init

    def __call__(self, rng, items, batch_size):
        pass  # sampler
        return rng.integers(0, len(items), batch_size)


class Items:
    def __init__(self):
        pass  # processor_init

    def __call__(self, rng, item, episode):
        pass  # processor
        return item


def view(observation):
    pass  # observation_processor
    return observation[::2]


class Steps:
    def __init__(self, num_envs):
        pass  # step_processor_init

    def __call__(self, step):
        pass  # step_processor
        return step


def policy():
    pass  # policy_factory

    def policy(rng_key, distribution, counts):
        pass  # policy
        return distribution.sample(rng_key)

    return policy


class Lines:
    def __init__(self, run_dir):
        pass  # logger_init

    def write(self, step, logs):
        pass  # logger

    def close(self):
        pass  # logger_close


class Rule:
    def __init__(self):
        pass  # rule_init

    def __call__(self, step, logs):
        pass  # rule
        return False


class Judge(Evaluator):
    def __init__(self, cfg, agent, rng_key):
        pass  # evaluator_init
        super().__init__(cfg, agent, rng_key)

    def evaluate(self, params, env, progress=None):
        pass  # evaluator
        return super().evaluate(params, env, progress)


def rule(observation):
    pass  # scripted_rule
    return jnp.zeros(len(observation), jnp.int32)
"""

ENVS = """
import gymnasium
import numpy as np


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        pass  # env_init
        self._time = 0

    def reset(self, *, seed=None, options=None):
        pass  # env_reset
        self._time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._time += 1
        pass  # env_step
        return np.zeros(2, np.float32), 1.0, self._time > 20, False, {}


class Wrapper(gymnasium.Wrapper):
    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        pass  # env_wrapper
        return observation, reward, terminated, truncated, info


def wrapped():
    pass  # env_function
    return Wrapper(Env())
"""

JAX_ENVS = """
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome


class Env:
    def __init__(self):
        pass  # jax_init

    def observation_spec(self):
        pass  # jax_spec
        return specs.BoundedArray((2,), np.float32, 0.0, 1.0, "seen")

    def action_spec(self):
        return specs.DiscreteArray(2, np.int32, "move")

    def reset(self, rng_key):
        pass  # jax_reset
        return jnp.int32(0), jnp.zeros(2, jnp.float32)

    def step(self, rng_key, state, action):
        pass  # jax_step
        return Outcome(state + 1, jnp.zeros(2, jnp.float32), 1.0, state > 20, False)
"""

GAMES = """
import numpy as np
from dm_env import specs
from rlstack.entity import Categorical, CategoricalMask, EntityType, Observation, ObsSpace
from rlstack.entity import as_dm_env
from rlstack.envs.seats.game import GameStep, SeatGame, Seats


class Pair(SeatGame):
    seats = ("a", "b")
    observation_spec = specs.BoundedArray((1,), np.float32, 0.0, 1.0)
    action_spec = specs.DiscreteArray(2)

    def reset(self):
        pass  # game_reset
        self._time = 0
        return [np.zeros(1, np.float32)] * 2

    def step(self, actions):
        pass  # game_step
        self._time += 1
        return GameStep([np.zeros(1, np.float32)] * 2, [0.0, 0.0], self._time > 20)


pair = Seats(Pair)


class Fires:
    obs_space = ObsSpace({"Worker": EntityType(("x",), 1)})
    action_space = {"walk": Categorical(("left", "right"), capacity=1)}

    def reset(self):
        self._time = 0
        pass  # entity_reset
        return self._observe()

    def act(self, actions):
        self._time += 1
        pass  # entity_act
        return self._observe()

    def _observe(self):
        return Observation(
            features={"Worker": [(0.0,)]},
            actions={"walk": CategoricalMask(actor_types=("Worker",))},
            reward=0.0,
            done=self._time > 20,
        )


def fires(seed=0):
    return as_dm_env(Fires())
"""

# Environments of PettingZoo need no class of it.
ZOO = """
import numpy as np
from gymnasium import spaces


class Zoo:
    possible_agents = ["a", "b"]

    def __init__(self):
        pass  # zoo_init
        self.agents = []

    def observation_space(self, agent):
        pass  # zoo_space
        return spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        pass  # zoo_reset
        self.agents, self._time = list(self.possible_agents), 0
        return {a: self.observe(a) for a in self.agents}, {a: {} for a in self.agents}

    def observe(self, agent):
        pass  # zoo_observe
        return np.zeros(1, np.float32)

    def step(self, actions):
        self._time += 1
        pass  # zoo_step
        over = dict.fromkeys(self.agents, self._time > 20)
        seen = {a: self.observe(a) for a in over}
        found = seen, dict.fromkeys(over, 0.0), over, dict.fromkeys(over, False), {}
        self.agents = [] if self._time > 20 else self.agents
        return found

    def close(self):
        self.agents = []


class InTurn(Zoo):
    def reset(self, seed=None, options=None):
        super().reset()
        pass  # turn_reset
        self.agent_selection = "a"

    def last(self):
        pass  # turn_last
        return self.observe(self.agent_selection), 0.0, self._time > 20, False, {}

    def step(self, action):
        pass  # turn_step
        self._time += 1
        if action is None:
            self.agents.remove(self.agent_selection)
        self.agent_selection = "b" if self.agent_selection == "a" else "a"
"""
