"""TD-MPC2: planning and losses in numpy, two-hot atoms, the plan from step to step, learning."""

import dataclasses
import functools
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.td_mpc2 import TDMPC2, Plan, TDMPC2Config, TDMPC2Output
from rlstack.checks import ActionKindError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.exploration import Greedy, Sample
from rlstack.math.returns import symexp, symlog
from rlstack.networks import LatentControl, NetworkConfig, PolicyAndCritic, latent_control
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.types import LearnerOutput
from tests.agent_cases import (
    BATCH,
    FAST,
    FIRST,
    LAST,
    MID,
    ONE_OF_4,
    REAL,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    quick_jit,
    random_timesteps,
)
from tests.agents.linear_control import make_batch, stateless, unit
from tests.fused.test_fused_run import saved
from tests.programs import running

_LATER = [pytest.mark.slow, pytest.mark.chosen]

CFG = TDMPC2Config(
    discount=0.9,
    num_samples=12,
    num_elites=4,
    num_policy_trajectories=3,
    iterations=2,
    max_value=20.0,
    random_frames=0,
    optimizer=FAST,
)
SMALL = NetworkConfig(hidden_sizes=(16, 16), activation="mish", norm="layer", num_atoms=11)
SETTINGS = {
    "tdmpc2": Setting(CFG, VECTOR, REAL, SMALL),
    "tdmpc2-uneven": Setting(
        dataclasses.replace(CFG, encoder_optimizer=OptimizerConfig()), VECTOR, UNEVEN, SMALL
    ),
}

# A model that is simple to repeat in numpy: all its parts are linear, and the policy's draws are
# its means, because its deviations are e^-20.
A, N, D, CRITICS = 2, 11, 4, 2
STD = -20.0


def normals(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=True)}


def linear(log_std=STD):
    def policy(params, states):
        mean = states @ params["p"]
        return jnp.concatenate([mean, jnp.full_like(mean, log_std)], axis=-1)

    def critic(params, seen):
        return seen.observation @ params["v"] + seen.action @ params["u"]

    return LatentControl(
        lambda key: normals(key, o=(3, D), w=(D, D), b=(A, D), r=(D, N), q=(A, N)),
        lambda params, observation: observation @ params["o"],
        lambda params, state, action: (
            state @ params["w"] + action @ params["b"],
            state @ params["r"] + action @ params["q"],
        ),
        PolicyAndCritic(
            stateless(lambda key: normals(key, p=(D, A)), policy),
            stateless(lambda key: normals(key, v=(D, N), u=(A, N)), critic),
        ),
    )


def make(policy=Greedy, spec=UNEVEN, network=None, **changes):
    cfg = dataclasses.replace(CFG, **{"num_critics": CRITICS, **changes})
    return TDMPC2(cfg, VECTOR, spec, lambda *_: network or linear(), policy)


def some_params(agent, scale=0.5):
    params = agent.initial_params(jax.random.PRNGKey(1))
    return jax.tree.map(lambda x: np.asarray(x, np.float64) * scale, params)


def seen(rows, seed=0):
    return random_timesteps(VECTOR, np.ones(rows), seed)


STEP_TYPES = [
    [MID, MID, MID, MID, MID],  # no boundary
    [FIRST, MID, MID, LAST, FIRST],  # an end after the last transition that is followed
    [MID, MID, LAST, FIRST, MID],  # an end inside
    [LAST, FIRST, MID, MID, MID],  # begins with an end: no transition is followed
    [FIRST, FIRST, MID, MID, MID],  # a seat that joins its game later
]
FOLLOWED = [3, 3, 2, 0, 0]  # transitions, of a horizon of 3


def atoms(max_value=20.0):
    most = np.log1p(max_value)
    return np.linspace(-most, most, N)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def number(logits):
    mean = softmax(logits) @ atoms()
    return np.sign(mean) * (np.exp(np.abs(mean)) - 1)


def two_hot(x):
    scaled = np.sign(x) * np.log(1 + np.abs(x))
    position = (np.clip(scaled, *atoms()[[0, -1]]) - atoms()[0]) / (atoms()[1] - atoms()[0])
    low = min(int(position), N - 2)
    probs = np.zeros(N)
    probs[low], probs[low + 1] = 1 - (position - low), position - low
    return probs


def divergence(probs, logits):
    positive = probs > 0
    return (probs[positive] * np.log(probs[positive] / softmax(logits)[positive])).sum()


