"""MuZero: targets by hand and in plain Python, two-hot atoms, gradients, the search, learning."""

import dataclasses
import functools
import importlib.util
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.muzero import MuZero, MuZeroConfig, Targets
from rlstack.checks import ActionKindError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.exploration import EpsilonGreedy, Greedy, Sample, Softmax
from rlstack.families.planning import DrawnPlanOutput, PlanOutput
from rlstack.families.q_learning import TargetLearnerState
from rlstack.networks import LearnedModel, NetworkConfig
from rlstack.networks.latent_model import Predictions
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    SEVERAL,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    case,
    quick_jit,
    random_timesteps,
)
from tests.agents.linear_control import make_batch as make_control_batch
from tests.agents.linear_control import unit
from tests.programs import running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mctx") is None, reason="needs mctx")

CFG = MuZeroConfig(
    discount=0.9, num_unroll=3, n_step=2, num_simulations=6, max_value=10.0, optimizer=FAST
)
SMALL = NetworkConfig(hidden_sizes=(8,), num_atoms=7)
SETTINGS = {
    "muzero": Setting(CFG, VECTOR, ONE_OF_4, SMALL),
    "muzero-masked": Setting(
        dataclasses.replace(CFG, reanalyse_share=0.5), MASKED, ONE_OF_4, SMALL
    ),
    "muzero-continuous": Setting(dataclasses.replace(CFG, num_drawn=5), VECTOR, UNEVEN, SMALL),
}
if importlib.util.find_spec("mctx") is None:
    SETTINGS = {}


# A model that is simple to repeat in plain Python: state and reward are linear, and the logits of
# value and policy are rows of the state.
A, N, D = 4, 5, 4


def linear_model(*_):
    def step(params, state, action):
        return state @ params["w"] + jnp.asarray(params["b"])[action], state @ params["r"]

    def predict(params, state):
        return Predictions(state @ params["p"], state @ params["v"])

    return LearnedModel(random_params, lambda params, x: x @ params["o"], step, predict)


def random_params(key):
    shapes = {"o": (3, D), "w": (D, D), "b": (A, D), "r": (D, N), "p": (D, A), "v": (D, N)}
    keys = jax.random.split(key, len(shapes))
    return {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=True)}


PARAMS = jax.tree.map(np.asarray, random_params(jax.random.PRNGKey(1)))


def make(policy=Greedy, **changes):
    return MuZero(dataclasses.replace(CFG, **changes), VECTOR, ONE_OF_4, linear_model, policy)


def make_batch(step_types, seed=0):
    """One item per column; `step_types` is [B][T+1]. Ends in odd columns are truncations."""
    rng = np.random.default_rng(seed)
    step_type = np.array(step_types, np.int32).T
    shape = step_type.shape
    ends = np.where(step_type == LAST, np.arange(shape[1]) % 2, 1).astype(np.float32)
    reward = np.where(step_type == FIRST, 0, 3 * rng.normal(size=shape)).astype(np.float32)
    timestep = TimeStep(step_type, reward, ends, rng.normal(size=(*shape, 3)).astype(np.float32))
    policy = rng.dirichlet(np.ones(A), shape).astype(np.float32)
    output = PlanOutput(
        rng.integers(0, A, shape).astype(np.int32),
        policy,
        rng.normal(size=shape).astype(np.float32),
    )
    weights = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    return Batch(Transition(timestep, output, (), np.zeros_like(step_type)), weights)


STEP_TYPES = [
    [MID, MID, MID, MID, MID, MID],  # no boundary
    [MID, MID, LAST, FIRST, MID, MID],  # a truncation inside
    [FIRST, LAST, FIRST, MID, MID, MID],  # a termination early
    [MID, LAST, FIRST, LAST, FIRST, MID],  # two truncations
    [LAST, FIRST, MID, LAST, FIRST, MID],  # begins with the end of an episode, and has another one
    [FIRST, FIRST, FIRST, MID, MID, LAST],  # a seat that joins its game later
    [MID, MID, MID, LAST, FIRST, FIRST],  # a termination at the end of what is followed
]


