"""The bonus for new observations: by hand, against numpy, and what an agent does with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.agents.pqn import PQN, PQNConfig
from rlstack.agents.rnd import RNDConfig, RNDDQNConfig
from rlstack.exploration import Greedy
from rlstack.families.intrinsic import (
    IntrinsicConfig,
    IntrinsicEpochs,
    NovelOutput,
    discounted_sums,
    intrinsic,
)
from rlstack.networks import q_network
from tests.agent_cases import (
    BATCH,
    ENTITIES,
    FAST,
    FIRST,
    GRU,
    IMAGE,
    LENGTH,
    MASKED,
    NORMALISED,
    ONE_OF_4,
    SMALL,
    VECTOR,
    Case,
    Setting,
    acted_batch,
    assert_close,
    case,
    leaves_differ,
    quick_jit,
    step_types,
)

SMALL_SIZES = {"novelty_sizes": (8,), "embedding_size": 6, "predictor": FAST}
RND = RNDConfig(num_epochs=2, num_minibatches=2, optimizer=FAST, **SMALL_SIZES)
RND_DQN = RNDDQNConfig(optimizer=FAST, target_period=5, **SMALL_SIZES)
EPISODIC = {"memory_size": 3, "memory_width": 4, "num_neighbours": 2}
# Contract tests do not judge what a normalised agent learns; tests below do.
SETTINGS = {
    "rnd": Setting(RND, VECTOR, ONE_OF_4, normalisation=NORMALISED),
    "rnd-ngu-gru": Setting(
        dataclasses.replace(RND, bonus="ngu", predictor_share=0.5, **EPISODIC),
        MASKED,
        ONE_OF_4,
        GRU,
        NORMALISED,
    ),
    "rnd-dqn": Setting(RND_DQN, VECTOR, ONE_OF_4, normalisation=NORMALISED),
    "rnd-dqn-episodic": Setting(
        dataclasses.replace(RND_DQN, bonus="episodic", **EPISODIC),
        IMAGE,
        ONE_OF_4,
        normalisation=NORMALISED,
    ),
}


@functools.cache
def plain(name, **changes):
    """A case without normalisation."""
    setting = SETTINGS[name]
    cfg = dataclasses.replace(setting.cfg, **changes)
    return Case(Setting(cfg, setting.obs_spec, setting.action_spec, setting.network))


def test_discounted_sums_go_through_rows_and_batches_by_hand():
    amounts = jnp.array([[1.0, 4.0], [2.0, 8.0]])  # [T, B]
    present = jnp.array([[True, False], [True, True]])
    found = discounted_sums(jnp.float32(10), amounts, present, 0.5)
    # 10 -> 6 -> 5 in the first row; in the second no transition, and 5 -> 10.5.
    np.testing.assert_allclose(found, [[6.0, 5.0], [5.0, 10.5]])


def in_numpy(c, state, batch):
    """The bonus of a batch by loops, [T, B]; from the learner's first state."""
    timestep = batch.trajectory.timestep
    after = timestep.observation[1:]
    present = timestep.step_type[1:] != FIRST
    rows = after[present]
    seen = np.clip((after - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8), -5, 5)

    def network(params, x, torso, sizes):
        for i in range(sizes):
            layer = params[f"{torso}/linear" + (f"_{i}" if i else "")]
            x = np.maximum(x @ layer["w"] + layer["b"], 0)
        return x

    target, predictor = jax.tree.map(np.asarray, (state.target, state.learned.predictor))
    aim = network(target, seen, "target_torso", 1) @ target["embedding"]["w"]
    hidden = network(predictor, seen, "predictor_torso", 1)
    for name in ("linear", "linear_1"):
        hidden = np.maximum(hidden @ predictor[name]["w"] + predictor[name]["b"], 0)
    guess = hidden @ predictor["embedding"]["w"]
    errors = ((guess - aim) ** 2).mean(-1)
    total, sums = 0.0, []
    for b in range(BATCH):
        for t in range(LENGTH):
            if present[t, b]:
                total = c.setting.cfg.intrinsic_discount * total + errors[t, b]
                sums.append(total)
    return np.where(present, errors / np.std(sums), 0), total


