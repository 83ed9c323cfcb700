"""MuZero: targets by hand and in plain Python, two-hot atoms, gradients, the search, learning."""

import dataclasses
import functools
import importlib.util
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.muzero import MuZero, MuZeroConfig
from rlstack.checks import ActionKindError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.exploration import EpsilonGreedy, Greedy, Sample
from rlstack.families.planning import PlanOutput
from rlstack.networks import LearnedModel, NetworkConfig, learned_model
from rlstack.networks.latent_model import Predictions
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import (
    BATCH,
    FAST,
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    REAL,
    VECTOR,
    Case,
    Setting,
    assert_close,
    case,
    quick_jit,
    random_timesteps,
)

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
    probs = np.asarray(agent.atoms.probs(jnp.array([1.0, -1.0, 3.0, 50.0]), jnp.zeros((4, 5))))
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
    loss, (logs, priorities) = agent.loss(key, PARAMS, batch)
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


def planner(rewards, values, policy=Greedy, obs_spec=VECTOR, **changes):
    """An agent whose model gives action a a reward and leads to a state with a value.

    The value of the first state is the first number of the observation.
    """
    rewards, values = np.array(rewards, np.float32), np.array(values, np.float32)

    def represent(params, x):
        return (x["observation"] if isinstance(x, dict) else x)[:, :1]

    def step(params, state, action):
        return jnp.asarray(values)[action][:, None], spike(jnp.asarray(rewards)[action])

    def predict(params, state):
        return Predictions(jnp.zeros((len(state), A)), spike(state[:, 0]))

    model = LearnedModel(lambda key: {}, represent, step, predict)
    cfg = dataclasses.replace(CFG, max_value=20.0, **changes)
    return MuZero(cfg, obs_spec, ONE_OF_4, lambda *_: model, policy)


def seen(values, mask=None):
    step = random_timesteps(VECTOR, np.ones(len(values)))
    observation = np.repeat(np.asarray(values, np.float32)[:, None], 3, axis=1)
    if mask is not None:
        observation = {"observation": observation, "action_mask": np.asarray(mask, np.float32)}
    return step._replace(observation=observation)


def test_the_value_of_a_root_is_the_mean_of_what_simulations_found():
    agent = planner([1.0, 1.0, 1.0, 1.0], [2.0] * 4, discount=0.5, num_simulations=4)
    output, _ = agent.search(jax.random.PRNGKey(0), {}, seen([6.0]), noise=False)
    # The root's own value, and four times 1 + 0.5 * 2: (6 + 4 * 2) / 5.
    assert float(output.value[0]) == pytest.approx(2.8, rel=1e-3)
    np.testing.assert_allclose(output.policy[0], [0.25] * 4, atol=1e-3)


def test_the_search_finds_the_best_action_of_the_model():
    agent = planner([0.0, 1.0, 0.0, 5.0], [0.0, 0.0, 8.0, 0.0], num_simulations=4)
    state = agent.initial_state(2)
    output, _ = agent.actor_step(jax.random.PRNGKey(0), {}, seen([0.0, 3.0]), state)
    # Action 2 has 0.9 * 8, action 3 has 5 and action 1 has 1.
    np.testing.assert_array_equal(output.action, [2, 2])
    assert (np.argsort(output.policy, axis=1) == [0, 1, 3, 2]).all()
    np.testing.assert_allclose(output.policy.sum(axis=1), 1, rtol=1e-5)


def test_illegal_actions_have_no_probability():
    agent = planner([9.0, 1.0, 0.0, 0.0], [0.0] * 4, Sample, MASKED, num_simulations=8)
    steps = seen([0.0, 0.0], [[0, 1, 1, 0], [0, 0, 0, 0]])
    output, legal = agent.search(jax.random.PRNGKey(0), {}, steps, noise=True)
    np.testing.assert_array_equal(legal, [[False, True, True, False], [True] * 4])
    assert output.action[0] in (1, 2)
    assert (np.asarray(output.policy[0])[[0, 3]] == 0).all()
    assert np.isfinite(output.policy).all()  # also in a row of padding, without a legal action


def test_the_greedy_policy_uses_no_random_numbers_and_training_draws():
    timesteps = seen(np.zeros(64))
    for policy, same in ((Greedy, True), (Sample, False)):
        agent = planner([0.1, 0.2, 0.0, 0.3], [0.0] * 4, policy, num_simulations=4)
        one, other = (
            agent.actor_step(jax.random.PRNGKey(i), {}, timesteps, agent.initial_state(64))[0]
            for i in (1, 2)
        )
        assert np.array_equal(one.action, other.action) == same


def test_noise_makes_the_action_a_draw_from_the_improved_policy():
    # All actions are tried once, so the action is the largest of noise + logits + values.
    agent = planner([0.0, 0.5, 1.0, 0.25], [0.0] * 4, Sample, num_simulations=4, value_scale=0.03)
    rows = 4096
    state = agent.initial_state(rows)
    output, _ = jax.jit(agent.actor_step)(jax.random.PRNGKey(3), {}, seen(np.zeros(rows)), state)
    shares = np.bincount(output.action, minlength=4) / rows
    np.testing.assert_allclose(shares, np.asarray(output.policy).mean(axis=0), atol=0.03)