def values(critics, state, action):
    """The value of each critic for one state and action."""
    return [number(state @ v + action @ u) for v, u in zip(critics["v"], critics["u"], strict=True)]


def test_numbers_are_divided_between_two_atoms():
    agent = make(max_value=3.0)
    # symlog(3) = log 4, so 5 atoms are -log 4, -log 2, 0, log 2, log 4, and log 3 is between the
    # last two.
    share = np.log(1.5) / np.log(2)
    probs = quick_jit(agent.atoms.probs)(jnp.array([1.0, 2.0, -2.0, 50.0]), jnp.zeros((4, 5)))
    wanted = [[0, 0, 0, 1, 0], [0, 0, 0, 1 - share, share], [share, 1 - share, 0, 0, 0]]
    np.testing.assert_allclose(probs, [*wanted, [0, 0, 0, 0, 1]], atol=1e-6)
    logits = jnp.log(jnp.maximum(probs, 1e-30))
    np.testing.assert_allclose(agent.atoms.mean(logits), [1, 2, -2, 3], atol=1e-4)
    np.testing.assert_allclose(symlog(np.array([0.0, -9.0])), [0, -np.log(10)], rtol=1e-6)
    np.testing.assert_allclose(symexp(np.array([0.0, np.log(10)])), [0, 9], rtol=1e-6)


def test_the_best_sequences_have_weights_by_their_returns():
    agent = make(num_elites=2, temperature=0.5, min_std=0.05, max_std=2.0)
    actions = np.array([[[0.0], [1.0], [0.5], [9.0]]], np.float32)
    weights, elites = agent.elites(jnp.array([1.0, 4.0, 2.0, jnp.nan]), actions)
    # The best are the second and the third, with weights of 1 and e^(0.5 (2 - 4)) = e^-1.
    second = np.exp(-1) / (1 + np.exp(-1))
    np.testing.assert_allclose(weights, [1 - second, second], rtol=1e-5)
    np.testing.assert_array_equal(elites, [[[1.0], [0.5]]])
    mean, std = agent.fitted(weights, elites)
    wanted = 1 - 0.5 * second
    np.testing.assert_allclose(mean, [[wanted]], rtol=1e-5)
    spread = (1 - second) * (1 - wanted) ** 2 + second * (0.5 - wanted) ** 2
    np.testing.assert_allclose(std, [[np.sqrt(spread)]], rtol=1e-5)
    equal = np.full_like(elites, 0.3)
    np.testing.assert_allclose(agent.fitted(weights, equal)[1], [[0.05]], rtol=1e-5)


def slow_value(params, state, actions, discount):
    """The predicted return of one sequence of actions ``[H, A]``."""
    model, total = params.model, 0.0
    for k, action in enumerate(actions):
        total += discount**k * number(state @ model["r"] + action @ model["q"])
        state = state @ model["w"] + action @ model["b"]
    action = np.tanh(state @ params.policy["p"])
    return total + discount ** len(actions) * np.mean(values(params.critics, state, action))


def test_the_value_of_a_sequence_is_that_of_numpy():
    agent = make()
    params, rng = some_params(agent), np.random.default_rng(0)
    state, actions = rng.normal(size=D), rng.uniform(-1, 1, (3, 5, A))
    found = quick_jit(agent.value_of)(jax.random.PRNGKey(0), params, state, actions)
    wanted = [slow_value(params, state, actions[:, i], 0.9) for i in range(5)]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_a_plan_is_that_of_numpy():
    agent = make()
    cfg, params, key = agent.cfg, some_params(agent), jax.random.PRNGKey(0)
    steps, start = seen(2), np.random.default_rng(1).uniform(-1, 1, (2, 3, A))
    plan = quick_jit(agent.plan)
    found = plan(key, params, steps, start)
    # The greedy policy needs no random numbers.
    assert_close(plan(jax.random.PRNGKey(5), params, steps, start), found, atol=0, rtol=0)
    _, _, loop_key = jax.random.split(key, 3)
    for row in range(2):
        state = first = steps.observation[row] @ params.model["o"]
        proposed = []
        for _ in range(3):
            proposed.append(np.tanh(state @ params.policy["p"]))
            state = state @ params.model["w"] + proposed[-1] @ params.model["b"]
        proposed = np.repeat(np.array(proposed)[:, None], 3, axis=1)
        mean, std = start[row], np.full((3, A), 2.0)
        for each in jax.random.split(loop_key, 2):
            noise = np.asarray(jax.random.normal(jax.random.split(each)[0], (3, 9, A)))
            drawn = np.clip(mean[:, None] + std[:, None] * noise, -1, 1)
            actions = np.concatenate([proposed, drawn], axis=1)
            returns = np.array(
                [slow_value(params, first, actions[:, i], cfg.discount) for i in range(12)]
            )
            best = np.argsort(-returns, kind="stable")[:4]
            weights = softmax(cfg.temperature * returns[best])
            mean = np.einsum("e,hea->ha", weights, actions[:, best])
            variance = np.einsum("e,hea->ha", weights, (actions[:, best] - mean[:, None]) ** 2)
            std = np.clip(np.sqrt(variance), 0.05, 2.0)
        np.testing.assert_allclose(found.mean[row], mean, atol=1e-4)
        np.testing.assert_allclose(found.std[row], std, atol=1e-3)
        distance = np.abs(np.asarray(found.elite[row])[:, None] - actions[:, best]).max((0, 2))
        assert distance.min() < 1e-4


