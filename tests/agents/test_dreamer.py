"""DreamerV3: each loss in numpy, episodes in sequences, gradients of draws, and learning."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.acting.actor import transition_spec
from rlstack.agents.dreamer import Dreamer, DreamerConfig, DreamerOutput, Imagined, States
from rlstack.checks import ActionKindError
from rlstack.configs.world_model import WorldModelConfig
from rlstack.exploration import Greedy, Sample
from rlstack.math.value_distributions import SymexpAtoms, two_hot
from rlstack.networks import NetworkConfig, WorldModel, world_model
from rlstack.networks.recurrent_model import Outlook, Part, Seen, features_of
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.storage import checkpoint
from rlstack.types import Batch, EnvSpec, Transition
from tests.agent_cases import (
    FAST,
    FIRST,
    IMAGE,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    SEVERAL,
    STRUCTURED,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    case,
    quick_jit,
    random_timesteps,
)
from tests.fused.test_fused_run import saved
from tests.programs import running

SIZES = WorldModelConfig(
    "tiny", recurrent=8, hidden=8, categoricals=3, classes=4, units=8, layers=1, depth=2, blocks=2
)
CFG = DreamerConfig(model=SIZES, horizon=3, max_value=20.0, optimizer=FAST)
SMALL = NetworkConfig(activation="silu", norm="rms", num_atoms=9)
SETTINGS = {
    "dreamer": Setting(CFG, VECTOR, ONE_OF_4, SMALL),
    "dreamer-stored": Setting(dataclasses.replace(CFG, write_back=False), VECTOR, UNEVEN, SMALL),
    "dreamer-image": Setting(CFG, IMAGE, SEVERAL, SMALL),
    "dreamer-masked": Setting(CFG, MASKED, ONE_OF_4, SMALL),
    "dreamer-structured": Setting(CFG, VECTOR, STRUCTURED, SMALL),
}

# A model that is simple to repeat in numpy.
A, D, S, K, E, N = 4, 5, 3, 4, 6, 9
F = D + S * K


def linear(sharp=1.0):
    """A model of linear parts; with a large ``sharp`` the categories are never drawn otherwise."""
    shapes = {"e": (3, E), "w": (D, D), "c": (S * K, D), "b": (A, D), "p": (D, S * K)}
    shapes |= {"q": (E, S * K), "r": (D, S * K), "d": (F, 3), "reward": (F, N), "continues": (F,)}

    def normals(key, shapes):
        keys = jax.random.split(key, len(shapes))
        return {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=True)}

    def part(size):
        return Part(lambda key: normals(key, {"w": (F, size)}), lambda p, x: x @ p["w"])

    def flat(x):
        return x.reshape(*x.shape[:-2], -1)

    def logits(x):
        return sharp * x.reshape(*x.shape[:-1], S, K)

    return WorldModel(
        lambda key: normals(key, shapes),
        lambda observation: Seen(observation, ()),
        lambda p, seen: seen.vector @ p["e"],
        lambda p, recurrent, categories, action: jnp.tanh(
            recurrent @ p["w"] + flat(categories) @ p["c"] + action @ p["b"]
        ),
        lambda p, recurrent, encoded: logits(recurrent @ p["p"] + encoded @ p["q"]),
        lambda p, recurrent: logits(recurrent @ p["r"]),
        lambda p, recurrent, categories: Seen(features_of(recurrent, categories) @ p["d"], ()),
        lambda p, x: Outlook(x @ p["reward"], x @ p["continues"]),
        part(A),
        part(N),
        D,
        (S, K),
        A,
    )


def make(policy=Sample, spec=ONE_OF_4, sharp=1.0, **changes):
    cfg = dataclasses.replace(CFG, **changes)
    return Dreamer(cfg, VECTOR, spec, lambda *_: lambda sizes: linear(sharp), policy)


def some_params(agent, seed=1, scale=0.5):
    params = agent.initial_params(jax.random.PRNGKey(seed))
    return jax.tree.map(lambda x: scale * np.asarray(x), params)


STEP_TYPES = np.array(
    [
        [MID, MID, MID, MID, MID],  # no boundary
        [FIRST, MID, LAST, FIRST, MID],  # an end inside
        [LAST, FIRST, MID, MID, LAST],  # an end at both ends
        [FIRST, FIRST, MID, MID, MID],  # a seat that joins its game later
    ],
    np.int32,
).T
T = len(STEP_TYPES) - 1
SHAPE = STEP_TYPES.shape


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def atoms(most=20.0, number=N):
    scaled = np.linspace(-np.log1p(most), np.log1p(most), number)
    return np.sign(scaled) * np.expm1(np.abs(scaled))


def divided(x, atoms):
    """The probabilities of two atoms, by a search for the interval of each number."""
    x = np.clip(np.asarray(x, np.float64), atoms[0], atoms[-1])
    low = np.clip(np.searchsorted(atoms, x, side="right") - 1, 0, len(atoms) - 2)
    share = (x - atoms[low]) / (atoms[low + 1] - atoms[low])
    rows = np.arange(len(atoms))
    return (rows == low[..., None]) * (1 - share)[..., None] + (rows == low[..., None] + 1) * share[
        ..., None
    ]


def divergence(probs, logits):
    """Of distributions over the last axis."""
    others = softmax(np.asarray(logits, np.float64))
    terms = np.where(probs > 0, probs * np.log(np.where(probs > 0, probs, 1) / others), 0)
    return terms.sum(-1)


def mixed(logits, share=0.01):
    return (1 - share) * softmax(np.asarray(logits, np.float64)) + share / logits.shape[-1]


def mean(logits):
    return softmax(np.asarray(logits, np.float64)) @ atoms()


def random_states(seed, leading):
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, K, (*leading, S))
    recurrent = rng.normal(size=(*leading, D)).astype(np.float32)
    return States(recurrent, np.eye(K, dtype=np.float32)[classes])


def features(states):
    flat = states.categories.reshape(*states.categories.shape[:-2], -1)
    return np.concatenate([states.recurrent, flat], axis=-1)


def test_numbers_are_divided_between_two_atoms_of_their_own_scale():
    # Of 5 atoms to 3 in symlog: -3, -1, 0, 1, 3. So 2 is in the middle of the last two.
    found = SymexpAtoms(3.0).probs(jnp.array([1.0, 2.0, -1.5, 50.0]), jnp.zeros((4, 5)))
    wanted = [[0, 0, 0, 1, 0], [0, 0, 0, 0.5, 0.5], [0.25, 0.75, 0, 0, 0], [0, 0, 0, 0, 1]]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    numbers = np.random.default_rng(0).normal(size=(40,)) * 12
    found = two_hot(numbers, jnp.asarray(atoms(), jnp.float32))
    np.testing.assert_allclose(found, divided(numbers, atoms()), atol=1e-5)
    logits = jnp.log(jnp.maximum(found, 1e-30))
    inside = np.clip(numbers, -20, 20)
    np.testing.assert_allclose(SymexpAtoms(20.0).mean(logits), inside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [63, 64])
def test_equal_logits_mean_exactly_0_whatever_the_range(number):
    assert float(SymexpAtoms(4.85e8).mean(jnp.full(number, 0.3))) == 0.0


def test_categories_have_a_share_of_the_uniform_distribution_and_gradients_of_probabilities():
    agent, rng = make(unimix=0.2), np.random.default_rng(0)
    logits = rng.normal(size=(6, S, K)).astype(np.float32) * 3
    weights = rng.normal(size=logits.shape)
    key = jax.random.PRNGKey(0)

    def weighted(logits):
        return (weights * agent.drawn(key, logits)).sum()

    drawn = np.asarray(agent.drawn(key, logits))
    assert set(np.unique(drawn)) == {0.0, 1.0}
    np.testing.assert_array_equal(drawn.sum(-1), np.ones((6, S)))
    probs = softmax(logits.astype(np.float64))
    wanted = 0.8 * probs * (weights - (weights * probs).sum(-1, keepdims=True))
    np.testing.assert_allclose(quick_jit(jax.grad(weighted))(logits), wanted, atol=1e-4)
    many = agent.drawn(key, jnp.broadcast_to(logits[0, 0], (4_000, 1, K)))
    np.testing.assert_allclose(many.mean(0)[0], mixed(logits[0, 0], 0.2), atol=0.03)
    likely = np.asarray(agent.drawn(None, logits)).argmax(-1)
    np.testing.assert_array_equal(likely, logits.argmax(-1))


def test_the_losses_of_the_model_are_those_of_numpy_and_each_divergence_moves_one_side():
    agent = make(prior_cost=0.7, posterior_cost=0.3, discount=0.9)
    params, states = some_params(agent).model, random_states(0, SHAPE)
    posterior = np.random.default_rng(1).normal(size=(*SHAPE, S, K)).astype(np.float32)
    timestep = random_timesteps(VECTOR, STEP_TYPES)

    @quick_jit
    def losses_and_slopes(params, posterior):
        def loss(params, posterior, name=None):
            found = agent.model_losses(params, states, posterior, timestep)
            return found if name is None else found[name].sum()

        slope = jax.grad(loss, argnums=(0, 1))
        slopes = [slope(params, posterior, name) for name in ("prior", "posterior")]
        return loss(params, posterior), slopes

    found, ((of_prior, none), (of_params, of_posterior)) = losses_and_slopes(params, posterior)
    seen = mixed(posterior)
    expected = mixed((states.recurrent @ params["r"]).reshape(*SHAPE, S, K))
    kl = (seen * np.log(seen / expected)).sum((-1, -2))
    above = kl > 1
    assert 0 < above.sum() < above.size
    x = features(states)
    decoded = ((x @ params["d"] - timestep.observation) ** 2).sum(-1)
    reward = divergence(divided(timestep.reward, atoms()), x @ params["reward"])
    chance, wanted = 1 / (1 + np.exp(-x @ params["continues"])), 0.9 * timestep.discount
    goes_on = -wanted * np.log(chance) - (1 - wanted) * np.log(1 - chance)
    kl = np.maximum(kl, 1)  # the free nats
    parts = {"prior": 0.7 * kl, "posterior": 0.3 * kl, "reconstruction": decoded}
    parts |= {"reward": reward, "continue": goes_on}
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        np.testing.assert_allclose(found[name], part, rtol=1e-3, atol=1e-4, err_msg=name)
    assert np.any(of_prior["r"])
    assert not np.any(none)
    assert not np.any(of_params["r"])
    np.testing.assert_array_equal(np.any(of_posterior, axis=(-1, -2)), above)


def some_imagined(rows=7, horizon=3, seed=0):
    rng = np.random.default_rng(seed)
    states = random_states(seed, (horizon + 1, rows))
    return Imagined(
        features(states),
        rng.integers(0, A, (horizon, rows)).astype(np.int32),
        rng.normal(size=(horizon + 1, rows)).astype(np.float32) * 3,
        rng.uniform(0.5, 1, (horizon + 1, rows)).astype(np.float32),
    )


def slow_returns(imagined, values, share):
    """Returns the lambda returns of imagined steps, computed backwards in a loop."""
    found, following = [], values[-1]
    for t in reversed(range(len(values) - 1)):
        later = (1 - share) * values[t + 1] + share * following
        following = imagined.reward[t + 1] + imagined.discount[t + 1] * later
        found.insert(0, following)
    return np.array(found)


def test_imagined_returns_and_their_range_are_those_of_numpy():
    agent = make(return_lambda=0.8, return_rate=0.25)
    imagined = some_imagined(rows=30)
    logits = imagined.features @ some_params(agent).critic["w"]
    before = np.array([-0.5, 2.0], np.float32)
    found, moved = quick_jit(agent.imagined_returns)(logits, imagined, before)
    wanted = slow_returns(imagined, mean(logits), 0.8)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
    percentiles = np.percentile(wanted, [5, 95])
    np.testing.assert_allclose(moved, 0.75 * before + 0.25 * percentiles, rtol=1e-3)


def test_the_losses_of_policy_and_critic_are_those_of_numpy():
    agent = make(entropy_cost=0.1, slow_value_cost=0.5)
    params, slow = some_params(agent), some_params(agent, seed=2).critic
    imagined = some_imagined()
    logits = imagined.features @ params.critic["w"]
    wanted = slow_returns(imagined, mean(logits), 0.95).astype(np.float32)
    losses = quick_jit(agent.behaviour_losses)
    weights, x = np.cumprod(imagined.discount, axis=0)[:-1], imagined.features[:-1]
    policy = mixed(x @ params.policy["w"])
    log_prob = np.log(np.take_along_axis(policy, imagined.action[..., None], -1))[..., 0]
    entropy = -(policy * np.log(policy)).sum(-1)
    of_values = divergence(divided(wanted, atoms()), logits[:-1])
    of_slow = divergence(divided(mean(x @ slow["w"]), atoms()), logits[:-1])
    for low, high in ((-3.0, 2.0), (0.1, 0.6)):  # a range above the least one, and one below
        ends = jnp.array([low, high])
        found = losses(params.policy, slow, logits, imagined, wanted, ends)
        advantage = (wanted - mean(logits)[:-1]) / max(high - low, 1)
        of_policy = weights * (-log_prob * advantage - 0.1 * entropy)
        expected = of_policy, weights * (of_values + 0.5 * of_slow), entropy
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)


def test_only_the_policys_params_learn_from_the_policys_loss_and_returns_are_fixed():
    agent = make(entropy_cost=0.0)
    params, imagined = some_params(agent), some_imagined()

    def loss(params):
        logits = agent.model.critic.apply(params.critic, imagined.features)
        wanted, moved = agent.imagined_returns(logits, imagined, jnp.zeros(2))
        rest = params.critic, logits, imagined, wanted, moved
        return agent.behaviour_losses(params.policy, *rest)[0].sum()

    grads = quick_jit(jax.grad(loss))(params)
    assert np.any(grads.policy["w"])
    assert not np.any(grads.critic["w"])
    # The gradient of log probabilities times fixed advantages.
    logits = imagined.features @ params.critic["w"]
    wanted = slow_returns(imagined, mean(logits), 0.95)
    x, weights = imagined.features[:-1], np.cumprod(imagined.discount, axis=0)[:-1]
    probs = softmax((x @ params.policy["w"]).astype(np.float64))
    policy = 0.99 * probs + 0.01 / A
    taken = np.eye(A)[imagined.action]
    ratio = (0.99 * probs * taken / policy).sum(-1, keepdims=True)
    slope = -(weights * (wanted - mean(logits)[:-1]))[..., None] * ratio * (taken - probs)
    np.testing.assert_allclose(
        grads.policy["w"], np.einsum("hnf,hna->fa", x, slope), rtol=5e-3, atol=5e-3
    )


def test_the_critics_loss_in_replay_is_that_of_numpy():
    agent = make(discount=0.9, return_lambda=0.7)
    params, slow = some_params(agent), some_params(agent, seed=2).critic
    rng, x = np.random.default_rng(3), features(random_states(3, SHAPE))
    discount = np.where(STEP_TYPES == LAST, rng.integers(0, 2, SHAPE), 1).astype(np.float32)
    timestep = random_timesteps(VECTOR, STEP_TYPES, 4, discount)
    bootstrap = rng.normal(size=SHAPE).astype(np.float32) * 4
    found = quick_jit(agent.replay_value_loss)(params.critic, slow, x, timestep, bootstrap)
    wanted = np.zeros((T, SHAPE[1]))
    for column in range(SHAPE[1]):
        for t in range(T):
            if STEP_TYPES[t + 1, column] == FIRST:
                continue  # no transition
            total, factor = 0.0, 1.0
            for k in range(t + 1, T + 1):
                total += factor * timestep.reward[k, column]
                factor *= 0.9 * discount[k, column]
                ends = k == T or STEP_TYPES[k, column] == LAST
                total += factor * (1.0 if ends else 0.3) * bootstrap[k, column]
                factor *= 0.7
                if ends:
                    break
            logits = x[t, column] @ params.critic["w"]
            slow_value = mean(x[t, column] @ slow["w"])
            for target in (total, slow_value):
                wanted[t, column] += divergence(divided(target, atoms()), logits)
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


def some_batch(agent, step_types=STEP_TYPES, seed=0, weights=None):
    """A batch as replay gives it, with states before the first steps."""
    rng, rows = np.random.default_rng(seed), step_types.shape[1]
    timestep = random_timesteps(VECTOR, step_types, seed)
    action = rng.integers(0, A, step_types.shape).astype(np.int32)
    state = agent.initial_state(rows)
    kept = state.latent._replace(
        recurrent=rng.normal(size=(*step_types.shape, D)).astype(np.float32),
        classes=rng.integers(0, K, (*step_types.shape, S)).astype(np.int32),
    )
    once = jax.tree.map(lambda x: np.asarray(x)[None], state)
    once = once._replace(
        latent=jax.tree.map(lambda x: x[:1] * 0, kept),
        action=np.eye(A, dtype=np.float32)[action[-1:]],
    )
    output = DreamerOutput(action, kept)
    weights = np.ones(rows, np.float32) if weights is None else np.array(weights, np.float32)
    return Batch(Transition(timestep, output, once, np.zeros(step_types.shape, np.int32)), weights)


@pytest.mark.slow
@pytest.mark.chosen
def test_an_update_takes_the_weighted_mean_over_items_of_the_losses():
    agent = make(replay_value_cost=0.4, target_rate=0.25)
    params = jax.tree.map(jnp.asarray, some_params(agent))
    state = agent.initial_learner_state(jax.random.PRNGKey(2), params)
    learn = quick_jit(agent.learner_step)
    batch = some_batch(agent)
    moved, after, output = learn(params, state, batch)
    logs = {name: float(x) for name, x in output.logs.items()}
    model = "prior", "posterior", "reconstruction", "reward", "continue"
    of_model = sum(logs[f"{name}_loss"] for name in model)
    rest = logs["policy_loss"] + logs["value_loss"] + 0.4 * logs["replay_value_loss"]
    assert logs["loss"] == pytest.approx(of_model + rest, rel=1e-4)
    assert float(output.priorities.mean()) == pytest.approx(of_model, rel=1e-4)

    def loss(weights):
        return float(learn(params, state, batch._replace(weights=weights))[2].logs["loss"])

    single = np.array([loss(row) for row in 4 * np.eye(4, dtype=np.float32)])
    weights = np.array([0.5, 1.0, 1.5, 3.0], np.float32)
    assert loss(weights) == pytest.approx(np.mean(single * weights), rel=1e-4)

    wanted = 0.75 * params.critic["w"] + 0.25 * moved.critic["w"]
    np.testing.assert_allclose(after.slow_critic["w"], wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after.return_range, [logs["return_low"], logs["return_high"]])
    stored, found = batch.trajectory.agent_output.before, output.updates.before
    np.testing.assert_array_equal(found.recurrent[0], stored.recurrent[0])
    assert not np.isclose(found.recurrent[1:], stored.recurrent[1:]).any()
    assert found.classes.shape == stored.classes.shape
    assert output.updates.action is None


def test_the_critic_teaches_the_model_in_replay_only():
    agent = make(horizon=1)
    params, states = some_params(agent), random_states(0, (3,))

    def imagined(params, recurrent):
        found = agent.imagined(jax.random.PRNGKey(0), params, states._replace(recurrent=recurrent))
        return found.features.sum() + found.reward.sum() + found.discount.sum()

    grads = quick_jit(jax.grad(imagined, argnums=(0, 1)))(params, states.recurrent)
    assert not any(np.any(x) for x in jax.tree.leaves(grads))

    def in_replay(x):
        timestep = random_timesteps(VECTOR, STEP_TYPES)
        critic, zeros = params.critic, np.zeros(SHAPE, np.float32)
        return agent.replay_value_loss(critic, critic, x, timestep, zeros).sum()

    grads = np.asarray(quick_jit(jax.grad(in_replay))(features(random_states(3, SHAPE))))
    taught = np.any(grads[:-1], axis=-1)
    np.testing.assert_array_equal(taught, STEP_TYPES[1:] != FIRST)
    assert not np.any(grads[-1])


def test_an_episode_in_a_sequence_is_that_alone():
    agent = make(sharp=1e4, unimix=0.0)  # its categories are always the same
    params, observed = some_params(agent).model, quick_jit(agent.observed)
    trajectory = some_batch(agent).trajectory
    states, logits, before = observed(jax.random.PRNGKey(0), params, trajectory)
    for column in (1, 2):
        starts = [t for t in range(T + 1) if t == 0 or STEP_TYPES[t, column] == FIRST]
        for start, end in zip(starts, [*starts[1:], T + 1], strict=True):
            alone = jax.tree.map(
                lambda x, s=start, e=end, c=column: x[s:e, c : c + 1],
                trajectory._replace(agent_state=()),
            )
            state = jax.tree.map(lambda x, c=column: x[:, c : c + 1], trajectory.agent_state)
            found = observed(jax.random.PRNGKey(1), params, alone._replace(agent_state=state))
            wanted = jax.tree.map(
                lambda x, s=start, e=end, c=column: x[s:e, c : c + 1], (states, logits)
            )
            assert_close(found[:2], wanted, atol=1e-3, rtol=1e-4)
    assert np.array_equal(before.recurrent[0], trajectory.agent_output.before.recurrent[0])
    np.testing.assert_array_equal(before.recurrent[1:], states.recurrent[:-1])


def test_a_sequence_begins_with_what_was_written_back_or_with_what_acting_had():
    found = {}
    for write_back in (True, False):
        agent = make(sharp=1e4, unimix=0.0, write_back=write_back)
        params, trajectory = some_params(agent).model, some_batch(agent).trajectory
        observed, key = quick_jit(agent.observed), jax.random.PRNGKey(0)
        found[write_back] = observed(key, params, trajectory)
        every = jax.tree.map(
            lambda x: np.concatenate([x, *[x * 0 + 1] * T]), trajectory.agent_state
        )
        again = observed(key, params, trajectory._replace(agent_state=every))
        assert_close(found[write_back], again)  # only the first state is read
    before = {name: np.asarray(x[2].recurrent[0]) for name, x in found.items()}
    stored = trajectory.agent_output.before
    np.testing.assert_array_equal(before[True], stored.recurrent[0])
    np.testing.assert_array_equal(before[False], trajectory.agent_state.latent.recurrent[0])
    assert not np.isclose(*before.values()).any()


def test_learning_follows_the_states_that_acting_had():
    agent = make(sharp=1e4, unimix=0.0)
    params, act = some_params(agent), quick_jit(agent.actor_step)
    timesteps = random_timesteps(VECTOR, STEP_TYPES)
    state, outputs = agent.initial_state(SHAPE[1]), []
    first_state = jax.tree.map(lambda x: x[None], state)
    for t in range(T + 1):
        timestep = jax.tree.map(lambda x, t=t: x[t], timesteps)
        state = agent.reset_state(state, timestep.first())
        output, state = act(jax.random.PRNGKey(t), params, timestep, state)
        outputs.append(output)
    outputs = jax.tree.map(lambda *x: np.stack(x), *outputs)
    trajectory = Transition(timesteps, outputs, first_state, np.zeros(SHAPE, np.int32))
    found = quick_jit(agent.observed)(jax.random.PRNGKey(0), params.model, trajectory)[2]
    inside = STEP_TYPES != FIRST
    acted = outputs.before.recurrent[inside]
    np.testing.assert_allclose(found.recurrent[inside], acted, rtol=1e-3, atol=1e-3)
    classes = np.where(found.categories.any(-1), found.categories.argmax(-1), -1)
    np.testing.assert_array_equal(classes[inside], outputs.before.classes[inside])


def test_acting_forgets_the_state_and_the_action_at_a_first_step():
    agent = make(Greedy)
    params, rng = some_params(agent), np.random.default_rng(0)
    state = agent.initial_state(2)
    full = state._replace(
        latent=state.latent._replace(
            recurrent=rng.normal(size=(2, D)).astype(np.float32),
            classes=rng.integers(0, K, (2, S)).astype(np.int32),
        ),
        action=np.eye(A, dtype=np.float32)[1:3],
    )
    timestep = random_timesteps(VECTOR, np.array([FIRST, MID]))
    act = quick_jit(agent.actor_step)
    ours, after = act(jax.random.PRNGKey(0), params, timestep, full)
    _, fresh = act(jax.random.PRNGKey(1), params, timestep, state)
    np.testing.assert_array_equal(after.latent.recurrent[0], fresh.latent.recurrent[0])
    inside = timestep._replace(step_type=np.array([MID, MID], np.int32))
    _, exported = act(jax.random.PRNGKey(1), params, inside, state)  # exports see no FIRST
    np.testing.assert_array_equal(exported.latent.recurrent[0], fresh.latent.recurrent[0])
    assert not np.array_equal(after.latent.recurrent[1], fresh.latent.recurrent[1])
    np.testing.assert_array_equal(after.counts.env_steps, [1, 1])
    reset = agent.reset_state(after, np.array([True, False]))
    np.testing.assert_array_equal(reset.latent.classes[0], [-1] * S)
    np.testing.assert_array_equal(reset.latent.classes[1], after.latent.classes[1])
    np.testing.assert_array_equal(reset.counts.env_steps, after.counts.env_steps)
    np.testing.assert_array_equal(ours.before.recurrent, full.latent.recurrent)


def test_imagination_follows_the_prior_with_the_policys_actions():
    agent = make(sharp=1e4, unimix=0.0, horizon=4)
    params = some_params(agent)
    states = random_states(5, (6,))
    found = quick_jit(agent.imagined)(jax.random.PRNGKey(0), params, states)
    recurrent, categories = states
    for t in range(5):
        x = features(States(recurrent, categories))
        np.testing.assert_allclose(found.features[t], x, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(found.reward[t], mean(x @ params.model["reward"]), atol=1e-2)
        logit = x @ params.model["continues"]
        np.testing.assert_allclose(found.discount[t], 1 / (1 + np.exp(-logit)), atol=1e-4)
        if t == 4:
            break
        model, action = params.model, np.eye(A)[found.action[t]]
        flat = categories.reshape(6, -1)
        recurrent = np.tanh(recurrent @ model["w"] + flat @ model["c"] + action @ model["b"])
        classes = (recurrent @ model["r"]).reshape(6, S, K).argmax(-1)
        categories = np.eye(K)[classes]
    assert len(np.unique(found.action)) > 1


def test_continuous_actions_have_a_bounded_normal_distribution():
    agent = make(spec=UNEVEN)
    raw = np.random.default_rng(0).normal(size=(5, A)).astype(np.float32)
    policy = agent.policy_of({"w": np.eye(A, dtype=np.float32)}, raw)
    np.testing.assert_allclose(policy.mean, np.tanh(raw[:, :2]), atol=1e-5)
    std = 0.1 + 0.9 / (1 + np.exp(-(raw[:, 2:] + 2)))
    np.testing.assert_allclose(np.exp(policy.log_std), std, rtol=1e-4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ActionKindError, match="Dreamer: the action must be one float array"):
        make(spec=VECTOR)
    for field, value in (
        *(("horizon", 0), ("discount", 1.5), ("min_std", 2.0), ("max_value", 0.0)),
        *(("least_range", 0.0), ("free_nats", -1.0)),
    ):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(CFG, **{field: value})
    with pytest.raises(ValueError, match="recurrent must be a multiple of blocks; got 9 and 4"):
        WorldModelConfig("tiny", recurrent=9)
    with pytest.raises(ValueError, match="classes must be at least 2"):
        WorldModelConfig("tiny", classes=1)
    for field, value in (("core", "lstm"), ("norm", "batch"), ("hidden_sizes", (16,))):
        with pytest.raises(ValueError, match=field):
            world_model(VECTOR, ONE_OF_4, NetworkConfig(**{field: value}))


def test_sizes_follow_from_one_word_and_explicit_ones_replace_them():
    found = WorldModelConfig("12m").sizes()
    assert found == (2048, 256, 32, 16, 256, 3, 16, 8)
    assert WorldModelConfig("200m", blocks=1).sizes() == (8192, 1024, 32, 64, 1024, 3, 64, 1)
    assert WorldModelConfig("1m", units=96, layers=2).sizes()[:6] == (512, 64, 32, 4, 96, 2)


def tiny(topology, frames=10**6, **changes):
    """CartPole with a tiny model, for a few updates."""
    experiment = preset("cartpole-dreamer")
    agent = dataclasses.replace(experiment.agent, model=SIZES, horizon=3)
    return running.small(
        dataclasses.replace(experiment, agent=agent, network=SMALL),
        topology,
        frames,
        env={"type": "jax"} if topology == "fused" else {},
        replay={"batch_size": 8, "unroll_length": 8, "min_size": 40, "samples_per_insert": 1.0},
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
def test_a_resumed_run_in_one_process_equals_an_uninterrupted_one(tmp_path):
    loops = unbroken, broken, resumed = [SingleProcessRun(tiny("single_process")) for _ in range(3)]

    def steps(loop):
        for _ in range(40):
            loop.player.actor.step()
            while loop.player.replay.can_sample():
                loop.learner.step(loop.player.replay.sample())

    try:
        steps(unbroken)
        unbroken.restart_environments()
        steps(unbroken)
        steps(broken)
        path = checkpoint.save(tmp_path, broken.env_frames, broken.save(), {})
        resumed.load(checkpoint.restore(path, resumed.template()))
        steps(resumed)
        assert unbroken.learner.version == resumed.learner.version > 5
        found, wanted = (jax.tree.leaves(loop.learner.save()) for loop in (resumed, unbroken))
        assert running.same(found, wanted)
    finally:
        for loop in loops:
            loop.close()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(180)
@pytest.mark.parametrize("topology", ["single_process", *running.TOPOLOGIES])
def test_it_runs_in_every_topology(topology, tmp_path):
    result = running.run(tiny(topology, updates=10), tmp_path / "run")
    assert result.learner_steps >= 10
    assert all(np.isfinite(x).all() for x in running.params(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_learns_to_catch_on_pixels(tmp_path):
    result = train.run(preset("catch-dreamer"), tmp_path / "run", stream=io.StringIO())
    assert result.eval_return_mean > 0.8


def test_without_writing_back_steps_hold_actions_alone():
    """So it learns from recorded ones."""
    agent = case("dreamer-stored").agent
    assert transition_spec(agent, EnvSpec(VECTOR, UNEVEN)).agent_output._fields == ("action",)
