"""PPO: its loss and minibatches against numpy, its components and recurrence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.configs.learner import LearnerConfig
from rlstack.exploration import Sample
from rlstack.families.epochs import EpochRows
from rlstack.families.policy_gradient import PolicyGradientOutput
from rlstack.learning.learner import Learner
from rlstack.networks import (
    ActorCriticOutput,
    Network,
    NetworkConfig,
    RaggedTransformerConfig,
    actor_critic,
)
from rlstack.optimizers import OptimizerConfig
from rlstack.replay import Sample as ReplaySample
from rlstack.types import TimeStep
from tests.agent_cases import (
    ENTITIES,
    FAST,
    FIRST,
    GRU,
    GTRXL,
    IMAGE,
    LAST,
    LSTM,
    MASKED,
    MID,
    MINGRU,
    NESTED,
    NORMALISED,
    ONE_OF_4,
    REAL,
    SEVERAL,
    SMALL,
    STRUCTURED,
    VECTOR,
    Case,
    Setting,
    acted_batch,
    assert_close,
    case,
    quick_jit,
    step_types,
)
from tests.networks import ragged_cases

PPO_SMALL = PPOConfig(num_epochs=2, num_minibatches=2, optimizer=FAST, entropy_cost=0.0)
BY_REWARD = dataclasses.replace(NORMALISED, rewards="reward")
SETTINGS = {
    "ppo-separate": Setting(PPO_SMALL, VECTOR, ONE_OF_4),
    "ppo-masked": Setting(dataclasses.replace(PPO_SMALL, value_clip=0.5), MASKED, ONE_OF_4),
    "ppo-normalised": Setting(PPO_SMALL, MASKED, ONE_OF_4, normalisation=NORMALISED),
    "ppo-gru-normalised": Setting(PPO_SMALL, VECTOR, REAL, GRU, BY_REWARD),
    "ppo-image": Setting(
        PPO_SMALL, IMAGE, ONE_OF_4, dataclasses.replace(SMALL, torso="nature", shared=True)
    ),
    "ppo-shared": Setting(PPO_SMALL, NESTED, ONE_OF_4, dataclasses.replace(SMALL, shared=True)),
    "ppo-several": Setting(PPO_SMALL, VECTOR, SEVERAL),
    "ppo-continuous": Setting(PPO_SMALL, VECTOR, REAL),
    "ppo-structured": Setting(PPO_SMALL, VECTOR, STRUCTURED),
    "ppo-entities": Setting(
        dataclasses.replace(PPO_SMALL, ratio="per_actor"),
        ENTITIES,
        ragged_cases.CODEC.action_spec,
        NetworkConfig(entities=RaggedTransformerConfig(d_model=8, num_layers=1)),
    ),
    "ppo-lstm": Setting(PPO_SMALL, VECTOR, ONE_OF_4, LSTM),
    "ppo-gru": Setting(PPO_SMALL, MASKED, ONE_OF_4, GRU),
    "ppo-mingru": Setting(PPO_SMALL, VECTOR, ONE_OF_4, MINGRU),
    "ppo-gtrxl": Setting(PPO_SMALL, VECTOR, REAL, GTRXL),
}


def linear_network():
    """An actor-critic written by hand, without Haiku: logits and value are linear."""

    def init(key):
        return {"policy_head": jax.random.normal(key, (3, 4)), "value_head": jnp.ones(3)}

    def apply(key, params, timestep, state):
        x = timestep.observation
        return ActorCriticOutput(x @ params["policy_head"], x @ params["value_head"]), state

    return Network(init, apply, apply, lambda batch_size: ())


def linear_agent(**config):
    return PPO(PPOConfig(**config), VECTOR, ONE_OF_4, lambda *_: linear_network(), Sample)


def rows_for(network, num_rows=12, seed=0):
    """Rows whose ratios are inside, above and below the clip range."""
    rng = np.random.default_rng(seed)
    observation = rng.normal(size=(num_rows, 3)).astype(np.float32)
    action = rng.integers(0, 4, num_rows).astype(np.int32)
    logits = observation @ np.asarray(network["policy_head"])
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    shift = np.resize(np.log([0.5, 0.95, 1.05, 2.0]), num_rows)  # the change of log_prob
    floats = rng.normal(size=(3, num_rows)).astype(np.float32)
    floats[0] = np.repeat([1, -1, 2, -0.5], 3)  # advantages of both signs for every ratio
    timestep = TimeStep(
        np.ones(num_rows, np.int32), np.zeros(num_rows), np.ones(num_rows), observation
    )
    behaviour = (log_probs[np.arange(num_rows), action] - shift).astype(np.float32)
    mask = ~np.isin(np.arange(num_rows), (1, 10))
    return EpochRows(
        timestep, PolicyGradientOutput(action, behaviour, floats[1]), floats[0], floats[2], mask, ()
    ), log_probs


@pytest.mark.parametrize("value_clip", [0.0, 0.3])
@pytest.mark.parametrize(("normalise", "epsilon"), [(False, 1e-8), (True, 1e-8), (True, 0.5)])
def test_the_loss_is_the_papers(value_clip, normalise, epsilon):
    agent = linear_agent(
        value_clip=value_clip,
        normalise_advantages=normalise,
        advantage_epsilon=epsilon,
        entropy_cost=0.1,
        value_cost=0.7,
    )
    params = agent.initial_params(jax.random.PRNGKey(0))
    rows, log_probs = rows_for(params)
    loss, logs = quick_jit(agent.loss)(params, rows)

    kept = np.flatnonzero(rows.mask)
    advantage = rows.advantage.astype(np.float64)
    if normalise:
        advantage = (advantage - advantage[kept].mean()) / (advantage[kept].std() + epsilon)
    value = rows.timestep.observation @ np.asarray(params["value_head"])
    policy_loss = value_loss = entropy = clipped = 0.0
    sides = set()
    for i in kept:
        ratio = np.exp(log_probs[i, rows.output.action[i]] - rows.output.behaviour_log_prob[i])
        limited = min(max(ratio, 0.8), 1.2)
        if limited != ratio:
            clipped += 1
            sides.add((limited, bool(advantage[i] > 0)))
        policy_loss -= min(ratio * advantage[i], limited * advantage[i])
        error = (value[i] - rows.target[i]) ** 2
        if value_clip:
            old = rows.output.value[i]
            near = old + min(max(value[i] - old, -value_clip), value_clip)
            error = max(error, (near - rows.target[i]) ** 2)
        value_loss += 0.5 * error
        entropy -= (np.exp(log_probs[i]) * log_probs[i]).sum()
    assert len(sides) == 4  # both sides of the range, with either sign of the advantage
    expected = {
        "policy_loss": policy_loss / len(kept),
        "value_loss": value_loss / len(kept),
        "entropy": entropy / len(kept),
        "clip_fraction": clipped / len(kept),
    }
    for name, number in expected.items():
        np.testing.assert_allclose(logs[name], number, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(
        loss,
        expected["policy_loss"] + 0.7 * expected["value_loss"] - 0.1 * expected["entropy"],
        rtol=1e-4,
    )


def test_the_gradient_of_a_clipped_row_vanishes():
    agent = linear_agent(normalise_advantages=False, entropy_cost=0.0, value_cost=0.0)
    params = agent.initial_params(jax.random.PRNGKey(0))
    rows, _ = rows_for(params)

    compiled = quick_jit(jax.grad(agent.loss, has_aux=True))

    def gradient(i):
        one = jax.tree.map(lambda x: x[i : i + 1], rows._replace(mask=np.ones(12, bool)))
        grads = compiled(params, one)[0]
        return np.abs(grads["policy_head"]).max()

    # Row i has ratio (0.5, 0.95, 1.05, 2)[i % 4] and advantage (1, -1, 2, -0.5)[i // 3].
    for i in range(12):
        ratio, advantage = (0.5, 0.95, 1.05, 2.0)[i % 4], rows.advantage[i]
        stands = (ratio == 2.0 and advantage > 0) or (ratio == 0.5 and advantage < 0)
        assert (gradient(i) == 0) == stands, i


def test_a_truncation_is_bootstrapped_and_the_pair_after_it_left_out():
    c = case("ppo-separate")
    # Column 2 of these ends after two steps, here by a time limit.
    batch = acted_batch(c, c.params, step_types(), discount=np.ones((6, 4), np.float32))
    _, rows, _ = c.prepare(c.params, c.learner_state, batch)
    grid = jax.tree.map(lambda x: np.asarray(x).reshape((5, 4, *x.shape[1:])), rows)
    reward, value = batch.trajectory.timestep.reward, batch.trajectory.agent_output.value
    delta_1 = reward[2, 2] + 0.99 * value[2, 2] - value[1, 2]
    delta_0 = reward[1, 2] + 0.99 * value[1, 2] - value[0, 2]
    np.testing.assert_allclose(grid.advantage[1, 2], delta_1, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        grid.advantage[0, 2], delta_0 + 0.99 * 0.95 * delta_1, rtol=1e-4, atol=1e-6
    )
    assert grid.mask.sum() == 19 and not grid.mask[2, 2]

    rng = np.random.default_rng(0)
    poisoned = jax.tree.map(lambda x: x.copy(), batch)
    poisoned.trajectory.timestep.reward[3, 2] = 100.0  # the reward at FIRST
    output = poisoned.trajectory.agent_output
    output.action[2, 2] = (output.action[2, 2] + 1) % 4
    output.behaviour_log_prob[2, 2] -= 1.0
    _, other, _ = c.prepare(c.params, c.learner_state, poisoned)
    other = jax.tree.map(np.array, other)
    other.timestep.observation[2 * 4 + 2] = rng.normal(size=3)
    gradients = [c.gradient(c.params, chosen)[0] for chosen in (rows, other)]
    assert_close(*gradients, atol=1e-7)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", ["ppo-separate", "ppo-lstm"])
def test_a_scan_and_calls_learn_the_same(name):
    c = case(name)
    learners = [
        Learner(LearnerConfig(minibatches=kind), c.agent, None, c.key) for kind in ("scan", "calls")
    ]
    sample = ReplaySample(c.batch, np.arange(4, dtype=np.uint64))
    for _ in range(2):
        logs = [learner.step(sample) for learner in learners]
        assert_close(*logs, atol=1e-4, rtol=1e-3)
    saved = [learner.save() for learner in learners]
    assert_close(*saved, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["ppo-lstm", "ppo-gru"])
def test_an_unroll_from_the_stored_state_says_what_acting_said(name):
    c = case(name)
    # A policy far from uniform; otherwise its probabilities hardly depend on the state.
    head = jax.tree.map(lambda x: 100 * x, c.params["policy_head"])
    params = {**c.params, "policy_head": head}
    batch = acted_batch(c, params, step_types())
    _, rows, _ = c.prepare(params, c.learner_state, batch)
    _, logs = c.loss(params, rows)
    assert abs(logs["kl"]) < 1e-8 and logs["clip_fraction"] == 0
    forgetful = rows._replace(state=jax.tree.map(jnp.zeros_like, rows.state))
    _, logs = c.loss(params, forgetful)
    assert logs["kl"] > 1e-4
    for t in (0, 2):  # the beginning and the middle of the unroll
        rest = jax.tree.map(lambda x, t=t: x[t:], batch.trajectory)
        begun = jax.tree.map(lambda x: x[0], rest.agent_state)
        output, _ = c.unroll(None, params, rest.timestep, begun)
        assert_close(output.value, rest.agent_output.value, atol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "component", ["torso_optimizer", "policy_head_optimizer", "value_head_optimizer"]
)
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_component_moves_by_its_own_learning_rate(component, core):
    network = functools.partial(
        actor_critic, cfg=NetworkConfig(hidden_sizes=(8,), core=core, core_size=6)
    )
    base = PPOConfig(
        num_epochs=1,
        num_minibatches=1,
        max_grad_norm=0.0,
        optimizer=OptimizerConfig(name="sgd", learning_rate=0.01),
    )
    own = dataclasses.replace(base, **{component: OptimizerConfig(name="sgd", learning_rate=0.03)})
    plain, other = (PPO(cfg, VECTOR, ONE_OF_4, network, Sample) for cfg in (base, own))
    params = plain.initial_params(jax.random.PRNGKey(0))
    grads = jax.tree.map(jnp.ones_like, params)
    moved = [
        agent.apply_gradients(
            params, agent.initial_learner_state(jax.random.PRNGKey(0), params), grads
        )[0]
        for agent in (plain, other)
    ]
    modules = component.removesuffix("_optimizer")
    named = {"torso": ("torso", "core", "lstm")}.get(modules, (modules,))
    tripled = set()
    for module, leaves in params.items():
        for name, old in leaves.items():
            once, more = (np.asarray(new[module][name] - old) for new in moved)
            expected = 3 if any(part in module + name for part in named) else 1
            np.testing.assert_allclose(more, expected * once, rtol=1e-3)
            tripled |= {module} if expected == 3 else set()
    assert tripled


def test_too_many_minibatches_are_refused_and_a_remainder_is_left_out():
    c = case("ppo-separate")
    many = PPO(dataclasses.replace(PPO_SMALL, num_minibatches=21), *c.agent._arguments[1:])
    with pytest.raises(ValueError, match=r"num_minibatches must be at most the 20 rows.*steps.*21"):
        many.prepare(c.params, c.learner_state, c.batch)
    lstm = case("ppo-lstm")
    many = PPO(dataclasses.replace(PPO_SMALL, num_minibatches=5), *lstm.agent._arguments[1:])
    with pytest.raises(ValueError, match=r"4 rows.*environments"):
        many.prepare(lstm.params, lstm.learner_state, lstm.batch)

    uneven = PPO(
        dataclasses.replace(PPO_SMALL, num_minibatches=3, num_epochs=4), *c.agent._arguments[1:]
    )
    _, _, schedule = uneven.prepare(c.params, c.learner_state, c.batch)
    assert schedule.shape == (4 * 3, 6)  # 20 rows in three minibatches
    epochs = np.asarray(schedule).reshape((4, 18))
    left_out = [set(range(20)) - set(epoch.tolist()) for epoch in epochs]
    assert all(len(rows) == 2 for rows in left_out)
    assert len(set(map(frozenset, left_out))) > 1
    later, _, _ = uneven.prepare(c.params, c.learner_state, c.batch)
    _, _, next_schedule = uneven.prepare(c.params, later, c.batch)
    assert not np.array_equal(schedule, next_schedule)


def test_a_network_without_haiku_learns():
    agent = linear_agent(optimizer=FAST, num_epochs=1, num_minibatches=1)
    c = Case(Setting(PPO_SMALL, VECTOR, ONE_OF_4))
    c.agent, c.act = agent, jax.jit(agent.actor_step)
    params = agent.initial_params(c.key)
    state = agent.initial_learner_state(c.key, params)
    batch = acted_batch(c, params, step_types())
    learn = quick_jit(agent.learner_step)
    losses = []
    for _ in range(5):
        params, state, output = learn(params, state, batch)
        losses.append(output.logs["value_loss"])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"discount": 1.1},
        {"gae_lambda": -0.1},
        {"num_epochs": 0},
        {"num_minibatches": 0},
        {"advantage_epsilon": 0.0},
    ],
)
def test_configs_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        PPOConfig(**changes)


def test_recurrence_starts_afresh_at_an_episode_in_the_unroll():
    c = case("ppo-lstm")
    trajectory = c.batch.trajectory
    assert trajectory.timestep.step_type[3, 2] == FIRST
    assert trajectory.timestep.step_type[2, 2] == LAST
    assert trajectory.timestep.step_type[1, 2] == MID
    tail = jax.tree.map(lambda x: x[3:, 2:3], trajectory)
    output, _ = c.agent.network.unroll(None, c.params, tail.timestep, c.agent.initial_state(1))
    assert_close(output.value, tail.agent_output.value, atol=1e-6)
    assert all(np.all(x[3, 2] == 0) for x in jax.tree.leaves(trajectory.agent_state))
