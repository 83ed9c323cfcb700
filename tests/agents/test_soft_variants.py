"""Variants of SAC and DDPG: CrossQ, CategoricalSAC, TQC, D4PG, and SAC as REDQ and DroQ."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.categorical_sac import CategoricalSAC, CategoricalSACConfig
from rlstack.agents.crossq import CrossQ, CrossQConfig
from rlstack.agents.d4pg import D4PG, D4PGConfig
from rlstack.agents.sac import SAC, SACConfig, SACOutput
from rlstack.agents.tqc import TQC, TQCConfig
from rlstack.exploration import Greedy
from rlstack.networks import (
    CriticConfig,
    NetworkConfig,
    PolicyAndCritic,
    policy_and_critic,
    policy_and_distributional_critic,
)
from rlstack.stateful_params import training
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    leaves_differ,
    quick_jit,
)
from tests.agents.linear_control import (
    DISCOUNT,
    SGD,
    make_batch,
    moved,
    networks,
    scaled,
    stateless,
    unit,
    values_of,
)
from tests.agents.test_sac import ITEMS, KEY, drawn, items

RENORM = NetworkConfig(
    hidden_sizes=(8,),
    norm="batch_renorm",
    norm_place="outer",
    renorm_after=100,
    critic=CriticConfig(hidden_sizes=(12, 12)),
)
SPHERE = NetworkConfig(
    torso="sphere", hidden_sizes=(8,), num_atoms=11, critic=CriticConfig(hidden_sizes=(12, 12))
)
DROPOUT = NetworkConfig(hidden_sizes=(8,), critic=CriticConfig(norm="layer", dropout=0.1))
ATOMS = NetworkConfig(hidden_sizes=(8,), num_atoms=11)
SMALL = {"optimizer": FAST, "temperature": 0.01}
REDQ = {"num_critics": 4, "target_subset": 2, "policy_value": "mean", "policy_period": 2}
DROQ = {"policy_period": 2, "policy_value": "mean", "dropout_in_targets": True}
SETTINGS = {
    "crossq": Setting(CrossQConfig(**SMALL), VECTOR, UNEVEN, RENORM),
    "crossq-discrete": Setting(CrossQConfig(**SMALL), MASKED, ONE_OF_4, RENORM),
    "categorical-sac": Setting(CategoricalSACConfig(**SMALL), VECTOR, UNEVEN, SPHERE),
    "categorical-sac-discrete": Setting(CategoricalSACConfig(**SMALL), MASKED, ONE_OF_4, ATOMS),
    "sac-redq": Setting(SACConfig(**SMALL, **REDQ), VECTOR, UNEVEN),
    "sac-droq": Setting(SACConfig(**SMALL, **DROQ), VECTOR, UNEVEN, DROPOUT),
    "tqc": Setting(TQCConfig(**SMALL), VECTOR, UNEVEN, ATOMS),
    "d4pg": Setting(D4PGConfig(optimizer=FAST), VECTOR, UNEVEN, ATOMS),
}
ENDS = [2, 1, 1, 2]  # the last step of each of test_sac.ITEMS; the fourth has no transition


def pair(num_outputs, num_atoms):
    """A linear policy, and a linear critic with several numbers for each action."""

    def critic_init(key):
        w_key, v_key = jax.random.split(key)
        return {
            "w": jax.random.normal(w_key, (3, num_atoms)),
            "v": jax.random.normal(v_key, (2, num_atoms)),
        }

    critic = stateless(
        critic_init, lambda p, seen: seen.observation @ p["w"] + seen.action @ p["v"]
    )
    return PolicyAndCritic(networks(num_outputs).policy, critic)


def make(agent, config, network, **changes):
    cfg = config(**{"discount": DISCOUNT, "optimizer": SGD, "temperature": 0.5, **changes})
    return agent(cfg, VECTOR, UNEVEN, lambda *_: network, Greedy)


def parts_of(agent, batch):
    """Params, target critics, and the action and log probability drawn at each item's end."""
    params = scaled(agent.initial_params(KEY), 0.5)._replace(log_temperature=jnp.log(0.5))
    target = scaled(agent.initial_params(jax.random.PRNGKey(8)).critics, 0.7)
    ends = batch.trajectory.timestep.observation[ENDS, range(4)]
    action, log_prob = drawn(params.policy, ends, jax.random.split(KEY)[1])
    return params, target, ends, action, log_prob


