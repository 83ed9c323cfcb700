"""The contract of `rlstack.agent.Agent`, for every agent in every kind of environment."""

import ast
import pickle
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack import agents, distributions
from rlstack.acting.actor import transition_spec
from rlstack.agents.bc import BC
from rlstack.agents.pqn import PQN
from rlstack.agents.reinforce import Reinforce
from rlstack.families.advantage_weighted import AdvantageWeightedAgent
from rlstack.families.normalised import Normalised
from rlstack.families.off_policy import PolicyAndCriticsAgent
from rlstack.families.policy_gradient import PolicyGradientAgent
from rlstack.families.q_learning import QLearning
from rlstack.learning.sharded import averages
from rlstack.math import returns
from rlstack.networks.torsos import action_mask
from rlstack.storage import checkpoint
from rlstack.types import EnvSpec, StartSpec
from tests.agent_cases import (
    BATCH,
    FIRST,
    LAST,
    MASKED,
    ONE_OF_4,
    acted_batch,
    assert_close,
    case,
    leaves_differ,
    quick_jit,
    random_timesteps,
    settings,
    step_types,
)

_LATER = [pytest.mark.slow, pytest.mark.chosen]


SLOW_TO_COMPILE = {"alphazero", "dreamer", "muzero", "tdmpc2"}  # their own files have quick tests


def _by_agent():
    """The first setting of each agent is quick, unless it extends another one or learns a model.

    Continuous integration runs the others too, by turns.
    """
    first = {}
    for name, setting in settings().items():
        first.setdefault(agents.AGENTS[type(setting.cfg)].agent, name)
    quick = {
        name
        for agent, name in first.items()
        if not any(x in first for x in agent.__mro__[1:]) and name not in SLOW_TO_COMPILE
    }
    return [
        pytest.param(name, marks=[] if name in quick else _LATER) for name in sorted(settings())
    ]


@pytest.fixture(scope="module", params=_by_agent())
def c(request):
    return case(request.param)


def steps(c, batch_size=BATCH, seed=1):
    return random_timesteps(c.setting.obs_spec, np.ones(batch_size), seed)