@pytest.mark.slow
@pytest.mark.chosen
def test_planning_finds_the_best_actions_of_the_model():
    # A state moves by its action; its reward is the closeness of the first number to 1.
    def step(params, state, action):
        after = state.at[..., :1].add(0.5 * action[..., :1])
        closeness = -jnp.square(after[..., 0] - 1)
        near = jnp.maximum(1 - jnp.abs(symlog(closeness)[..., None] - atoms()) / 0.6089, 0)
        return after, jnp.log(near + 1e-30)

    network = linear()._replace(represent=lambda params, x: 0 * x[:, [0, 0, 0, 0]], step=step)
    agent = make(network=network, num_samples=256, num_elites=16, iterations=8)
    params = jax.tree.map(np.zeros_like, some_params(agent))
    key, start = jax.random.PRNGKey(0), np.zeros((1, 3, A))
    plan = quick_jit(agent.plan)(key, params, seen(1), start)
    np.testing.assert_allclose(plan.mean[0, :, 0], [1, 1, 0], atol=0.1)


class Planned(TDMPC2):
    """An agent that returns the initial mean as its plan."""

    def plan(self, rng_key, params, timestep, mean):
        return Plan(mean, jnp.full_like(mean, 0.1), 0.5 * mean)


START = np.array([[[0.1, -0.1], [0.2, -0.2], [0.3, -0.3]], [[0.4, 0.4], [0.5, 0.5], [0, 0]]])


def planned(policy):
    agent = Planned(CFG, VECTOR, UNEVEN, lambda *_: linear(), policy)
    return agent, agent.initial_state(2)._replace(plan=jnp.asarray(START, jnp.float32))


def test_the_next_plan_begins_with_the_last_one_moved_by_a_step():
    agent, state = planned(Greedy)
    output, after = agent.actor_step(jax.random.PRNGKey(0), (), seen(2), state)
    np.testing.assert_allclose(unit(output.action), START[:, 0], atol=1e-6)
    np.testing.assert_allclose(after.plan[0], [[0.2, -0.2], [0.3, -0.3], [0, 0]], atol=1e-6)
    np.testing.assert_array_equal(after.counts.env_steps, [1, 1])
    reset = agent.reset_state(after, np.array([True, False]))
    np.testing.assert_array_equal(reset.plan[0], np.zeros((3, A)))
    np.testing.assert_array_equal(reset.plan[1], after.plan[1])
    np.testing.assert_array_equal(reset.counts.env_steps, [1, 1])


def test_training_draws_around_a_drawn_sequence_and_the_greedy_policy_takes_the_mean():
    keys = jax.random.split(jax.random.PRNGKey(0), 50)
    for policy, centre in ((Greedy, START[:, 0]), (Sample, 0.5 * START[:, 0])):
        agent, state = planned(policy)
        act = functools.partial(agent.actor_step, params=(), timestep=seen(2), state=state)
        found = np.asarray(quick_jit(jax.vmap(lambda key, act=act: act(key)[0].action))(keys))
        assert (found >= UNEVEN.minimum).all()
        assert (found <= UNEVEN.maximum).all()
        np.testing.assert_allclose(unit(found).mean(0), centre, atol=0.05)
        wanted = 0.0 if policy is Greedy else 0.1
        np.testing.assert_allclose(unit(found).std(0), wanted, atol=0.04)
        distribution = agent.action_distribution(keys[0], (), seen(2), state)
        np.testing.assert_allclose(unit(distribution.mean), centre, atol=1e-6)
        half = np.array([2.0, 3.0])  # of the ranges of the two numbers
        np.testing.assert_allclose(np.exp(distribution.log_std), [0.1 * half] * 2, rtol=1e-5)