def rewards_and_discounts(reward):
    """The n-step sums of the three items with a transition, and the factors of the end's value."""
    return (
        np.array([reward[1, 0] + DISCOUNT * reward[2, 0], reward[1, 1], reward[1, 2]]),
        np.array([DISCOUNT**2, 0.0, DISCOUNT]),
    )


def opinions(critics, observation, action):
    """[B, N, M] of `pair`, in plain numpy."""
    members = zip(np.asarray(critics["w"]), np.asarray(critics["v"]), strict=True)
    return np.stack([observation @ w + np.asarray(action) @ v for w, v in members], axis=1)


def test_redq_takes_the_least_of_a_subset_and_the_policy_the_mean():
    agent = make(SAC, SACConfig, networks(4), num_critics=5, target_subset=2, policy_value="mean")
    batch, loss = items(), quick_jit(agent.loss)
    steps = batch.trajectory.timestep
    ends = steps.observation[ENDS, range(4)]
    explained = []
    for key in jax.random.split(KEY, 6):
        params, target, *_ = parts_of(agent, batch)
        _, (logs, priorities) = loss(key, params, target, batch)
        now_key, end_key = jax.random.split(key)
        action, log_prob = drawn(params.policy, steps.observation[0], now_key)
        mean = values_of(params.critics, steps.observation[0], action).mean(-1)
        np.testing.assert_allclose(
            logs["policy_loss"], (0.5 * log_prob - mean)[:3].sum() / 4, rtol=1e-4
        )
        taken = values_of(
            params.critics, steps.observation[0], unit(batch.trajectory.agent_output.action[0])
        )
        action, log_prob = drawn(params.policy, ends, end_key)
        every = values_of(target, ends, action)
        reward, discount = rewards_and_discounts(steps.reward)
        found = set()
        for pair_of_critics in itertools.combinations(range(5), 2):
            soft = every[:3][:, pair_of_critics].min(-1) - 0.5 * log_prob[:3]
            errors = np.abs((reward + discount * soft)[:, None] - taken[:3]).mean(-1)
            if np.allclose(priorities[:3], errors, rtol=1e-4):
                found.add(pair_of_critics)
        explained.append(found)
    # A critic with the least values is in four of the ten pairs, which then are alike.
    assert all(1 <= len(found) <= 4 for found in explained)
    assert set.intersection(*explained) == set()  # other updates draw other pairs


@pytest.mark.slow
@pytest.mark.chosen
def test_the_policy_waits_for_its_period_and_the_critics_do_not():
    agent = make(SAC, SACConfig, networks(4), policy_period=3, critics_optimizer=FAST)
    plain = make(SAC, SACConfig, networks(4), critics_optimizer=FAST)
    params, learner_state = agent.initial_params(KEY), None
    learner_state = agent.initial_learner_state(KEY, params)
    batch = make_batch([[MID, MID]] * 5, SACOutput)
    step, alone = quick_jit(agent.learner_step), quick_jit(plain.learner_step)
    for number in (1, 2, 3, 4):
        # One update of SAC from the same params and key, as a second opinion.
        other = plain.initial_learner_state(KEY, params)._replace(
            target_critics=learner_state.target_critics, rng_key=learner_state.rng_key
        )
        expected, *_ = alone(params, other, batch)
        before = params
        params, learner_state, output = step(params, learner_state, batch)
        if number == 3:
            assert_close(params.policy, expected.policy)
            assert_close(params.log_temperature, expected.log_temperature)
        else:
            assert_close(params._replace(critics=()), before._replace(critics=()), atol=0, rtol=0)
        assert leaves_differ(params.critics, before.critics)
        if number == 1:  # later, Adam's moments differ from those of a new optimizer
            assert_close(params.critics, expected.critics)
            target = moved(before.critics, params.critics, 0.005)
            assert_close(learner_state.target_critics, target)
        assert {"learning_rate", "learning_rate/policy"} <= set(output.logs)


