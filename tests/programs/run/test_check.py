"""`rlstack check`: sound agents and environments pass, and each mistake is found at its place."""

import dataclasses
import inspect
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlstack.agent import Agent
from rlstack.agents import AGENTS, register
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.rnd import RNDDQNConfig
from rlstack.families.wrapped import Wrapped
from rlstack.math import returns
from rlstack.networks import actor_critic
from rlstack.programs.cli import commands
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.run.check.agent import check_agent
from rlstack.programs.run.check.env import check_env
from rlstack.types import LearnerOutput

pytestmark = pytest.mark.timeout(180)


class Out(NamedTuple):
    action: jax.Array
    logits: jax.Array


class State(NamedTuple):
    opt_state: optax.OptState
    rng_key: jax.Array


def network(obs_spec, action_spec, cfg):
    return actor_critic(obs_spec, action_spec, cfg=dataclasses.replace(cfg, hidden_sizes=(8,)))


@dataclass(frozen=True)
class Sound:
    """The config of an actor-critic that keeps the contract; subclasses break one rule each."""


class ActorCritic(Agent):
    has_priorities = False

    def initial_params(self, rng_key):
        return self.network.init(rng_key)

    def initial_learner_state(self, rng_key, params):
        return State(optax.sgd(0.1).init(params), rng_key)

    def actor_step(self, rng_key, params, timestep, state):
        output, _ = self.network.apply(None, params, timestep, ())
        action = jax.random.categorical(rng_key, output.policy).astype(self.action_spec.dtype)
        return Out(action, output.policy), state

    def discounts(self, timestep):
        return 0.9 * timestep.discount[1:]

    def mask(self, timestep):
        return ~timestep.first()[1:]

    def loss(self, params, batch):
        timestep = batch.trajectory.timestep
        output, _ = self.network.unroll(None, params, timestep, ())
        mask = self.mask(timestep)
        value = jax.lax.stop_gradient(output.value)
        target = returns.discounted_returns(
            timestep.reward[1:], self.discounts(timestep), value, mask
        )
        log_prob = jax.nn.log_softmax(output.policy[:-1])
        taken = jnp.take_along_axis(log_prob, batch.trajectory.agent_output.action[:-1, :, None], 2)
        error = mask * (target - output.value[:-1])
        loss = (error**2).mean() - (taken[..., 0] * jax.lax.stop_gradient(error)).mean()
        return loss, {"loss": loss}

    def learner_step(self, params, learner_state, batch):
        grads, logs = jax.grad(self.loss, has_aux=True)(params, batch)
        updates, opt_state = optax.sgd(0.1).update(grads, learner_state.opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, learner_state._replace(opt_state=opt_state), LearnerOutput(logs)


@pytest.fixture(autouse=True)
def _registered():
    """Registers the agent, and forgets what a test registers: other tests list all agents."""
    before = set(AGENTS)
    register(Sound, network=network)(ActorCritic)
    yield
    for config in set(AGENTS) - before:
        del AGENTS[config]


def broken(cls):
    """Registers a broken agent with a config of its own; returns an instance of the config."""
    config = dataclass(frozen=True)(type(f"{cls.__name__}Config", (), {}))
    register(config, network=network)(cls)
    return config()


class Floats(ActorCritic):
    def actor_step(self, rng_key, params, timestep, state):
        output, state = super().actor_step(rng_key, params, timestep, state)
        return output._replace(action=output.action.astype(jnp.float32)), state


class Remembers(ActorCritic):
    def actor_step(self, rng_key, params, timestep, state):
        self.newest = timestep
        return super().actor_step(rng_key, params, timestep, state)


class MixesRows(ActorCritic):
    def actor_step(self, rng_key, params, timestep, state):
        output, state = super().actor_step(rng_key, params, timestep, state)
        return output._replace(logits=output.logits - output.logits.mean(0)), state


class KeepsMemory(ActorCritic):
    def initial_state(self, batch_size):
        return jnp.zeros(batch_size)

    def reset_state(self, state, first):
        return state

    def actor_step(self, rng_key, params, timestep, state):
        output, _ = super().actor_step(rng_key, params, timestep, ())
        state = state + timestep.observation.sum(-1)
        return output._replace(logits=output.logits + state[:, None]), state


class SameParams(ActorCritic):
    def initial_params(self, rng_key):
        return self.network.init(jax.random.PRNGKey(0))


class LearnsNothing(ActorCritic):
    def learner_step(self, params, learner_state, batch):
        _, learner_state, output = super().learner_step(params, learner_state, batch)
        return params, learner_state, output


class LearnsAcross(ActorCritic):
    def mask(self, timestep):
        return jnp.ones(timestep.reward[1:].shape, bool)


class Bootstraps(ActorCritic):
    def discounts(self, timestep):
        return jnp.where(timestep.last()[1:], 0.9, 0.9 * timestep.discount[1:])


class CutsAtLimits(ActorCritic):
    def discounts(self, timestep):
        return 0.9 * timestep.discount[1:] * ~timestep.last()[1:]


class Branches(ActorCritic):
    def loss(self, params, batch):
        loss, logs = super().loss(params, batch)
        if batch.weights.sum() > 0:  # of a traced array
            loss = 2 * loss
        return loss, logs


class Misuses(ActorCritic):
    def mask(self, timestep):
        return jnp.array(True)


class Invents(ActorCritic):
    has_priorities = True


class WritesNothing(ActorCritic):
    writes_back = True


class ReadsMore(ActorCritic):
    reads_first_state = True

    def initial_state(self, batch_size):
        return jnp.zeros(batch_size)

    def actor_step(self, rng_key, params, timestep, state):
        return super().actor_step(rng_key, params, timestep, state)[0], state + 1

    def loss(self, params, batch):
        loss, logs = super().loss(params, batch)
        return loss * (1 + batch.trajectory.agent_state.mean()), logs


class SlicesFirst(ReadsMore):
    reads_first_state = True

    def loss(self, params, batch):
        before = jax.tree.map(lambda x: x[:-1], batch.trajectory)
        loss, logs = ActorCritic.loss(self, params, batch)
        return loss * (1 + before.agent_state[0].mean()), logs


_LATER = [pytest.mark.slow, pytest.mark.chosen]


@pytest.mark.parametrize(
    ("cls", "rule", "text"),
    [
        pytest.param(Floats, "shapes, dtypes and ranges", "float32", marks=_LATER),
        pytest.param(Remembers, "attribute", "self.newest", marks=_LATER),
        (MixesRows, "other rows", "logits of row 0"),
        pytest.param(KeepsMemory, "memory", "logits", marks=_LATER),
        (SameParams, "depend on the key", "two keys"),
        (LearnsNothing, "changes params", "changed nothing"),
        (ReadsMore, "read at the first step only", "got another result: the params"),
        pytest.param(
            SlicesFirst, "read at the first step only", "it raised IndexError", marks=_LATER
        ),
        (LearnsAcross, "between two episodes", "LAST and FIRST"),
        (Bootstraps, "termination", "discount is 0"),
        (CutsAtLimits, "time limit", "both gave the same"),
        (Branches, "jit", "TracerBoolConversionError"),
        pytest.param(
            Misuses, "between two episodes", "mask must have the shape of rewards", marks=_LATER
        ),
        pytest.param(Invents, "changes params", "must be False", marks=_LATER),
        pytest.param(WritesNothing, "changes params", "writes_back", marks=_LATER),
    ],
)
def test_a_mistake_is_found_in_the_file_and_class_of_the_agent(cls, rule, text):
    report = check_agent(broken(cls), topologies=False)
    failures = {failure.rule: failure.text for failure in report.failures}
    (found,) = [message for name, message in failures.items() if rule in name]
    assert text in found
    assert __file__ in found
    lines, first = inspect.getsourcelines(cls)
    base, base_first = inspect.getsourcelines(ActorCritic)
    line = int(found.partition(f"{__file__}:")[2].split(":")[0].split()[0])
    assert first <= line <= first + len(lines) or base_first <= line <= base_first + len(base)


def test_a_sound_agent_passes_all_rules_and_learns_the_same_in_lock_step():
    report = check_agent(Sound(), EnvConfig("CartPole-v1", num_envs=2))
    assert not report.failures, report
    outcomes = {result.rule: result.outcome for result in report.results}
    assert outcomes["a program in lock-step learns what a single process learns"] == "holds"
    # It has no memory, reads no state and has no mask.
    assert list(outcomes.values()).count("does not apply") == 3
    report.raise_failures()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("cfg", [DQNConfig(), RNDDQNConfig()])
def test_an_agent_of_the_library_passes_too(cfg):
    report = check_agent(cfg, topologies=False)
    assert not report.failures, report


@dataclass(frozen=True)
class AroundConfig(Sound):
    """The config of an agent in a wrapper."""


class FloatsAround(Wrapped):
    def actor_step(self, rng_key, params, timestep, state):
        output, state = super().actor_step(rng_key, params, timestep, state)
        return output._replace(action=output.action.astype(jnp.float32)), state


class MakesAround(ActorCritic):
    def __new__(cls, *parts):
        return FloatsAround(ActorCritic(*parts))


def test_a_mistake_in_a_wrapper_has_its_place():
    register(AroundConfig, network=network)(MakesAround)
    report = check_agent(AroundConfig(), topologies=False)
    assert "FloatsAround in CartPole-v1" in str(report)
    (found,) = [failure.text for failure in report.failures if "ranges" in failure.rule]
    line = inspect.getsourcelines(FloatsAround.actor_step)[1]
    assert f"{__file__}:{line}: actor_step must return actions" in found


class Walk(gymnasium.Env):
    """Counts to a random length; observes the count and its random goal."""

    observation_space = gymnasium.spaces.Box(0, 20, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    draw = staticmethod(lambda env: env.np_random.integers(3, 9))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.goal = 0, self.draw(self)
        return self.seen(), {}

    def seen(self):
        return np.array([self.count, self.goal], np.float32)

    def step(self, action):
        self.count += 1
        return self.seen(), float(action), self.count >= self.goal, False, {}


class Unseeded(Walk):
    draw = staticmethod(lambda env: np.random.default_rng().integers(3, 9))


class Leaves(Walk):
    def seen(self):
        return np.array([10 * self.count, self.goal], np.float32)


class Common(Walk):
    made = 0

    def __init__(self):
        type(self).made += 1
        self.number = type(self).made

    def seen(self):
        return np.array([self.count, type(self).made % 20], np.float32)


def test_a_sound_environment_passes_in_all_pools():
    report = check_env(EnvConfig("tests.programs.run.test_check:Walk"), steps=60)
    assert not report.failures, report
    texts = {result.rule: result.text for result in report.results}
    assert "terminations, 0 time limits" in texts["episodes end"]
    assert all(pool in texts["all pools give the same steps"] for pool in ("alone", "process"))


@pytest.mark.parametrize(
    ("name", "rule", "text"),
    [
        ("Unseeded", "the same seed", "reset(seed=...)"),
        ("Leaves", "spaces", "outside of"),
        ("Common", "share state", "observation at step 0"),
    ],
)
def test_a_mistake_of_an_environment_is_found(name, rule, text):
    report = check_env(EnvConfig(f"tests.programs.run.test_check:{name}"), steps=40)
    (found,) = [failure.text for failure in report.failures if rule in failure.rule]
    assert text in found


def test_the_command_prints_the_table_and_its_exit_code_says_whether_all_holds(capsys):
    here = "tests.programs.run.test_check"
    assert commands.main("check", ["env", f"{here}:Walk", "--steps", "20"]) == 0
    assert "0 fail" in capsys.readouterr().out
    assert commands.main("check", ["env", f"{here}:Leaves", "--steps", "20"]) == 1
    assert "fails" in capsys.readouterr().out
    assert commands.main("check", ["agent", f"{here}:Walk"]) == 1
    assert "must be the config of an agent" in capsys.readouterr().err
    assert commands.main("check", []) == 2
    assert "agent or env" in capsys.readouterr().err
