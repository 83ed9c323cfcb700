"""PPO under a limit on costs: by hand, against numpy, and in an environment with a known answer."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

import rlstack
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.agents.ppo_lagrangian import PPOLagrangian, PPOLagrangianConfig
from rlstack.exploration import Greedy
from rlstack.networks import actor_critic
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.storage import jsonl
from rlstack.types import EnvSpec
from tests.agent_cases import (
    BATCH,
    ENTITIES,
    FAST,
    FIRST,
    GRU,
    LAST,
    LENGTH,
    NORMALISED,
    ONE_OF_4,
    SMALL,
    VECTOR,
    Case,
    Setting,
    assert_close,
    case,
    leaves_differ,
    quick_jit,
)
from tests.fused.test_fused_run import saved
from tests.programs import running

COST = {"cost": specs.Array((), np.float32)}
CFG = PPOLagrangianConfig(
    num_epochs=2,
    num_minibatches=2,
    optimizer=FAST,
    cost_limit=1.0,
    cost_sizes=(8,),
    cost_value=FAST,
    cost_discount=0.9,
    cost_gae_lambda=0.7,
)
# Contract tests do not judge what a normalised agent learns; tests below do.
SETTINGS = {
    "ppo-lagrangian": Setting(CFG, VECTOR, ONE_OF_4, normalisation=NORMALISED, extras_spec=COST),
    "ppo-lagrangian-gru": Setting(
        CFG, VECTOR, ONE_OF_4, GRU, normalisation=NORMALISED, extras_spec=COST
    ),
}


def plain(name="ppo-lagrangian", **changes):
    """A case without normalisation."""
    setting = SETTINGS[name]
    cfg = dataclasses.replace(setting.cfg, **changes)
    return Case(setting._replace(cfg=cfg, normalisation=Setting(cfg, None, None).normalisation))


def stepped(optimizer, limit, totals, ends, number=0.0, steps=1):
    c = plain(multiplier=optimizer, cost_limit=limit)
    state = c.learner_state.cost._replace(number=jnp.float32(number))
    for _ in range(steps):
        state = c.agent.step_multiplier(state, jnp.array(totals), jnp.array(ends))
    return state


def test_the_multipliers_step_by_hand():
    # Episodes of 5, 2 and 8 end, in a batch of two environments, under a limit of 3: the number
    # rises by 0.1 x ((5 - 3) + (2 - 3) + (8 - 3)) / 2 = 0.3.
    totals = [[5.0, 1.0], [2.0, 1.5], [1.0, 8.0]]
    ends = [[True, False], [True, False], [False, True]]
    sgd = OptimizerConfig("sgd", learning_rate=0.1)
    state = stepped(sgd, 3.0, totals, ends, number=0.5)
    np.testing.assert_allclose(state.number, 0.8, rtol=1e-6)
    np.testing.assert_allclose(state.episode_cost, 5.0)
    # Adam's first step is its learning rate, up or down.
    adam = OptimizerConfig(learning_rate=0.05)
    np.testing.assert_allclose(stepped(adam, 3.0, totals, ends).number, 0.05, rtol=1e-4)
    np.testing.assert_allclose(stepped(adam, 30.0, totals, ends).number, -0.05, rtol=1e-4)


def test_the_first_multiplier_is_that_of_the_config_and_it_stays_positive():
    number = plain(initial_multiplier=2.5).learner_state.cost.number
    np.testing.assert_allclose(np.log1p(np.exp(number)), 2.5, rtol=1e-6)
    sgd = OptimizerConfig("sgd", learning_rate=1.0)
    state = stepped(sgd, 20.0, [[0.0]], [[True]])
    np.testing.assert_allclose(state.number, -20.0)
    assert 0 < jax.nn.softplus(state.number) < 1e-8


def test_a_batch_without_an_end_leaves_the_multiplier_and_the_mean():
    totals, ends = [[5.0, 9.0]], [[False, False]]
    for optimizer in (OptimizerConfig(), OptimizerConfig("sgd")):
        state = stepped(optimizer, 3.0, totals, ends, number=0.5, steps=3)
        assert state.number == 0.5 and state.episode_cost == 0


def test_many_short_episodes_do_not_count_as_one():
    """Half of the episodes cost 4 and half 0: the mean is the limit, also in batches that differ.

    Four short ones end in one batch, and a long one in each of the four others.
    """
    sgd = OptimizerConfig("sgd", learning_rate=0.1)
    c = plain(multiplier=sgd, cost_limit=2.0)
    state = c.learner_state.cost
    short, long = jnp.full((4, 1), 4.0), jnp.zeros((4, 1))
    state = c.agent.step_multiplier(state, short, jnp.ones((4, 1), bool))
    for _ in range(4):
        state = c.agent.step_multiplier(state, long, jnp.arange(4)[:, None] == 3)
    np.testing.assert_allclose(state.number, c.learner_state.cost.number, atol=1e-6)


def test_acting_adds_up_the_costs_of_each_episode():
    c = plain()
    trajectory = c.batch.trajectory
    costs, first = trajectory.timestep.extras["cost"], trajectory.timestep.first()
    found = trajectory.agent_state.episode_cost
    total = found[0].copy()
    for t in range(LENGTH + 1):
        total[first[t]] = 0
        np.testing.assert_allclose(found[t], total, rtol=1e-5, atol=1e-6)
        total += np.where(first[t], 0, costs[t])
    assert (np.abs(found[-1]) > 0).all()


def in_numpy(c, values):
    """Rewards and costs of the batch with the cost's values [T+1, B], by loops; by row and time."""
    trajectory, cfg = c.batch.trajectory, c.setting.cfg
    step, state = trajectory.timestep, trajectory.agent_state
    totals = [
        state.episode_cost[t, b] + step.extras["cost"][t, b]
        for t in range(1, LENGTH + 1)
        for b in range(BATCH)
        if step.step_type[t, b] == LAST
    ]
    number = np.log(np.expm1(cfg.initial_multiplier))
    number += 0.1 * sum(total - cfg.cost_limit for total in totals) / BATCH
    multiplier = np.log1p(np.exp(number))

    def advantages(rewards, values, discount, trace):
        found = np.zeros((LENGTH, BATCH))
        for b in range(BATCH):
            later = 0.0
            for t in reversed(range(LENGTH)):
                if step.step_type[t + 1, b] == FIRST:
                    later = 0.0
                    continue
                factor = discount * step.discount[t + 1, b]
                error = rewards[t + 1, b] + factor * values[t + 1, b] - values[t, b]
                found[t, b] = later = error + factor * trace * later
        return found

    reward = advantages(step.reward, trajectory.agent_output.value, cfg.discount, cfg.gae_lambda)
    cost = advantages(step.extras["cost"], values, cfg.cost_discount, cfg.cost_gae_lambda)
    both = (reward - multiplier * cost) / (1 + multiplier)
    return multiplier, both, cost + values[:-1], np.mean(totals)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_advantage_is_that_of_both_streams(name):
    c = plain(name, multiplier=OptimizerConfig("sgd", learning_rate=0.1), initial_multiplier=0.7)
    timestep = c.batch.trajectory.timestep
    first = c.learner_state.cost.value
    values = np.asarray(c.agent._value.unroll(None, first, timestep, ())[0])
    state, rows, _ = c.prepare(c.params, c.learner_state, c.batch)
    multiplier, advantage, target, mean = in_numpy(c, values)

    def laid_out(x):
        return x.T if rows.agent.mask.ndim == 2 else x.reshape(-1)

    np.testing.assert_allclose(jax.nn.softplus(state.cost.number), multiplier, rtol=1e-5)
    np.testing.assert_allclose(state.cost.episode_cost, mean, rtol=1e-5)
    np.testing.assert_allclose(rows.agent.advantage, laid_out(advantage), rtol=1e-3, atol=1e-5)
    mask = laid_out(timestep.step_type[1:] != FIRST)
    np.testing.assert_array_equal(rows.own.mask, mask)
    np.testing.assert_allclose(rows.own.target[mask], laid_out(target)[mask], rtol=1e-3, atol=1e-5)