@pytest.mark.slow
@pytest.mark.chosen
def test_targets_with_dropout_differ_from_those_without():
    factory = functools.partial(policy_and_critic, cfg=DROPOUT)
    batch = make_batch([[MID, MID]] * 5, SACOutput)
    found = []
    for dropout in (False, True):
        cfg = SACConfig(dropout_in_targets=dropout)
        agent = SAC(cfg, VECTOR, UNEVEN, factory, Greedy)
        params = agent.initial_params(KEY)
        loss = quick_jit(agent.loss)
        found.append(loss(KEY, training(KEY, params), params.critics, batch)[1][0])
    assert found[0]["value"] == found[1]["value"]  # the values that are learned are the same
    assert found[0]["policy_loss"] == found[1]["policy_loss"]
    assert found[0]["td_error"] != found[1]["td_error"]


@pytest.mark.slow
@pytest.mark.chosen
def test_crossq_makes_targets_from_the_second_half_of_one_batch():
    """A second implementation: batch norm of the joint batch, dense layers and errors in numpy."""
    network = NetworkConfig(
        hidden_sizes=(6,),
        activation="relu",
        norm="batch",
        norm_place="outer",
        batch_norm_decay=0.9,
        critic=CriticConfig(hidden_sizes=(5,)),
    )
    factory = functools.partial(policy_and_critic, cfg=network)
    cfg = CrossQConfig(discount=DISCOUNT, temperature=0.5, num_critics=2, optimizer=SGD)
    agent = CrossQ(cfg, VECTOR, UNEVEN, factory, Greedy)
    params, batch = agent.initial_params(KEY), items()
    state = agent.initial_learner_state(KEY, params)
    _, output = quick_jit(agent.compute_gradients)(params, state, batch)

    steps = batch.trajectory.timestep
    ends = steps.observation[ENDS, range(4)]
    end_key = jax.random.split(jax.random.split(KEY)[1])[1]
    step = jax.tree.map(lambda x: x[0], steps)._replace(observation=ends)
    policy = agent.policy_distribution(params.policy, step)
    action, log_prob = quick_jit(policy.sample_and_log_prob)(end_key)
    x = np.concatenate(
        [
            np.concatenate(
                [steps.observation[0], unit(batch.trajectory.agent_output.action[0])], -1
            ),
            np.concatenate([ends, action], -1),
        ]
    )

    def normed(x):
        return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)  # scale 1 and offset 0 at first

    values, means = [], []
    for member in range(2):
        weights = jax.tree.map(lambda x, i=member: np.asarray(x[i]), params.critics.weights)
        first, head = weights["torso/linear"], weights["value_head"]
        hidden = np.maximum(normed(x) @ first["w"] + first["b"], 0)
        values.append((normed(hidden) @ head["w"] + head["b"])[:, 0])
        means.append((x.mean(0), hidden.mean(0)))
    now, end = np.split(np.stack(values, -1), 2)
    reward, discount = rewards_and_discounts(steps.reward)
    target = reward + discount * (end.min(-1) - 0.5 * np.asarray(log_prob))[:3]
    errors = np.abs(target[:, None] - now[:3])
    np.testing.assert_allclose(output.priorities, [*errors.mean(-1), 0], rtol=1e-3, atol=1e-4)
    loss = 0.5 * (errors**2).sum() / 4
    np.testing.assert_allclose(output.logs["critic_loss"], loss, rtol=1e-3)

    # The statistics are those of both halves.
    after = quick_jit(agent.update_network_state)(params, state, batch).critics.state
    for name, place in (("torso/batch_norm", 0), ("torso/batch_norm_1", 1)):
        expected = np.stack([mean[place] for mean in means])
        np.testing.assert_allclose(after[name]["mean"], expected, rtol=1e-3, atol=1e-5)


def test_crossq_has_no_targets_and_needs_batch_norm():
    factory = functools.partial(policy_and_critic, cfg=RENORM)
    agent = CrossQ(CrossQConfig(), VECTOR, UNEVEN, factory, Greedy)
    params = agent.initial_params(KEY)
    assert agent.initial_learner_state(KEY, params).target_critics == ()
    plain = functools.partial(policy_and_critic, cfg=NetworkConfig())
    with pytest.raises(ValueError, match=r"CrossQ: the critic must have batch norm.*network\.norm"):
        CrossQ(CrossQConfig(), VECTOR, UNEVEN, plain, Greedy)
    with pytest.raises(ValueError, match="target_rate"):
        CrossQConfig(target_rate=0.1)