def shapes(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def test_an_agent_that_averages_gives_the_mean_of_the_parts_of_a_batch(c):
    if not averages(c.agent):
        pytest.skip("it does not say so")
    gradients = quick_jit(c.agent.compute_gradients)
    batch, half = c.batch, BATCH // 2
    weights = np.linspace(0.5, 2.0, BATCH, dtype=np.float32)
    parts = [
        batch._replace(
            trajectory=jax.tree.map(lambda x, i=i: x[:, i : i + half], batch.trajectory),
            weights=weights[i : i + half],
        )
        for i in (0, half)
    ]
    grads, output = gradients(c.params, c.learner_state, batch._replace(weights=weights))
    found = [gradients(c.params, c.learner_state, part) for part in parts]
    means = jax.tree.map(lambda x, y: (x + y) / 2, *[(g, o.logs) for g, o in found])
    assert_close(means, (grads, output.logs), atol=1e-6)
    priorities = np.concatenate([o.priorities for _, o in found])
    np.testing.assert_allclose(priorities, output.priorities, rtol=1e-4, atol=1e-6)


def test_agents_that_average_are_those_of_action_values_without_draws():
    found = {type(case(name).agent).__name__ for name in settings() if averages(case(name).agent)}
    assert found == {"DQN", "C51", "QRDQN", "Munchausen"}
    agent = case("dqn").agent
    changed = type("Changed", (type(agent),), {})  # its loss may be another
    assert not averages(changed(*agent._arguments))


def test_every_registered_agent_has_cases():
    assert {type(setting.cfg) for setting in settings().values()} == {
        config for config in agents.AGENTS if config.__module__.startswith("rlstack.")
    }


def test_actions_fit_the_spec_and_states_keep_their_shape(c):
    state = c.agent.initial_state(BATCH)
    output, next_state = c.act(c.key, c.params, steps(c), state)

    def check(spec, action):
        assert action.shape == (BATCH, *spec.shape)
        assert action.dtype == spec.dtype
        if np.issubdtype(spec.dtype, np.integer):
            for row in np.asarray(action):
                spec.validate(row)

    assert type(output)._fields[0] == "action"
    jax.tree.map(check, c.setting.action_spec, output.action)
    assert all(x.shape[0] == BATCH for x in jax.tree.leaves(output))
    assert shapes(next_state) == shapes(state)
    assert shapes(c.agent.reset_state(state, np.ones(BATCH, bool))) == shapes(state)


def test_acting_is_the_same_without_jit(c):
    state = c.agent.initial_state(BATCH)
    assert_close(
        c.agent.actor_step(c.key, c.params, steps(c), state),
        c.act(c.key, c.params, steps(c), state),
    )


def test_the_greedy_action_is_the_mode_of_the_action_distribution(c):
    # Agents with action values pass the first half of the key to the network.
    keys, state = (c.key, jax.random.split(c.key)[0]), c.agent.initial_state(BATCH)
    found = [c.greedy.action_distribution(key, c.params, steps(c), state) for key in keys]
    if found[0] is None:
        assert not c.setting.learns
        return
    modes = [distribution.mode() for distribution in found]
    if isinstance(c.agent, PolicyAndCriticsAgent) and c.setting.action_spec is not ONE_OF_4:
        bounds = distributions.bounds_of(c.setting.action_spec, "test")
        modes = [bounds.from_unit(mode) for mode in modes]
    output, _ = c.act_greedily(c.key, c.params, steps(c), state)
    assert_close(modes[isinstance(c.agent, QLearning)], output.action)


def test_a_row_does_not_depend_on_the_others(c):
    if c.setting.is_chance:
        pytest.skip("its draws are of the batch's shape, for lack of anything else to depend on")
    # From the middle of an episode, so that recurrent states differ.
    timesteps, state = steps(c), c.agent.initial_state(BATCH)
    _, state = c.act(c.key, c.params, steps(c, seed=7), state)
    together = c.act_greedily(c.key, c.params, timesteps, state)
    alone = [
        c.act_greedily(
            c.key, c.params, *jax.tree.map(lambda x, i=i: x[i : i + 1], (timesteps, state))
        )
        for i in range(2)
    ]
    joined = jax.tree.map(lambda *rows: np.concatenate(rows), *alone)
    assert_close(joined, jax.tree.map(lambda x: x[:2], together))


def test_a_pickled_agent_acts_and_learns_the_same(c):
    copy = pickle.loads(pickle.dumps(c.agent))
    state = c.agent.initial_state(BATCH)
    answers = [
        agent.actor_step(c.key, c.params, steps(c), state)[0].action for agent in (copy, c.agent)
    ]
    assert_close(*answers, atol=0, rtol=0)
    assert copy.cfg == c.agent.cfg


def test_initial_functions_are_functions_of_the_key(c):
    assert not leaves_differ(c.init(c.key), c.init(c.key))
    assert leaves_differ(c.init(c.key), c.init(jax.random.PRNGKey(4))) == c.setting.learns
    assert_close(c.agent.initial_learner_state(c.key, c.params), c.learner_state, atol=0, rtol=0)


def test_learning_keeps_structures_changes_params_and_logs_finite_scalars(c):
    attributes = dict(vars(c.agent))
    params, learner_state, output = c.learn(c.params, c.learner_state, c.batch)
    before, after = (c.params, c.learner_state), (params, learner_state)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert shapes(before) == shapes(after)  # as a scan over batches requires
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.isfinite(new).all()
        assert old is not new
    assert leaves_differ(c.params, params) == c.setting.learns
    assert all(np.shape(x) == () and np.isfinite(x) for x in output.logs.values())
    assert not c.setting.learns or {"loss", "grad_norm", "learning_rate"} <= set(output.logs)
    assert c.agent.has_priorities == (output.priorities is not None)
    if output.priorities is not None:
        assert output.priorities.shape == (BATCH,)
    assert vars(c.agent).keys() == attributes.keys()
    assert all(vars(c.agent)[name] is value for name, value in attributes.items())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a2c", marks=pytest.mark.slow),
        pytest.param("bc-gru", marks=_LATER),
        pytest.param("bc-structured", marks=pytest.mark.slow),
        pytest.param("ddpg", marks=pytest.mark.slow),
        "dqn",
        pytest.param("dqn-duelling", marks=pytest.mark.slow),
        pytest.param("impala-lstm", marks=pytest.mark.slow),
        pytest.param("ppo-entities", marks=_LATER),
        pytest.param("ppo-separate", marks=pytest.mark.slow),
        pytest.param("ppo-gru", marks=_LATER),
        pytest.param("ppo-structured", marks=_LATER),
        pytest.param("r2d2-masked", marks=_LATER),
        pytest.param("reinforce-gru", marks=_LATER),
        pytest.param("sac", marks=_LATER),
        pytest.param("sac-discrete", marks=pytest.mark.slow),
        pytest.param("td3", marks=pytest.mark.slow),
    ],
)
def test_learning_is_the_same_without_jit(name):
    c = case(name)
    plain = c.agent.learner_step(c.params, c.learner_state, c.batch)
    assert_close(plain, c.learn(c.params, c.learner_state, c.batch), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "leaves"),  # and the number of leaves that are read at the first step only
    [
        pytest.param("a2c-gru", 1, marks=_LATER),
        pytest.param("bc-gru", 0, marks=_LATER),
        ("dqn", 0),
        pytest.param("impala-lstm", 2, marks=_LATER),
        pytest.param("ppo-gru", 1, marks=_LATER),
        pytest.param("ppo-gru-normalised", 1, marks=_LATER),
        pytest.param("pqn-lstm", 5, marks=_LATER),
        ("r2d2", 5),
        pytest.param("reinforce-gru", 1, marks=_LATER),
        pytest.param("rnd-ngu-gru", 5, marks=_LATER),
        pytest.param("vmpo-gru", 1, marks=_LATER),
    ],
)
def test_states_that_are_read_once_are_needed_at_the_first_step_only(name, leaves):
    c = case(name)
    trajectory = c.batch.trajectory
    once = c.agent.read_once(trajectory.agent_state)
    assert sum(jax.tree.leaves(once)) == leaves
    spec = transition_spec(c.agent, EnvSpec(c.setting.obs_spec, c.setting.action_spec))
    marked = jax.tree.map(lambda x: isinstance(x, StartSpec), spec.agent_state)
    assert marked == once
    state = jax.tree.map(lambda x, o: x[:1] if o else x, trajectory.agent_state, once)
    batch = c.batch._replace(trajectory=trajectory._replace(agent_state=state))
    found = quick_jit(c.agent.learner_step)(c.params, c.learner_state, batch)
    assert_close(found, c.learn(c.params, c.learner_state, c.batch))