def slow_targets(batch, column, unroll, n, discount):
    """Targets of one item: for each entry (reward, value, policy), None where nothing is known."""
    timestep, stored = batch.trajectory.timestep, batch.trajectory.agent_output
    kinds = timestep.step_type[:, column]
    episode = [0]  # the steps of the first step's episode
    while episode[-1] + 1 < len(kinds) and kinds[episode[-1] + 1] != FIRST:
        episode.append(episode[-1] + 1)
    end = episode[-1]
    over = kinds[end] == LAST and timestep.discount[end, column] == 0
    present = end > 0 or len(kinds) == 1 or kinds[0] == LAST
    found = []
    for k in range(unroll + 1):
        if k > end:
            found.append((0.0, 0.0, None) if over else None)
            continue
        if not present:
            found.append(None)
            continue
        value, factor, t = 0.0, 1.0, k
        while t < min(end, k + n):
            value += factor * timestep.reward[t + 1, column]
            factor *= discount * timestep.discount[t + 1, column]
            t += 1
        value += factor * stored.value[t, column]
        if over and k == end:
            value = 0.0
        acts = kinds[k] != LAST and k < len(kinds)
        policy = stored.policy[k, column] if acts else None
        found.append((timestep.reward[k, column], value, policy))
    return found


@pytest.mark.parametrize(("unroll", "n"), [(3, 2), (5, 1), (1, 4), (4, 9)])
def test_targets_are_those_of_plain_python(unroll, n):
    batch = make_batch(STEP_TYPES)
    targets = make(num_unroll=unroll, n_step=n).targets(batch.trajectory)
    for column in range(len(STEP_TYPES)):
        for k, wanted in enumerate(slow_targets(batch, column, unroll, n, 0.9)):
            where = f"column {column}, entry {k}"
            assert bool(targets.known[k, column]) == (wanted is not None), where
            if wanted is None:
                assert not targets.acts[k, column], where
                continue
            reward, value, policy = wanted
            assert targets.value[k, column] == pytest.approx(value, abs=1e-5), where
            if k:
                assert targets.reward[k - 1, column] == pytest.approx(reward, abs=1e-6), where
            assert bool(targets.acts[k, column]) == (policy is not None), where
            if policy is not None:
                np.testing.assert_array_equal(targets.policy[k, column], policy)