def test_the_combined_advantage_by_hand():
    # Values of 0, one transition in each of four rows that terminate with a reward of 3 and a cost
    # of 1: a multiplier of 2 gives (3 - 2 x 1) / (1 + 2).
    c = plain(initial_multiplier=2.0, multiplier=OptimizerConfig("sgd", learning_rate=1e-9))
    zero = jax.tree.map(jnp.zeros_like, c.learner_state.cost.value)
    state = c.learner_state._replace(cost=c.learner_state.cost._replace(value=zero))
    two = jax.tree.map(lambda x: x[:2], c.batch.trajectory)
    timestep = two.timestep._replace(
        step_type=np.array([[1] * BATCH, [LAST] * BATCH], np.int32),
        reward=np.full((2, BATCH), 3, np.float32),
        discount=np.zeros((2, BATCH), np.float32),
        extras={"cost": np.ones((2, BATCH), np.float32)},
    )
    output = two.agent_output._replace(value=np.zeros((2, BATCH), np.float32))
    batch = c.batch._replace(trajectory=two._replace(timestep=timestep, agent_output=output))
    _, rows, _ = c.prepare(c.params, state, batch)
    np.testing.assert_allclose(rows.agent.advantage, [1 / 3] * BATCH, rtol=1e-5)
    np.testing.assert_allclose(rows.own.target, [1.0] * BATCH)