def slow_losses(params, targets, batch, column, cfg):
    """The parts of one item's loss: consistency, reward, value, policy (without entropy)."""
    trajectory, model = batch.trajectory, params.model
    observation = trajectory.timestep.observation[:, column] @ model["o"]
    actions = unit(trajectory.agent_output.action[:, column])
    parts, state = np.zeros(4), observation[0]

    def act(state):
        action = np.tanh(state @ params.policy["p"])
        return np.mean(values(params.critics, state, action))

    for k in range(FOLLOWED[column]):
        scale = cfg.step_decay**k / cfg.horizon
        reward = trajectory.timestep.reward[k + 1, column]
        logits = state @ model["r"] + actions[k] @ model["q"]
        parts[1] += scale * divergence(two_hot(reward), logits)
        end = observation[k + 1]
        value = min(values(targets, end, np.tanh(end @ params.policy["p"])))
        target = reward + cfg.discount * trajectory.timestep.discount[k + 1, column] * value
        for v, u in zip(params.critics["v"], params.critics["u"], strict=True):
            logits = state @ v + actions[k] @ u
            parts[2] += scale * divergence(two_hot(target), logits) / CRITICS
        parts[3] -= cfg.step_decay**k / (cfg.horizon + 1) * act(state)
        state = state @ model["w"] + actions[k] @ model["b"]
        parts[0] += scale * np.square(state - end).mean()
    if FOLLOWED[column] == cfg.horizon:
        parts[3] -= cfg.step_decay**cfg.horizon / (cfg.horizon + 1) * act(state)
    return parts


@functools.cache
def with_gradients():
    """An agent without a cost of entropy, its compiled loss with gradients, and params."""
    agent = make(entropy_cost=0.0)
    found = quick_jit(jax.value_and_grad(agent.loss, has_aux=True))
    return agent, found, some_params(agent, 0.7)


@pytest.mark.parametrize("ends", [0.0, 1.0])  # terminations, truncations
def test_the_loss_is_that_of_numpy(ends):
    agent, found, params = with_gradients()
    discounts = np.where(np.array(STEP_TYPES).T == LAST, ends, 1).astype(np.float32)
    weights = [0.5, 1.0, 1.5, 2.0, 0.7]
    batch = make_batch(STEP_TYPES, TDMPC2Output, weights=weights, discounts=discounts)
    targets = jax.tree.map(lambda x: 0.3 + 0.8 * x, params.critics)
    state = agent.initial_learner_state(jax.random.PRNGKey(2), params)
    state = state._replace(target_critics=targets, value_range=jnp.float32(2.5))
    (loss, (logs, priorities)), _ = found(params, state, batch)
    parts = np.array([slow_losses(params, targets, batch, i, agent.cfg) for i in range(5)])
    of_model = parts[:, :3] @ [20.0, 0.1, 0.1]
    np.testing.assert_allclose(priorities, of_model, rtol=1e-3, atol=1e-5)
    of_policy = parts[:, 3].mean() / 2.5
    assert float(loss) == pytest.approx((weights * of_model).mean() + of_policy, rel=1e-3)
    names = ("consistency_loss", "reward_loss", "value_loss")
    for name, wanted in zip(names, parts.mean(axis=0), strict=False):
        assert float(logs[name]) == pytest.approx(wanted, rel=1e-3), name
    assert float(logs["policy_loss"]) == pytest.approx(of_policy, rel=1e-3)


def test_the_policys_loss_has_its_entropy_and_a_range_of_values():
    agent = make(network=linear(log_std=-1.0), entropy_cost=0.25, step_decay=1.0)
    params = some_params(agent, 1.0)
    states = np.random.default_rng(0).normal(size=(4, 21, D))
    acts = np.ones((4, 21), bool)
    found = quick_jit(agent.policy_loss)
    _, logs = found(jax.random.PRNGKey(2), params, jnp.float32(2.0), states, acts)
    # Values are divided by so large a range that only the entropy is left.
    rest, same = found(jax.random.PRNGKey(2), params, jnp.float32(1e9), states, acts)
    assert float(rest) == pytest.approx(-0.25 * float(logs["entropy"]), rel=1e-4)
    assert float(same["value_range"]) == float(logs["value_range"])
    # By the formula of tanh's slope the density of the actions can be found from those drawn.
    key = jax.random.split(jax.random.PRNGKey(2))[1]
    raw = np.arctanh(np.asarray(agent.policy_of(params.policy, states).sample(key), np.float64))
    z = (raw - states @ params.policy["p"]) / np.exp(-1)
    slopes = np.log1p(-np.square(np.tanh(raw)))
    entropy = -(-0.5 * z**2 + 1 - 0.5 * np.log(2 * np.pi) - slopes).sum(-1).mean()
    assert float(logs["entropy"]) == pytest.approx(entropy, rel=1e-3)
    drawn = [
        np.mean(values(params.critics, s, a))
        for s, a in zip(states[0], np.tanh(raw[0]), strict=True)
    ]
    wanted = sorted(drawn)[19] - sorted(drawn)[1]  # of 21 values the 5th and 95th percentiles
    assert wanted > 1
    assert float(logs["value_range"]) == pytest.approx(wanted, rel=1e-3)