def test_a_subclass_has_states_at_every_step_unless_it_says_otherwise():
    c = case("ppo-gru")

    class Own(type(c.agent)):
        """May read more than PPO."""

    own = Own(*c.agent._arguments)
    assert jax.tree.leaves(own.read_once(c.agent.initial_state(2))) == [False]


def test_a_learner_restored_from_a_checkpoint_goes_on_as_it_would_have(c, tmp_path):
    params, learner_state, _ = c.learn(c.params, c.learner_state, c.batch)
    saved = {"params": params, "learner_state": learner_state}
    path = checkpoint.save(tmp_path, 1, saved, {})
    restored = checkpoint.restore(path, jax.tree.map(jnp.zeros_like, saved))
    restored = jax.tree.map(np.asarray, restored)  # arrays of a device would be compiled for anew
    again = c.learn(restored["params"], restored["learner_state"], c.batch)
    assert_close(again, c.learn(params, learner_state, c.batch), atol=0, rtol=0)


def test_learning_a_batch_again_and_again_does_what_losses_are_for(c):
    """Measures progress without the loss, so that a wrong sign in the loss fails the test."""
    if isinstance(c.agent, Normalised):
        pytest.skip("the agent inside is judged; test_normalised compares the two")
    if not c.setting.learns:
        pytest.skip("it has no loss")
    cfg, params, learner_state = c.setting.cfg, c.params, c.learner_state
    errors = []
    for _ in range(30):
        params, learner_state, output = c.learn(params, learner_state, c.batch)
        if output.priorities is not None:
            errors.append(output.priorities.mean())
    if isinstance(c.agent, BC):
        assert likelihood(c, params).mean() > likelihood(c, c.params).mean()
    elif isinstance(c.agent, PolicyGradientAgent):
        before, after = judged(c, c.params), judged(c, params)
        assert after.preference > before.preference
        has_free_value = not getattr(cfg, "value_clip", 0) and getattr(cfg, "baseline", True)
        assert after.value_error < before.value_error or not has_free_value
    elif isinstance(c.agent, PQN):
        assert error_of_values(c, params) < error_of_values(c, c.params)
    else:
        assert errors[-1] < errors[0]
    if isinstance(c.agent, AdvantageWeightedAgent):
        assert imitated(c, params) > imitated(c, c.params)
    elif isinstance(c.agent, PolicyAndCriticsAgent) and c.setting.action_spec is not ONE_OF_4:
        assert critics_opinion(c, params, params.policy) > critics_opinion(
            c, params, c.params.policy
        )


def imitated(c, params):
    """The mean log probability of the actions of items that begin with a transition."""
    step = jax.tree.map(lambda x: x[0], c.batch.trajectory)
    distribution = c.agent.distribution(params.policy, step.timestep)
    log_prob = distribution.log_prob(c.agent.unit_action(step.agent_output.action))
    return float(np.asarray(log_prob)[step.timestep.step_type != LAST].mean())