def test_with_a_multiplier_of_0_it_is_ppo():
    c = plain(initial_multiplier=1e-30, cost_limit=1e6)
    inner = c.agent.agent
    assert type(inner) is PPO
    trajectory = c.batch.trajectory
    trajectory = trajectory._replace(agent_state=trajectory.agent_state.agent)
    batch = c.batch._replace(trajectory=trajectory)
    wanted = quick_jit(inner.learner_step)(c.params, c.learner_state.agent, batch)
    params, state, output = c.learn(c.params, c.learner_state, c.batch)
    assert_close(params, wanted[0], atol=1e-6)
    assert_close(state.agent, wanted[1], atol=1e-6)
    assert {"episode_cost", "multiplier", "cost_value_loss"} == set(output.logs) - set(
        wanted[2].logs
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("cost", "least", "most"), [(1.0, 0.0, 0.9), (-1.0, 1.1, 2.0)])
def test_a_large_multiplier_makes_costly_actions_rarer(cost, least, most):
    """And actions with a negative cost more frequent, as far as clipped ratios allow."""
    c = plain(initial_multiplier=50.0, entropy_cost=0.0)
    action, timestep = c.batch.trajectory.agent_output.action, c.batch.trajectory.timestep
    costs = np.zeros_like(timestep.reward)
    costs[1:] = cost * (action[:-1] == 2)
    assert costs.any()
    timestep = timestep._replace(extras={"cost": costs})
    batch = c.batch._replace(trajectory=c.batch.trajectory._replace(timestep=timestep))
    params, state = c.params, c.learner_state

    def chance(params):
        step = jax.tree.map(lambda x: x[0], timestep)
        found = c.agent.action_distribution(c.key, params, step, c.agent.initial_state(BATCH))
        return float(np.exp(found.log_prob(np.full(BATCH, 2))).mean())

    for _ in range(20):
        params, state, _ = c.learn(params, state, batch)
    assert least < chance(params) / chance(c.params) < most


@pytest.mark.slow
@pytest.mark.chosen
def test_the_value_of_the_cost_learns_its_return():
    c = plain(cost_value=OptimizerConfig(learning_rate=1e-2))
    params, state, first = c.learn(c.params, c.learner_state, c.batch)
    for _ in range(60):
        params, state, output = c.learn(params, state, c.batch)
    assert output.logs["cost_value_loss"] < 0.5 * first.logs["cost_value_loss"]
    assert leaves_differ(state.cost.value, c.learner_state.cost.value)


def test_the_params_and_actions_are_those_of_ppo():
    c = plain()
    inner = c.agent.agent
    assert_close(c.params, quick_jit(inner.initial_params)(c.key), atol=0, rtol=0)
    timestep = jax.tree.map(lambda x: x[0], c.batch.trajectory.timestep)
    state = c.agent.initial_state(BATCH)
    found = c.act(c.key, c.params, timestep, state)
    wanted = quick_jit(inner.actor_step)(c.key, c.params, timestep, state.agent)
    assert_close((found[0], found[1].agent), wanted, atol=0, rtol=0)