def test_targets_by_hand():
    batch = make_batch([[MID, MID, LAST, FIRST, MID]])  # a termination at step 2
    timestep = batch.trajectory.timestep._replace(
        reward=np.array([[9.0], [1.0], [3.0], [0.0], [7.0]], np.float32)
    )
    output = batch.trajectory.agent_output._replace(
        value=np.array([[4.0], [6.0], [8.0], [2.0], [5.0]], np.float32)
    )
    trajectory = batch.trajectory._replace(timestep=timestep, agent_output=output)
    found = make(discount=0.5, num_unroll=4, n_step=1).targets(trajectory)
    # 1 + 0.5 * 6, then 3 and no more; at the end and after it 0.
    np.testing.assert_allclose(found.value[:, 0], [4.0, 3.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(found.reward[:, 0], [1.0, 3.0, 0.0, 0.0])
    np.testing.assert_array_equal(found.known[:, 0], [True] * 5)
    np.testing.assert_array_equal(found.acts[:, 0], [True, True, False, False, False])
    # The same end as a truncation: its value is that of the search, and nothing is known after it.
    timestep = timestep._replace(discount=np.ones_like(timestep.discount))
    found = make(discount=0.5, num_unroll=4, n_step=1).targets(
        trajectory._replace(timestep=timestep)
    )
    np.testing.assert_allclose(found.value[:3, 0], [4.0, 3.0 + 0.5 * 8.0, 8.0])
    np.testing.assert_array_equal(found.known[:, 0], [True, True, True, False, False])


def test_numbers_are_divided_between_two_atoms():
    agent = make(max_value=3.0)
    # h(3) = 2 - 1 + 0.003 = 1.003, so the 5 atoms are -1.003, -0.5015, 0, 0.5015, 1.003.
    # h(1) = sqrt(2) - 1 + 0.001 = 0.4152: 0.4152 / 0.5015 = 0.828 of the fourth atom.
    probs = np.asarray(
        quick_jit(agent.atoms.probs)(jnp.array([1.0, -1.0, 3.0, 50.0]), jnp.zeros((4, 5)))
    )
    share = (np.sqrt(2) - 1 + 0.001) / 0.5015
    np.testing.assert_allclose(probs[0], [0, 0, 1 - share, share, 0], atol=1e-6)
    np.testing.assert_allclose(probs[1], [0, share, 1 - share, 0, 0], atol=1e-6)
    np.testing.assert_allclose(probs[2:], [[0, 0, 0, 0, 1]] * 2, atol=1e-6)
    logits = jnp.log(jnp.maximum(probs, 1e-30))
    np.testing.assert_allclose(agent.atoms.mean(logits), [1, -1, 3, 3], atol=1e-4)


def test_each_step_halves_the_gradient_of_the_state_before_it():
    agent, observation = make(num_unroll=3), np.ones((2, 3), np.float32)
    actions = np.array([[0, 1], [2, 3], [1, 0]], np.int32)

    def policy(o, k):
        return agent.unrolled({**PARAMS, "o": o}, observation, actions)[1][k].sum()

    for k in range(4):
        # The model is linear in o: the whole gradient is that of ones @ w^k @ p.
        whole = np.ones((2, A)) @ PARAMS["p"].T
        for _ in range(k):
            whole = whole @ PARAMS["w"].T
        found = jax.grad(policy)(PARAMS["o"], k)
        np.testing.assert_allclose(found, 0.5**k * observation.T @ whole, rtol=1e-4, atol=1e-4)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def h(x):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x


def slow_loss(batch, column, actions, max_value):
    """The parts of one item's loss, from numbers of numpy: policy, reward, value."""
    atoms = np.linspace(-h(max_value), h(max_value), N)

    def divergence(probs, logits):
        positive = probs > 0
        return (probs * np.log(np.where(positive, probs, 1) / softmax(logits)))[positive].sum()

    def two_hot(x):
        position = (np.clip(h(x), atoms[0], atoms[-1]) - atoms[0]) / (atoms[1] - atoms[0])
        low = min(int(position), N - 2)
        probs = np.zeros(N)
        probs[low], probs[low + 1] = 1 - (position - low), position - low
        return probs

    state = batch.trajectory.timestep.observation[0, column].astype(float) @ PARAMS["o"]
    parts = np.zeros(3)
    for k, target in enumerate(slow_targets(batch, column, 3, 2, 0.9)):
        scale = 1.0 if k == 0 else 1 / 3
        if k:
            reward_logits = state @ PARAMS["r"]
            state = state @ PARAMS["w"] + PARAMS["b"][actions[k - 1, column]]
        if target is None:
            continue
        reward, value, policy = target
        if policy is not None:
            parts[0] += scale * divergence(policy.astype(float), state @ PARAMS["p"])
        if k:
            parts[1] += scale * divergence(two_hot(reward), reward_logits)
        parts[2] += scale * divergence(two_hot(value), state @ PARAMS["v"])
    return parts


def test_the_loss_is_that_of_numpy():
    agent, key = make(value_cost=0.5), jax.random.PRNGKey(0)
    batch = make_batch(STEP_TYPES)
    loss, (logs, priorities) = quick_jit(agent.loss)(key, PARAMS, batch)
    actions = agent.actions(key, batch.trajectory, agent.targets(batch.trajectory))
    taken = batch.trajectory.agent_output.action
    np.testing.assert_array_equal(actions[:, 0], taken[:3, 0])
    np.testing.assert_array_equal(actions[:2, 1], taken[:2, 1])
    parts = np.array(
        [slow_loss(batch, i, np.asarray(actions), 10.0) for i in range(len(STEP_TYPES))]
    )
    weighted = (parts @ [1, 1, 0.5] * batch.weights).mean()
    assert float(loss) == pytest.approx(weighted, rel=1e-4)
    for name, wanted in zip(("policy", "reward", "value"), parts.mean(axis=0), strict=True):
        assert float(logs[f"{name}_loss"]) == pytest.approx(wanted, rel=1e-4), name
    for column, found in enumerate(priorities):
        target = slow_targets(batch, column, 3, 2, 0.9)[0]
        state = batch.trajectory.timestep.observation[0, column] @ PARAMS["o"]
        value = float(agent.atoms.mean(jnp.asarray(state @ PARAMS["v"])))
        wanted = 0.0 if target is None else abs(value - target[1])
        assert float(found) == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_actions_after_an_end_are_drawn():
    agent, batch = make(num_unroll=4), make_batch([STEP_TYPES[2]] * 64)
    targets = agent.targets(batch.trajectory)
    one, other = (
        np.asarray(agent.actions(jax.random.PRNGKey(i), batch.trajectory, targets)) for i in (1, 2)
    )
    np.testing.assert_array_equal(one[:1], batch.trajectory.agent_output.action[:1])
    assert (one[1:] != other[1:]).mean() > 0.5
    assert set(one[1:].ravel()) == set(range(A))


def spike(x):
    """Logits of 201 atoms from -h(20) to h(20) that stand for numbers."""
    atoms = np.linspace(-h(20.0), h(20.0), 201)
    scaled = jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + 1e-3 * x
    near = jnp.maximum(1 - jnp.abs(scaled[..., None] - atoms) / (atoms[1] - atoms[0]), 0)
    return jnp.log(near + 1e-30)


@functools.cache
def planner(policy=Greedy):
    """A compiled `actor_step`, of a model whose params have the reward of each action.

    They also have the value of the state that it leads to. That of the first state is the first
    number of the observation.
    """

    def step(params, state, action):
        rewards, values = params
        return values[action][:, None], spike(rewards[action])

    def predict(params, state):
        return Predictions(jnp.zeros((len(state), A)), spike(state[:, 0]))

    model = LearnedModel(lambda key: {}, lambda params, x: x["observation"][:, :1], step, predict)
    cfg = dataclasses.replace(CFG, max_value=20.0, num_simulations=4, value_scale=0.03)
    agent = MuZero(cfg, MASKED, ONE_OF_4, lambda *_: model, policy)
    act = quick_jit(agent.actor_step)

    def acted(rewards, values, timestep, seed=0):
        params = jnp.array(rewards, jnp.float32), jnp.array(values, jnp.float32)
        state = agent.initial_state(len(timestep.reward))
        return act(jax.random.PRNGKey(seed), params, timestep, state)[0]

    return acted


def seen(values):
    step = random_timesteps(VECTOR, np.ones(len(values)))
    observation = np.repeat(np.asarray(values, np.float32)[:, None], 3, axis=1)
    mask = np.ones((len(values), A), np.float32)
    return step._replace(observation={"observation": observation, "action_mask": mask})


@pytest.mark.slow
@pytest.mark.chosen
def test_the_value_of_a_root_is_the_mean_of_what_simulations_found():
    output = planner()([1.0, 1.0, 1.0, 1.0], [2.0] * 4, seen([6.0, 0.0]))
    # The root's own value, and four times 1 + 0.9 * 2: (6 + 4 * 2.8) / 5.
    np.testing.assert_allclose(output.value, [3.44, 2.24], rtol=1e-3)
    np.testing.assert_allclose(output.policy[0], [0.25] * 4, atol=1e-3)


def test_the_search_finds_the_best_action_of_the_model():
    output = planner()([0.0, 1.0, 0.0, 5.0], [0.0, 0.0, 8.0, 0.0], seen([0.0, 3.0]))
    # Action 2 has 0.9 * 8, action 3 has 5 and action 1 has 1.
    np.testing.assert_array_equal(output.action, [2, 2])
    assert (np.argsort(np.asarray(output.policy), axis=1) == [0, 1, 3, 2]).all()
    np.testing.assert_allclose(output.policy.sum(axis=1), 1, rtol=1e-5)


ROWS = 4096


def test_illegal_actions_have_no_probability():
    steps = seen(np.zeros(ROWS))
    steps.observation["action_mask"][:] = [0, 1, 1, 0]
    steps.observation["action_mask"][-1] = 0  # a row of padding, without a legal action
    output = planner(Sample)([9.0, 1.0, 0.0, 0.0], [0.0] * 4, steps)
    assert set(np.unique(output.action[:-1])) == {1, 2}
    assert (np.asarray(output.policy[:-1])[:, [0, 3]] == 0).all()
    assert np.isfinite(output.policy).all()


def test_the_greedy_policy_uses_no_random_numbers_and_training_draws():
    for act, rows, same in ((planner(), 2, True), (planner(Sample), ROWS, False)):
        one, other = (act([0.1, 0.2, 0.0, 0.3], [0.0] * 4, seen(np.zeros(rows)), i) for i in (1, 2))
        assert np.array_equal(one.action, other.action) == same


def test_noise_makes_the_action_a_draw_from_the_improved_policy():
    # All actions are tried once, so the action is the largest of noise + logits + values.
    act = planner(Sample)
    output = act([0.0, 0.5, 1.0, 0.25], [0.0] * 4, seen(np.zeros(ROWS)), 3)
    shares = np.bincount(output.action, minlength=4) / ROWS
    np.testing.assert_allclose(shares, np.asarray(output.policy).mean(axis=0), atol=0.03)


class Read(MuZero):
    """Its searches read from the observation what they find."""

    def search(self, rng_key, params, timestep, *, noise):
        x = jnp.asarray(timestep.observation)
        found = PlanOutput(jnp.full(len(x), -1), x[:, :1] + jnp.arange(A), x[:, 1] + params)
        return found, None


def test_reanalysis_replaces_the_share_of_the_items():
    cfg = dataclasses.replace(CFG, reanalyse_share=0.5)
    agent = Read(cfg, VECTOR, ONE_OF_4, linear_model, Sample)
    trajectory = make_batch(STEP_TYPES[:4]).trajectory
    found = agent.reanalysed(jax.random.PRNGKey(5), 7.0, trajectory)
    old, new, seen = trajectory.agent_output, found.agent_output, trajectory.timestep.observation
    np.testing.assert_array_equal(new.action, old.action)
    np.testing.assert_array_equal(new.value[:, 2:], old.value[:, 2:])
    np.testing.assert_array_equal(new.policy[:, 2:], old.policy[:, 2:])
    np.testing.assert_array_equal(new.value[:, :2], seen[:, :2, 1] + np.float32(7))
    np.testing.assert_array_equal(new.policy[:, :2, 3], seen[:, :2, 0] + np.float32(3))
    assert_close(found.timestep, trajectory.timestep, atol=0, rtol=0)


class Sure(MuZero):
    """Its searches find action 2 best, and take action 0."""

    def search(self, rng_key, params, timestep, *, noise):
        rows = len(timestep.reward)
        policy = jnp.tile(jnp.array([0.1, 0.2, 0.6, 0.1]), (rows, 1))
        found = PlanOutput(jnp.zeros(rows, jnp.int32), policy, jnp.zeros(rows))
        return found, jnp.ones((rows, A), bool)


def test_another_policy_chooses_by_the_improved_policy():
    state, timestep = Sure.initial_state(None, ROWS), seen(np.zeros(ROWS))
    for policy, wanted in (
        (functools.partial(EpsilonGreedy, 0.4), [0.1, 0.1, 0.7, 0.1]),
        (Softmax, [0.1, 0.2, 0.6, 0.1]),
        (Sample, [1, 0, 0, 0]),  # the search's own draw
        (Greedy, [1, 0, 0, 0]),
    ):
        agent = Sure(CFG, VECTOR, ONE_OF_4, linear_model, policy)
        output, _ = agent.actor_step(jax.random.PRNGKey(3), {}, timestep, state)
        shares = np.bincount(output.action, minlength=4) / ROWS
        np.testing.assert_allclose(shares, wanted, atol=0.03)


class Told(Read):
    """Its loss tells the values that its batch has."""

    def loss(self, rng_key, params, batch):
        value = batch.trajectory.agent_output.value
        return 0.0 * params, ({"value": value[:, :2].mean()}, value[0])


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_update_searches_again_with_the_target_params(share):
    agent = Told(
        dataclasses.replace(CFG, reanalyse_share=share), VECTOR, ONE_OF_4, linear_model, Sample
    )
    batch, params = make_batch(STEP_TYPES[:4]), jnp.float32(100.0)
    state = TargetLearnerState((), jnp.float32(7.0), jnp.int32(0), jax.random.PRNGKey(0))
    _, output = agent.compute_gradients(params, state, batch)
    found = batch.trajectory.timestep.observation[:, :2, 1] + 7.0
    wanted = found if share else batch.trajectory.agent_output.value[:, :2]
    assert float(output.logs["value"]) == pytest.approx(wanted.mean(), rel=1e-5)


GOAL = np.array([0.5, -0.3], np.float32)


@functools.cache
def reacher(policy):
    """An agent of continuous actions, whose model's reward is how near an action is to a goal."""

    def step(params, state, action):
        return state, spike(1 - jnp.square(action - GOAL).sum(-1))

    def predict(params, state):
        means = jnp.zeros((len(state), 2))
        return Predictions(jnp.concatenate([means, means - 0.5], axis=1), spike(state[:, 0]))

    model = LearnedModel(lambda key: {}, lambda params, x: 0 * x[:, :1], step, predict)
    cfg = dataclasses.replace(CFG, max_value=20.0, num_simulations=16, num_drawn=8)
    agent = MuZero(cfg, VECTOR, UNEVEN, lambda *_: model, policy)
    return agent, quick_jit(agent.actor_step)


def test_the_greedy_policy_takes_the_best_of_the_actions_that_it_draws():
    agent, act = reacher(Greedy)
    arguments = {}, random_timesteps(VECTOR, np.ones(3)), agent.initial_state(3)
    output, _ = act(jax.random.PRNGKey(1), *arguments)
    drawn = np.asarray(output.drawn)
    np.testing.assert_array_equal(drawn[1:], drawn[:1].repeat(2, axis=0))  # the same noise
    np.testing.assert_array_equal(drawn[:, 0], np.zeros((3, 2)))  # the policy's mode
    best = np.square(drawn[0] - GOAL).sum(-1).argmin()
    np.testing.assert_allclose(unit(output.action), drawn[:, best], atol=1e-6)
    assert (np.argmax(output.policy, axis=1) == best).all()
    np.testing.assert_allclose(output.policy.sum(axis=1), 1, rtol=1e-5)


class Drew(MuZero):
    """Its searches find the third of three actions best."""

    WEIGHTS = np.array([0.2, 0.3, 0.5], np.float32)
    DRAWN = np.array([[0.1, -0.2], [0.9, 0.0], [-0.5, 0.4]], np.float32)

    def search(self, rng_key, params, timestep, *, noise):
        policy, drawn = jnp.array([self.WEIGHTS]), jnp.array([self.DRAWN])
        found = DrawnPlanOutput(jnp.array([2]), policy, jnp.zeros(1), drawn)
        return found, jnp.ones((1, 3), bool)


@pytest.mark.parametrize("policy", [Greedy, Sample])
def test_the_distribution_of_continuous_actions_is_a_gaussian(policy):
    agent = Drew(CFG, VECTOR, UNEVEN, linear_model, policy)
    found = agent.action_distribution(None, {}, None, None)
    mean = (Drew.WEIGHTS[:, None] * Drew.DRAWN).sum(0)
    centre = Drew.DRAWN[2] if policy is Greedy else mean
    np.testing.assert_allclose(unit(found.mean[0]), centre, atol=1e-6)
    spread = np.sqrt((Drew.WEIGHTS[:, None] * (Drew.DRAWN - mean) ** 2).sum(0))
    half = np.array([2.0, 3.0])  # of the ranges of the two numbers
    np.testing.assert_allclose(np.exp(found.log_std[0]), spread * half, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.chosen
def test_in_training_each_row_has_its_own_draws_of_the_policy():
    agent, act = reacher(Sample)
    rows = 512
    timestep, state = random_timesteps(VECTOR, np.ones(rows)), agent.initial_state(rows)
    output, _ = act(jax.random.PRNGKey(1), {}, timestep, state)
    raw = np.arctanh(np.asarray(output.drawn, np.float64))
    np.testing.assert_allclose(raw.mean((0, 1)), [0, 0], atol=0.03)
    np.testing.assert_allclose(raw.std((0, 1)), np.exp([-0.5, -0.5]), rtol=0.03)
    distance = np.abs(unit(output.action)[:, None] - output.drawn).max(-1)
    assert (distance.min(axis=1) < 1e-6).all()
    assert len(np.unique(distance.argmin(axis=1))) == 8
    # The actions taken are nearer to the goal than those that the policy draws.
    near = np.square(unit(output.action) - GOAL).sum(-1).mean()
    assert near < 0.7 * np.square(np.asarray(output.drawn) - GOAL).sum(-1).mean()


def test_the_loss_of_a_policy_of_continuous_actions_is_that_of_numpy():
    agent, rng = reacher(Greedy)[0], np.random.default_rng(0)
    parameters = rng.normal(size=(3, 2, 4)).astype(np.float32)
    weights = rng.dirichlet(np.ones(5), (3, 2)).astype(np.float32)
    drawn = np.tanh(rng.normal(size=(3, 2, 5, 2))).astype(np.float32)
    targets = Targets(None, None, weights, drawn, None, None)
    found = np.asarray(quick_jit(agent.policy_losses)(targets, parameters))
    raw = np.linspace(-12, 12, 4001)
    for t, b in np.ndindex(3, 2):
        mean, log_std = parameters[t, b].astype(float).reshape(2, 2)

        def log_density(x, mean=mean, log_std=log_std):  # of tanh(x), for each of the two numbers
            z = (x - mean) / np.exp(log_std)
            slope = 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))
            return -0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi) - slope

        likelihoods = log_density(np.arctanh(drawn[t, b].astype(float))).sum(-1)
        x = raw[:, None]
        density = np.exp(-0.5 * ((x - mean) / np.exp(log_std)) ** 2 - log_std) / np.sqrt(2 * np.pi)
        entropy = -(density * log_density(x)).sum() * (raw[1] - raw[0])
        wanted = -(weights[t, b] * likelihoods).sum() - 0.005 * entropy
        assert found[t, b] == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def test_continuous_actions_are_followed_in_the_models_units():
    agent, key = reacher(Greedy)[0], jax.random.PRNGKey(0)
    batch = make_control_batch([STEP_TYPES[0], STEP_TYPES[2]], lambda x: PlanOutput(x, 0, 0))
    acts = np.array([[True, True], [True, False], [True, False], [True, False]])
    targets = Targets(None, None, None, None, None, acts)
    found = np.asarray(agent.actions(key, batch.trajectory, targets))
    taken = unit(batch.trajectory.agent_output.action)
    np.testing.assert_allclose(found[:, 0], taken[:3, 0], atol=1e-6)
    np.testing.assert_allclose(found[0, 1], taken[0, 1], atol=1e-6)
    assert (np.abs(found) <= 1).all()
    assert np.abs(found[1:, 1] - taken[1:3, 1]).min() > 1e-3