def test_the_bonus_of_rnd_is_that_of_numpy_and_is_added_to_rewards():
    c = plain("rnd-dqn", intrinsic_weight=0.5, extrinsic_weight=3.0)
    state = c.learner_state.novelty
    after, batch, rows = quick_jit(c.agent._rewarded)(state, c.batch)
    bonus, total = in_numpy(c, state, c.batch)
    np.testing.assert_allclose(rows.bonus, bonus, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(after.discounted_sum, total, rtol=1e-4)
    reward = c.batch.trajectory.timestep.reward
    np.testing.assert_allclose(
        batch.trajectory.timestep.reward[1:], 3 * reward[1:] + 0.5 * bonus, rtol=1e-3, atol=1e-5
    )
    same = c.batch.trajectory.timestep._replace(reward=batch.trajectory.timestep.reward)
    assert_close(batch.trajectory.timestep, same, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.chosen
def test_dqn_learns_from_these_rewards_and_the_predictor_from_the_batch():
    c = plain("rnd-dqn")
    state = c.learner_state
    batch = quick_jit(c.agent._rewarded)(state.novelty, c.batch)[1]
    inner = c.agent.agent
    assert type(inner) is DQN
    wanted = quick_jit(inner.learner_step)(c.params, state.agent, batch)
    params, after, output = c.learn(c.params, state, c.batch)
    assert_close(params, wanted[0])
    assert_close(after.agent, wanted[1])
    assert_close(output.priorities, wanted[2].priorities)
    losses = [output.logs["predictor_loss"]]
    for _ in range(80):
        params, after, output = c.learn(params, after, c.batch)
        losses.append(output.logs["predictor_loss"])
    assert losses[-1] < 0.5 * losses[0]
    assert_close(after.novelty.target, state.novelty.target, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_weight_of_0_is_the_agent_without_a_bonus():
    c = plain("rnd", intrinsic_weight=0.0, extrinsic_weight=1.0)
    wanted = quick_jit(c.agent.agent.learner_step)(c.params, c.learner_state.agent, c.batch)
    params, state, output = c.learn(c.params, c.learner_state, c.batch)
    assert_close(params, wanted[0], atol=1e-6)
    assert_close(state.agent, wanted[1], atol=1e-6)
    assert output.logs["intrinsic_reward"] > 0


def advantages(bonus, present, values, discount, trace):
    """Generalised advantages along the steps, where an end and a new beginning are one state."""
    steps = [t for t in range(len(bonus)) if present[t]]
    found, later = np.zeros(len(bonus)), 0.0
    for t in reversed(steps):
        # The value after a transition is that of the next state that the agent acts in.
        after = t + 1
        while after < len(bonus) and not present[after]:
            after += 1
        found[t] = later = bonus[t] + discount * (values[after] + trace * later) - values[t]
    return found


@pytest.mark.parametrize(
    "name", ["rnd", pytest.param("rnd-ngu-gru", marks=[pytest.mark.slow, pytest.mark.chosen])]
)
def test_the_advantage_of_ppo_is_that_of_both_streams(name):
    c = plain(name, intrinsic_weight=0.7, extrinsic_weight=2.0)
    novelty, batch, rows = quick_jit(c.agent._measured)(c.learner_state.novelty, c.batch)
    state, joined, schedule = c.prepare(c.params, c.learner_state, c.batch)
    _, wanted, order = quick_jit(c.agent.agent.prepare)(c.params, c.learner_state.agent, batch)
    assert_close(schedule, order, atol=0, rtol=0)
    observation = jax.tree.map(lambda x, y: np.concatenate([x[:1], y]), rows.before, rows.after)
    timestep = c.batch.trajectory.timestep._replace(observation=observation)
    value = c.agent._networks.value
    values = np.asarray(value.unroll(None, novelty.learned.value, timestep, ())[0])
    present, cfg = np.asarray(rows.present), c.setting.cfg
    intrinsic_part = np.stack(
        [
            advantages(
                np.asarray(rows.bonus)[:, b], present[:, b], values[:, b], 0.99, cfg.gae_lambda
            )
            for b in range(BATCH)
        ],
        axis=1,
    )
    intrinsic_part = (
        intrinsic_part.T if wanted.mask.ndim == 2 else intrinsic_part.reshape(-1)
    )  # rows are [B, T] of a recurrent network, else [T * B]
    assert intrinsic_part.any()
    np.testing.assert_allclose(
        joined.agent.advantage, 2 * wanted.advantage + 0.7 * intrinsic_part, rtol=1e-3, atol=1e-4
    )
    assert_close(joined.agent._replace(advantage=wanted.advantage), wanted, atol=1e-5)
    assert_close(state.novelty, novelty, atol=1e-6)


def test_an_episodes_end_does_not_stop_the_return_of_the_bonus_by_hand():
    c = plain("rnd", intrinsic_discount=0.5, gae_lambda=1.0)
    novelty, batch, rows = quick_jit(c.agent._measured)(c.learner_state.novelty, c.batch)
    zero = jax.tree.map(jnp.zeros_like, novelty.learned.value)  # a value of 0 everywhere
    novelty = novelty._replace(learned=novelty.learned._replace(value=zero))
    bonus = jnp.where(rows.present, 1.0, 0.0)
    advantage, target = c.agent._advantage(novelty, batch, rows._replace(bonus=bonus))
    # The third column has LAST at step 2 and FIRST at step 3: five steps, four transitions.
    np.testing.assert_allclose(target[:, 2], [1.875, 1.75, 1.5, 1.5, 1.0])
    np.testing.assert_allclose(target[:, 0], [1.9375, 1.875, 1.75, 1.5, 1.0])
    np.testing.assert_allclose(advantage, target)


@pytest.mark.slow
@pytest.mark.chosen
def test_the_value_of_the_bonus_learns_its_return():
    c = plain("rnd")
    params, state, first = c.learn(c.params, c.learner_state, c.batch)
    for _ in range(60):
        params, state, output = c.learn(params, state, c.batch)
    assert output.logs["intrinsic_value_loss"] < 0.5 * first.logs["intrinsic_value_loss"]
    assert output.logs["predictor_loss"] < 0.5 * first.logs["predictor_loss"]


def test_the_params_are_those_of_the_agent():
    for name in ("rnd", "rnd-dqn"):
        c = plain(name)
        inner = c.agent.agent
        params = quick_jit(inner.initial_params)(c.key)
        assert_close(c.params, params, atol=0, rtol=0)
        timestep = jax.tree.map(lambda x: x[0], c.batch.trajectory.timestep)
        state = c.agent.initial_state(BATCH)
        assert_close(
            c.act(c.key, params, timestep, state),
            quick_jit(inner.actor_step)(c.key, params, timestep, state),
        )


@pytest.mark.slow
@pytest.mark.chosen
def test_an_episodic_bonus_is_the_novelty_measured_in_acting():
    c = plain("rnd-dqn-episodic")
    output = c.batch.trajectory.agent_output
    assert isinstance(output, NovelOutput) and output.agent.action == ()
    first = c.batch.trajectory.timestep.first()
    assert not output.novelty[first].any() and (output.novelty[~first] > 0).all()
    _, batch, rows = jax.jit(c.agent._measured)(c.learner_state.novelty, c.batch)
    inner = batch.trajectory
    assert_close(inner.agent_output.action, output.action, atol=0, rtol=0)
    assert_close(inner.agent_state, c.batch.trajectory.agent_state.agent, atol=0, rtol=0)
    ratio = np.asarray(rows.bonus)[~first[1:]] / output.novelty[1:][~first[1:]]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    assert not np.asarray(rows.bonus)[first[1:]].any()


def test_ngu_is_the_episodic_novelty_times_a_modulator_from_1_to_5():
    c = plain("rnd-ngu-gru")
    novelty, _, rows = quick_jit(c.agent._measured)(c.learner_state.novelty, c.batch)
    networks, params = c.agent._networks, c.learner_state.novelty.learned
    timestep = c.batch.trajectory.timestep
    after = jax.tree.map(lambda x: x[1:], timestep)._replace(observation=rows.after)
    guess = networks.predictor.unroll(None, params.predictor, after, ())[0]
    errors = np.square(np.asarray(guess) - rows.features).mean(-1)
    present = np.asarray(rows.present)
    spread = (errors - errors[present].mean()) / errors[present].std()
    raw = np.clip(1 + spread, 1, 5) * c.batch.trajectory.agent_output.novelty[1:]
    raw = np.where(present, raw, 0.0)
    bonus = raw / np.sqrt(novelty.sums.variance[0])
    np.testing.assert_allclose(rows.bonus, bonus, rtol=1e-3, atol=1e-5)
    assert (spread[present] > 0).any() and (spread[present] < 0).any()


def test_a_share_of_the_steps_teaches_the_predictor():
    c = plain("rnd-dqn", predictor_share=0.3)
    novelty = c.learner_state.novelty
    _, _, rows = quick_jit(c.agent._rewarded)(novelty, c.batch)
    key = jax.random.split(novelty.rng_key)[0]
    chosen = np.asarray(jax.random.uniform(key, rows.present.shape)) < 0.3
    few = rows._replace(present=rows.present & chosen)
    assert 0 < few.present.sum() < rows.present.sum()
    everything = plain("rnd-dqn").agent
    found, wanted = (
        quick_jit(agent.learn_stream)(novelty, x)[0].learned
        for agent, x in ((c.agent, rows), (everything, few))
    )
    assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.chosen
def test_other_agents_in_epochs_learn_from_rewards_with_the_bonus():
    cfg = PQNConfig(num_epochs=1, num_minibatches=1, optimizer=FAST)
    network = functools.partial(q_network, cfg=SMALL)
    agent = intrinsic(PQN(cfg, VECTOR, ONE_OF_4, network, Greedy), IntrinsicConfig(**SMALL_SIZES))
    assert isinstance(agent, IntrinsicEpochs)
    c = type("Case", (), {"setting": SETTINGS["rnd"], "agent": agent, "key": case("rnd").key})
    c.act = quick_jit(agent.actor_step)
    params = agent.initial_params(c.key)
    state = agent.initial_learner_state(c.key, params)
    batch = acted_batch(c, params, step_types())
    rewarded = agent._rewarded(state.novelty, batch)[1]
    wanted = quick_jit(agent.agent.learner_step)(params, state.agent, rewarded)
    after, later, _ = quick_jit(agent.learner_step)(params, state, batch)
    assert_close(after, wanted[0])
    assert leaves_differ(later.novelty.learned, state.novelty.learned)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"IntrinsicConfig: observations must be arrays.*padded"):
        intrinsic(
            DQN(DQNConfig(), ENTITIES, ONE_OF_4, lambda *_: q_network(VECTOR, ONE_OF_4), Greedy),
            IntrinsicConfig(),
        )
    with pytest.raises(ValueError, match="memory_size must be at least num_neighbours"):
        RNDConfig(memory_size=3)
    with pytest.raises(ValueError, match="predictor_share must be in"):
        RNDDQNConfig(predictor_share=0.0)
    with pytest.raises(ValueError, match="clip_ratio must be positive"):
        RNDConfig(clip_ratio=0.0)  # the agent's own checks are made too