def test_another_policy_chooses_by_the_improved_policy():
    rewards = [0.0, 0.0, 5.0, 0.0]
    agent = planner(rewards, [0.0] * 4, functools.partial(EpsilonGreedy, 1.0), num_simulations=4)
    rows = 400
    output, _ = agent.actor_step(
        jax.random.PRNGKey(3), {}, seen(np.zeros(rows)), agent.initial_state(rows)
    )
    assert np.bincount(output.action, minlength=4).min() > rows / 8  # uniform
    never = planner(rewards, [0.0] * 4, functools.partial(EpsilonGreedy, 0.0), num_simulations=4)
    output, _ = never.actor_step(
        jax.random.PRNGKey(3), {}, seen(np.zeros(rows)), agent.initial_state(rows)
    )
    assert (output.action == 2).all()


def test_reanalysis_replaces_the_share_of_the_items():
    agent = make(Sample, reanalyse_share=0.5)
    batch = make_batch(STEP_TYPES[:4])
    key = jax.random.PRNGKey(5)
    found = agent.reanalysed(key, PARAMS, batch.trajectory)
    old, new = batch.trajectory.agent_output, found.agent_output
    np.testing.assert_array_equal(new.action, old.action)
    for name in ("policy", "value"):
        before, after = getattr(old, name), np.asarray(getattr(new, name))
        np.testing.assert_array_equal(after[:, 2:], before[:, 2:])
        assert (after[:, :2] != before[:, :2]).any()
    # Row i of step t is row 2 t + i of the search.
    steps = jax.tree.map(
        lambda x: np.concatenate([x[t, :2] for t in range(6)]), batch.trajectory.timestep
    )
    again, _ = agent.search(key, PARAMS, steps, noise=True)
    np.testing.assert_allclose(new.value[3, 1], again.value[7], rtol=1e-5)
    assert_close(found.timestep, batch.trajectory.timestep, atol=0, rtol=0)


def test_an_update_searches_again_with_the_target_params():
    c = case("muzero-masked")
    changed = c.learner_state._replace(
        target_params=jax.tree.map(lambda x: x + 0.5, c.learner_state.target_params)
    )
    plain = Case(c.setting._replace(cfg=dataclasses.replace(c.setting.cfg, reanalyse_share=0.0)))
    for one, differs in ((c, True), (plain, False)):
        gradients = quick_jit(one.agent.compute_gradients)
        before = gradients(c.params, c.learner_state, c.batch)[0]
        after = gradients(c.params, changed, c.batch)[0]
        same = all(
            np.allclose(x, y)
            for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        )
        assert same != differs


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ActionKindError, match="one discrete choice"):
        MuZero(CFG, VECTOR, REAL, linear_model, Greedy)
    with pytest.raises(ValueError, match=r"num_unroll \(6\) must be at most the item's 5"):
        make(num_unroll=6).targets(make_batch(STEP_TYPES).trajectory)
    for field, value in (("core", "lstm"), ("norm", "batch"), ("dropout", 0.5), ("shared", True)):
        with pytest.raises(ValueError, match=field):
            learned_model(VECTOR, ONE_OF_4, NetworkConfig(**{field: value}))
    with pytest.raises(ValueError, match="one discrete choice"):
        learned_model(VECTOR, REAL)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"mctx must be installed.*rlstack\[planning\]"):
        make()


@pytest.mark.parametrize("torso", ["mlp", "residual", "sphere"])
def test_latent_states_reach_from_0_to_1(torso):
    model = learned_model(VECTOR, ONE_OF_4, dataclasses.replace(SMALL, torso=torso))
    params = model.init(jax.random.PRNGKey(0))
    state = model.represent(params, np.random.default_rng(0).normal(size=(BATCH, 3)))
    after, reward = model.step(params, state, np.arange(BATCH))
    predicted = model.predict(params, after)
    for x in (state, after):
        np.testing.assert_allclose(x.min(axis=1), 0, atol=1e-6)
        np.testing.assert_allclose(x.max(axis=1), 1, atol=1e-5)
    shapes = [x.shape for x in (state, reward, *predicted)]
    assert shapes == [(BATCH, 8), (BATCH, 7), (BATCH, 4), (BATCH, 7)]
    assert len({tuple(row) for row in np.asarray(after)}) == BATCH  # actions differ


def test_images_go_through_the_configured_torso():
    spec = specs.BoundedArray((10, 10, 4), np.float32, 0, 1)
    cfg = NetworkConfig(torso="minatar", hidden_sizes=(16,), num_atoms=7, dtype="bfloat16")
    model = learned_model(spec, ONE_OF_4, cfg)
    params = model.init(jax.random.PRNGKey(0))
    state = model.represent(params, np.zeros((2, 10, 10, 4), np.float32))
    assert state.shape == (2, 16)
    assert state.dtype == jnp.float32
    assert any("minatar" in name or "conv" in name for name in map(str, params))


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