def critics_opinion(c, params, policy):
    """The critics' mean value for the policy's actions at the batch's first steps."""
    timestep = jax.tree.map(lambda x: x[0], c.batch.trajectory.timestep)
    output, _ = c.act_greedily(
        c.key, params._replace(policy=policy), timestep, c.agent.initial_state(BATCH)
    )
    action = distributions.bounds_of(c.setting.action_spec, "test").to_unit(output.action)
    return float(c.agent.critic_values(params.critics, timestep, action).mean())


def error_of_values(c, params):
    """The mean squared distance of the values of the actions taken to their lambda returns."""
    trajectory, cfg = c.batch.trajectory, c.setting.cfg
    mask = trajectory.timestep.step_type[1:] != FIRST
    targets = returns.lambda_returns(
        trajectory.timestep.reward[1:],
        trajectory.timestep.discount[1:] * cfg.discount,
        trajectory.agent_output.value,
        cfg.return_lambda,
        mask,
    )
    before = jax.tree.map(lambda x: x[:-1], trajectory)
    core = jax.tree.map(lambda x: x[0], before.agent_state.core)
    values, _ = quick_jit(c.agent.network.unroll)(None, params, before.timestep, core)
    taken = np.take_along_axis(np.asarray(values), before.agent_output.action[..., None], -1)
    return float(((taken[..., 0] - targets) ** 2)[mask].mean())


def likelihood(c, params):
    """Log probabilities [N] of the actions that took effect in the batch."""
    trajectory = jax.tree.map(lambda x: x[:-1], c.batch.trajectory)
    timestep, state = trajectory.timestep, jax.tree.map(lambda x: x[0], trajectory.agent_state)
    parameters, _ = quick_jit(c.agent.network.unroll)(None, params, timestep, state)
    log_prob = distributions.from_parameters(
        c.setting.action_spec, parameters, action_mask(timestep.observation)
    ).log_prob(trajectory.agent_output.action)
    return np.asarray(log_prob)[timestep.step_type != LAST]


class Judged(NamedTuple):
    preference: float  # mean of advantage x log probability of the action taken
    value_error: float  # mean of squared distances to the targets


def judged(c, params):
    trajectory = c.batch.trajectory
    before = jax.tree.map(lambda x: x[:-1], trajectory)
    cfg, timestep = c.setting.cfg, before.timestep
    mask = trajectory.timestep.step_type[1:] != FIRST
    if isinstance(c.agent, Reinforce):  # only steps whose episode ends in the batch
        ends = trajectory.timestep.last()
        mask &= np.stack([ends[t:].any(axis=0) for t in range(1, len(ends))])
    advantage, target = returns.gae(
        trajectory.timestep.reward[1:],
        trajectory.timestep.discount[1:] * cfg.discount,
        trajectory.agent_output.value,
        getattr(cfg, "gae_lambda", 1.0),
        mask,
    )
    state = jax.tree.map(lambda x: x[0], trajectory.agent_state)
    output, _ = c.unroll(None, params, timestep, state)
    log_prob = distributions.from_parameters(
        c.setting.action_spec, output.policy, action_mask(timestep.observation)
    ).log_prob(before.agent_output.action)
    weight = advantage - advantage[mask].mean()
    return Judged(
        float((weight * log_prob)[mask].mean()), float(((output.value - target) ** 2)[mask].mean())
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in ("dqn-masked", "ppo-masked", "bc-masked") else _LATER
        )
        for name, setting in settings().items()
        if setting.obs_spec is MASKED
    ],
)
def test_masked_actions_are_never_taken(name):
    c = case(name)
    batch = acted_batch(c, c.params, step_types(), seed=5)
    mask = batch.trajectory.timestep.observation["action_mask"]
    taken = np.take_along_axis(mask, batch.trajectory.agent_output.action[..., None], axis=-1)
    assert taken.all()
    assert not mask.all()


def test_masked_actions_of_entities_are_never_taken():
    c = case("ppo-entities")
    trajectory = acted_batch(c, c.params, step_types(), seed=5).trajectory
    observation, action = trajectory.timestep.observation, trajectory.agent_output.action
    for name, spec in c.setting.action_spec.items():
        mask = observation["action_mask"][name].reshape((*action[name].shape, -1))
        assert np.take_along_axis(mask, action[name][..., None], axis=-1).all()
        assert not mask.all()
        assert (action[name][observation["actors"][name] < 0] == 0).all()
        assert action[name].shape[2:] == spec.shape


def test_no_agent_jits_names_a_device_or_sets_attributes_later():
    for path in Path(agents.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", None))
            assert name not in ("jit", "pmap", "device_put", "devices"), f"{path}:{node.lineno}"
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                stored = [
                    x
                    for x in ast.walk(node)
                    if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)
                ]
                assert not stored, f"{path}:{node.lineno}"