def test_tqc_leaves_the_largest_quantiles_out_of_its_target():
    agent = make(TQC, TQCConfig, pair(4, 3), num_critics=2, dropped_quantiles=1)
    batch = items(weights=[1, 2, 0.5, 1])
    params, target, ends, action, log_prob = parts_of(agent, batch)
    _loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params, target, batch)
    steps = batch.trajectory.timestep
    pooled = np.sort(opinions(target, ends, action).reshape(4, 6))[:, :4]
    reward, discount = rewards_and_discounts(steps.reward)
    goals = reward[:, None] + discount[:, None] * (pooled - 0.5 * log_prob[:, None])[:3]
    taken = opinions(
        params.critics, steps.observation[0], unit(batch.trajectory.agent_output.action[0])
    )[:3]
    losses = np.zeros(3)
    for b in range(3):
        for n in range(2):
            for m, fraction in enumerate((1 / 6, 3 / 6, 5 / 6)):
                for goal in goals[b]:
                    u = goal - taken[b, n, m]
                    huber = 0.5 * u**2 if abs(u) <= 1 else abs(u) - 0.5
                    losses[b] += abs(fraction - (u < 0)) * huber / (2 * 3 * 4)
    np.testing.assert_allclose(logs["critic_loss"], losses @ [1, 2, 0.5] / 4, rtol=1e-4)
    errors = np.abs(goals.mean(-1)[:, None] - taken.mean(-1)).mean(-1)
    np.testing.assert_allclose(priorities, [*errors, 0], rtol=1e-4)
    now, log_prob = drawn(params.policy, steps.observation[0], jax.random.split(KEY)[0])
    opinion = opinions(params.critics, steps.observation[0], now).mean((1, 2))
    policy_loss = (0.5 * log_prob - opinion)[:3].sum() / 4
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-4)
    with pytest.raises(ValueError, match="dropped_quantiles must be less than"):
        bad = make(TQC, TQCConfig, pair(4, 3), dropped_quantiles=3)
        params = bad.initial_params(KEY)
        bad.loss(KEY, params, params.critics, batch)
    with pytest.raises(TypeError, match="TQC: the action must be one float array"):
        TQC(TQCConfig(), VECTOR, ONE_OF_4, lambda *_: pair(4, 3), Greedy)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def projected(values, probs, atoms):
    """The probability of each atom, by dividing that of each value between its neighbours."""
    found, step = np.zeros(len(atoms)), atoms[1] - atoms[0]
    for value, prob in zip(np.clip(values, atoms[0], atoms[-1]), probs, strict=True):
        place = (value - atoms[0]) / step
        low, high = int(np.floor(place)), int(np.ceil(place))
        found[low] += prob * (1.0 if low == high else high - place)
        if high != low:
            found[high] += prob * (place - low)
    return found


def divergences(goals, logits):
    """KL divergences [B, N] of predictions [B, N, M] from targets [B, M]."""
    probs = softmax(logits)
    safe = np.where(goals > 0, goals, 1.0)[:, None]
    return (goals[:, None] * (np.log(safe) - np.log(probs))).sum(-1)


def test_categorical_critics_learn_the_moved_distribution_of_the_lesser_critic():
    agent = make(
        CategoricalSAC, CategoricalSACConfig, pair(4, 5), num_critics=2, min_value=-2, max_value=2
    )
    batch = items(weights=[1, 2, 0.5, 1])
    params, target, ends, action, log_prob = parts_of(agent, batch)
    _, (logs, priorities) = quick_jit(agent.loss)(KEY, params, target, batch)
    steps, atoms = batch.trajectory.timestep, np.linspace(-2, 2, 5)
    probs = softmax(opinions(target, ends, action))
    least = (probs @ atoms).argmin(1)
    reward, discount = rewards_and_discounts(steps.reward)
    goals = np.stack(
        [
            projected(
                reward[b] + discount[b] * (atoms - 0.5 * log_prob[b]), probs[b, least[b]], atoms
            )
            for b in range(3)
        ]
    )
    taken = opinions(
        params.critics, steps.observation[0], unit(batch.trajectory.agent_output.action[0])
    )[:3]
    found = divergences(goals, taken)
    np.testing.assert_allclose(logs["critic_loss"], found.sum(-1) @ [1, 2, 0.5] / 4, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*found.mean(-1), 0], rtol=1e-4, atol=1e-6)
    now, log_prob = drawn(params.policy, steps.observation[0], jax.random.split(KEY)[0])
    opinion = (softmax(opinions(params.critics, steps.observation[0], now)) @ atoms).min(-1)
    np.testing.assert_allclose(
        logs["policy_loss"], (0.5 * log_prob - opinion)[:3].sum() / 4, rtol=1e-4
    )