def test_what_is_refused():
    experiment = dataclasses.replace(preset("toll-ppo-lagrangian"), network=SMALL)
    spec = EnvSpec(VECTOR, ONE_OF_4)
    message = r"must show an extra 'cost'.*its extras are {}\. Declare it as docs/extras.md says"
    with pytest.raises(ValueError, match=message.format("none")):
        make_agent(experiment, spec)
    with pytest.raises(ValueError, match=message.format("fee, level")):
        make_agent(experiment, spec._replace(extras={"fee": VECTOR, "level": ONE_OF_4}))
    with pytest.raises(ValueError, match=message.format("cost")):  # more than one number
        make_agent(experiment, spec._replace(extras={"cost": VECTOR}))
    make_agent(experiment, spec, greedy=True)  # only learning needs it
    make_agent(experiment, spec._replace(extras=COST))
    c = case("ppo-lagrangian")
    bare = c.batch.trajectory.timestep._replace(extras=())
    with pytest.raises(ValueError, match="must show an extra 'cost'"):
        c.learn(
            c.params,
            c.learner_state,
            c.batch._replace(trajectory=c.batch.trajectory._replace(timestep=bare)),
        )
    with pytest.raises(ValueError, match="initial_multiplier must be positive"):
        PPOLagrangianConfig(initial_multiplier=0.0)
    with pytest.raises(ValueError, match=r"cost_discount must be in \[0, 1\]"):
        PPOLagrangianConfig(cost_discount=1.1)
    network = functools.partial(actor_critic, cfg=SMALL)
    with pytest.raises(ValueError, match=r"PPOLagrangian: observations must be arrays"):
        PPOLagrangian(CFG, ENTITIES, ONE_OF_4, lambda *_: network(VECTOR, ONE_OF_4), Greedy)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_resumed_fused_run_equals_an_uninterrupted_one(tmp_path):
    experiment = running.small(
        preset("toll-ppo-lagrangian"),
        "fused",
        10**6,
        env={"num_envs": 4},
        replay={"batch_size": 4, "unroll_length": 6, "max_size": 8},
    )
    for name, updates in (("half", 5), ("whole", 10)):
        running.run(dataclasses.replace(experiment, updates=updates), tmp_path / name)
    train.resume(tmp_path / "half", updates=10, stream=io.StringIO())
    found, wanted = saved(tmp_path / "half"), saved(tmp_path / "whole")
    assert any(name.endswith(".cost.number") for name in found)
    assert any("acting" in name for name in found)
    assert found == wanted  # with the digests of all arrays


def rolled_out(run_dir, experiment, episodes=2048):
    """The mean return and cost of a run's greedy policy."""
    policy = rlstack.load(run_dir)
    with running.make_env(dataclasses.replace(experiment.env, num_envs=episodes), 99) as env:
        timestep = env.reset()
        returns, costs = np.zeros(episodes), np.zeros(episodes)
        while not timestep.last().any():
            timestep = env.step(policy.act(timestep.observation))
            returns += timestep.reward
            costs += timestep.extras["cost"]
    return returns.mean(), costs.mean()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(180)
def test_it_finds_the_best_return_within_the_limit_and_ppo_breaks_it(tmp_path):
    """By `Toll`: 8 is the best return at a cost of 2, and the multiplier is then 2."""
    experiment = preset("toll-ppo-lagrangian")
    running.run(experiment, tmp_path / "run")
    found, cost = rolled_out(tmp_path / "run", experiment)
    assert abs(cost - 2) < 0.15 and abs(found - 8) < 0.3
    assert found > 16 * np.sqrt(cost / 8) - 0.1  # no policy of this cost has more
    lines = list(jsonl.read(tmp_path / "run/metrics.jsonl"))
    learned = [line for line in lines if "learner/multiplier" in line][-1]
    assert abs(learned["learner/multiplier"] - 2) < 0.3
    assert abs(learned["learner/episode_cost"] - 2) < 0.3
    names = [field.name for field in dataclasses.fields(PPOConfig)]
    agent = PPOConfig(**{name: getattr(experiment.agent, name) for name in names})
    plain_ppo = dataclasses.replace(experiment, agent=agent, frames=200_000)
    running.run(plain_ppo, tmp_path / "ppo")
    found, cost = rolled_out(tmp_path / "ppo", plain_ppo)
    assert found > 15.5 and cost > 7