def test_the_policy_learns_from_its_own_loss_only_and_the_model_from_the_rest():
    agent, found, params = with_gradients()
    batch = make_batch(STEP_TYPES, TDMPC2Output, weights=[1.0] * 5)
    state = agent.initial_learner_state(jax.random.PRNGKey(2), params)
    state = state._replace(value_range=jnp.float32(2.5))
    free = found(params, state, batch)[1]
    # Items without weight are left out of all losses but the policy's.
    only = found(params, state, batch._replace(weights=0 * batch.weights))[1]
    np.testing.assert_allclose(only.policy["p"], free.policy["p"], rtol=1e-4, atol=1e-6)
    assert all(not np.any(x) for x in jax.tree.leaves((only.model, only.critics)))
    assert all(np.any(x) for x in jax.tree.leaves(free))


def test_two_different_critics_are_drawn():
    draw = quick_jit(make(num_critics=5).two_of)
    keys = jax.random.split(jax.random.PRNGKey(0), 60)
    pairs = (np.asarray(draw(key, {"v": np.arange(5)})["v"]) for key in keys)
    wanted = set(itertools.combinations(range(5), 2))
    assert {tuple(sorted(pair.tolist())) for pair in pairs} == wanted


def test_targets_take_the_smaller_of_two_drawn_critics():
    agent = make(num_critics=5)
    params = jax.tree.map(jnp.asarray, some_params(agent))
    trajectory, _ = agent.followed(make_batch(STEP_TYPES[:1], TDMPC2Output).trajectory)
    end = trajectory.timestep.observation[1, 0] @ params.model["o"]
    action = np.tanh(end @ params.policy["p"])
    of_all = values(jax.tree.map(np.asarray, params.critics), end, action)
    pairs = {
        round(0.9 * min(pair) + float(trajectory.timestep.reward[1, 0]), 3)
        for pair in itertools.combinations(of_all, 2)
    }

    @quick_jit
    def target(key):
        return agent.targets((key, key), params, params.critics, trajectory)[1][0, 0]

    keys = jax.random.split(jax.random.PRNGKey(0), 40)
    found = {round(float(target(key)), 3) for key in keys}
    assert found == pairs
    assert len(found) == 4  # five critics have four smaller values of pairs


class Known(TDMPC2):
    """Its gradients are 1, and the range of values in its batches is 5."""

    def compute_gradients(self, params, learner_state, batch):
        return jax.tree.map(jnp.ones_like, params), LearnerOutput({"value_range": 5.0})


def test_targets_and_the_range_of_values_move_and_components_have_their_rates():
    cfg = dataclasses.replace(
        CFG, target_rate=0.25, num_critics=2, encoder_optimizer=OptimizerConfig()
    )
    network = linear()._replace(init=lambda key: {"encoder": jnp.ones(3), "dynamics": jnp.ones(3)})
    agent = Known(cfg, VECTOR, UNEVEN, lambda *_: network, Greedy)
    before = agent.initial_params(jax.random.PRNGKey(1))
    state = agent.initial_learner_state(jax.random.PRNGKey(2), before)
    after, moved, output = quick_jit(agent.learner_step)(before, state, ())
    assert float(moved.value_range) == 1 + 0.25 * (5 - 1)
    for name in ("v", "u"):
        old, new = before.critics[name], after.critics[name]
        assert np.any(old != new)
        np.testing.assert_allclose(moved.target_critics[name], 0.75 * old + 0.25 * new, rtol=1e-5)
    assert float(output.logs["learning_rate"]) == pytest.approx(3e-3)
    assert float(output.logs["learning_rate/encoder"]) == pytest.approx(3e-4)
    steps = {name: float((after.model[name] - before.model[name])[0]) for name in before.model}
    assert steps["dynamics"] == pytest.approx(10 * steps["encoder"], rel=1e-3)