def test_d4pg_learns_the_moved_distribution_at_the_target_policys_action():
    cfg = D4PGConfig(discount=DISCOUNT, optimizer=SGD, min_value=-2, max_value=2)
    agent = D4PG(cfg, VECTOR, UNEVEN, lambda *_: pair(2, 5), Greedy)
    batch = items(weights=[1, 2, 0.5, 1])
    params = scaled(agent.initial_params(KEY), 0.5)
    target = scaled(agent.initial_params(jax.random.PRNGKey(8)), 0.7)
    _, (logs, priorities) = quick_jit(agent.loss)(params, target, batch)
    steps, atoms = batch.trajectory.timestep, np.linspace(-2, 2, 5)
    ends = steps.observation[ENDS, range(4)]
    action = np.tanh(ends @ np.asarray(target.policy))
    probs = softmax(opinions(target.critics, ends, action))[:, 0]
    reward, discount = rewards_and_discounts(steps.reward)
    goals = np.stack(
        [projected(reward[b] + discount[b] * atoms, probs[b], atoms) for b in range(3)]
    )
    taken = opinions(
        params.critics, steps.observation[0], unit(batch.trajectory.agent_output.action[0])
    )[:3]
    found = divergences(goals, taken)
    np.testing.assert_allclose(logs["critic_loss"], found[:, 0] @ [1, 2, 0.5] / 4, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*found[:, 0], 0], rtol=1e-4, atol=1e-6)
    now = np.tanh(steps.observation[0] @ np.asarray(params.policy))
    opinion = softmax(opinions(params.critics, steps.observation[0], now))[:, 0] @ atoms
    np.testing.assert_allclose(logs["policy_loss"], -opinion[:3].sum() / 4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "config", "network"),
    [
        (
            SAC,
            SACConfig,
            functools.partial(policy_and_critic, cfg=NetworkConfig(hidden_sizes=(8,))),
        ),
        (CrossQ, CrossQConfig, functools.partial(policy_and_critic, cfg=RENORM)),
        (TQC, TQCConfig, functools.partial(policy_and_distributional_critic, cfg=ATOMS)),
        (
            CategoricalSAC,
            CategoricalSACConfig,
            functools.partial(policy_and_distributional_critic, cfg=ATOMS),
        ),
    ],
)
def test_targets_that_are_not_soft_are_those_of_no_temperature(kind, config, network):
    batch, errors = items(), {}
    for soft, temperature in ((True, 0.5), (False, 0.5), (True, 1e-30)):
        cfg = config(discount=DISCOUNT, optimizer=SGD, soft_targets=soft)
        agent = kind(cfg, VECTOR, UNEVEN, network, Greedy)
        params = agent.initial_params(KEY)._replace(log_temperature=jnp.log(temperature))
        _, (_, errors[soft, temperature]) = quick_jit(agent.loss)(
            KEY, params, params.critics, batch
        )
    np.testing.assert_allclose(errors[False, 0.5], errors[True, 1e-30], rtol=1e-6)
    assert np.abs(errors[True, 0.5] - errors[False, 0.5]).max() > 1e-3


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (CrossQConfig, {"target_subset": 1}, "target_subset"),
        (CrossQConfig, {"dropout_in_targets": True}, "dropout_in_targets"),
        (SACConfig, {"target_subset": 3}, "target_subset"),
        (SACConfig, {"policy_period": 0}, "policy_period"),
        (TQCConfig, {"dropped_quantiles": -1}, "dropped_quantiles"),
        (TQCConfig, {"target_subset": 1}, "target_subset"),
        (CategoricalSACConfig, {"min_value": 20.0}, "min_value"),
        (CategoricalSACConfig, {"dropout_in_targets": True}, "dropout_in_targets"),
        (D4PGConfig, {"max_value": float("inf")}, "max_value"),
    ],
)
def test_options_out_of_range_are_refused(config, changes, field):
    with pytest.raises(ValueError, match=field):
        config(**changes)


def test_configs_keep_the_defaults_of_their_papers():
    assert CrossQConfig().optimizer.arguments == {"b1": 0.5}
    assert dataclasses.asdict(TQCConfig())["num_critics"] == 5
    assert ITEMS[3] == [LAST, FIRST, MID]