@pytest.mark.slow
@pytest.mark.chosen
def test_an_update_moves_the_policy_towards_the_better_of_the_drawn_actions():
    c = case("muzero-continuous")
    stored = c.batch.trajectory.agent_output
    best = np.zeros_like(stored.policy)
    best[..., 2] = 1.0
    batch = c.batch._replace(
        trajectory=c.batch.trajectory._replace(agent_output=stored._replace(policy=best))
    )

    def distance(params):
        first = jax.tree.map(lambda x: x[0], batch.trajectory.timestep.observation)
        model = c.agent.network
        mode = c.agent.policy_of(
            model.predict(params, model.represent(params, first)).policy
        ).mode()
        return float(np.abs(mode - stored.drawn[0, :, 2]).mean())

    params, learner_state = c.params, c.learner_state
    for _ in range(100):
        params, learner_state, _ = c.learn(params, learner_state, batch)
    assert distance(params) < 0.7 * distance(c.params)


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ActionKindError, match="if it is not one discrete choice: the action must"):
        MuZero(CFG, VECTOR, SEVERAL, linear_model, Greedy)
    with pytest.raises(ValueError, match=r"num_unroll \(6\) must be at most the item's 5"):
        make(num_unroll=6).targets(make_batch(STEP_TYPES).trajectory)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"mctx must be installed.*rlstack\[planning\]"):
        make()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_muzero_learns_to_catch(tmp_path, share):
    experiment = preset("catch-muzero")
    agent = dataclasses.replace(experiment.agent, reanalyse_share=share)
    experiment = dataclasses.replace(
        experiment, agent=agent, evaluator=EvaluatorConfig(episodes=200, num_envs=50)
    )
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert result.eval_return_mean == 1.0


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["catch-muzero", "pendulum-muzero"])
@pytest.mark.parametrize("topology", ["single_process", *running.TOPOLOGIES])
def test_it_runs_in_every_topology(name, topology, tmp_path):
    """In light_env and distributed, services search for the environments of both actors."""
    experiment = preset(name)
    experiment = dataclasses.replace(
        experiment,
        agent=dataclasses.replace(experiment.agent, num_simulations=4, num_drawn=4),
        network=SMALL,
    )
    experiment = running.small(
        experiment,
        topology,
        10**6,
        env={"num_envs": 8},
        replay={"batch_size": 8, "min_size": 40, "samples_per_insert": 8.0},
        program={"num_actors": 1 if topology == "single_process" else 2},
        updates=10,
    )
    result = running.run(experiment, tmp_path / "run")
    assert result.learner_steps >= 10
    assert all(np.isfinite(x).all() for x in running.params(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_swing_a_pendulum_up(tmp_path):
    result = train.run(preset("pendulum-muzero"), tmp_path / "run", stream=io.StringIO())
    assert result.eval_return_mean > -600  # random actions: about -1,200