def test_longer_items_and_stored_states_change_nothing():
    agent, trajectory = make(), make_batch(STEP_TYPES, TDMPC2Output).trajectory
    short = jax.tree.map(lambda x: x[:4], trajectory)
    assert_close(agent.followed(short), agent.followed(trajectory), atol=0, rtol=0)
    stored = trajectory._replace(agent_state=agent.initial_state(5))
    assert_close(agent.followed(short), agent.followed(stored), atol=0, rtol=0)


@pytest.mark.parametrize(
    "torso", ["mlp", *(pytest.param(name, marks=_LATER) for name in ("residual", "sphere"))]
)
def test_groups_of_latent_states_sum_to_1(torso):
    cfg = SMALL if torso == "mlp" else NetworkConfig(torso=torso, hidden_sizes=(16, 16))
    network = latent_control(VECTOR, REAL, cfg)

    @quick_jit
    def found(key, observation):
        params = network.init(key)
        state = network.represent(params, observation)
        return state, *network.step(params, state, jnp.ones((BATCH, 2)))

    observation = np.random.default_rng(0).normal(size=(BATCH, 3))
    state, after, reward = found(jax.random.PRNGKey(0), observation)
    for x in (state, after):
        assert x.shape == (BATCH, 16)
        assert (x >= 0).all()
        np.testing.assert_allclose(x.reshape(BATCH, 2, 8).sum(-1), 1, rtol=1e-5)
    assert reward.shape == (BATCH, cfg.num_atoms)
    assert len({tuple(row) for row in np.asarray(after)}) == BATCH


def test_what_does_not_fit_is_refused():
    with pytest.raises(ActionKindError, match="TDMPC2: the action must be one float array"):
        make(spec=ONE_OF_4)
    with pytest.raises(ValueError, match=r"horizon \(6\) must be at most the item's 4"):
        make(horizon=6).followed(make_batch(STEP_TYPES, TDMPC2Output).trajectory)
    for field, value in (
        *(("num_elites", 13), ("num_policy_trajectories", 13), ("num_critics", 1)),
        *(("min_std", 3.0), ("max_value", 0.0), ("horizon", 0), ("step_decay", 1.5)),
    ):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(CFG, **{field: value})
    for field, value in (
        *(("core", "lstm"), ("norm", "batch"), ("dropout", 0.5), ("shared", True)),
        ("hidden_sizes", (16, 12)),
    ):
        with pytest.raises(ValueError, match=field):
            latent_control(VECTOR, REAL, NetworkConfig(**{field: value}))


def tiny(topology, frames=10**6, **changes):
    """Pendulum with a small plan, for a few updates."""
    experiment = preset("pendulum-tdmpc2")
    agent = dataclasses.replace(
        experiment.agent, num_samples=16, num_elites=4, num_policy_trajectories=2, iterations=2
    )
    return running.small(
        dataclasses.replace(experiment, agent=agent, network=SMALL),
        topology,
        frames,
        env={"type": "jax"} if topology == "fused" else {},
        replay={"batch_size": 8, "min_size": 40, "samples_per_insert": 8.0},
        **changes,
    )


@pytest.mark.slow
@pytest.mark.chosen
def test_a_resumed_fused_run_equals_an_uninterrupted_one(tmp_path):
    for name, frames in (("half", 120), ("whole", 240)):
        running.run(tiny("fused", frames), tmp_path / name)
    train.resume(tmp_path / "half", frames=240, stream=io.StringIO())
    found, wanted = saved(tmp_path / "half"), saved(tmp_path / "whole")
    assert any("acting" in name for name in found)
    assert found == wanted  # with the digests of all arrays


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(180)
@pytest.mark.parametrize("topology", ["single_process", *running.TOPOLOGIES])
def test_it_runs_in_every_topology(topology, tmp_path):
    result = running.run(tiny(topology, updates=10), tmp_path / "run")
    assert result.learner_steps >= 10
    assert all(np.isfinite(x).all() for x in running.params(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_swing_a_pendulum_up(tmp_path):
    experiment = preset("pendulum-tdmpc2")
    experiment = dataclasses.replace(
        experiment,
        env=dataclasses.replace(experiment.env, type="jax"),
        topology="fused",
        evaluator=EvaluatorConfig(episodes=40, num_envs=20),
    )
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert result.eval_return_mean > -200
