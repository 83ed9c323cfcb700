"""R2D2: losses by hand and in plain Python, burn-in, stored state, priorities, exploration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.acting.actor import Actor
from rlstack.acting.inferencer import Inferencer
from rlstack.agents import AGENTS
from rlstack.agents.r2d2 import R2D2, R2D2Config, R2D2Output, R2D2State
from rlstack.configs.acting import InferencerConfig
from rlstack.envs import SyncEnv
from rlstack.exploration import EpsilonGreedy, Greedy, initial_counts
from rlstack.networks import Network, NetworkConfig, q_network
from rlstack.optimizers import OptimizerConfig
from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import (
    FAST,
    FIRST,
    GRU,
    GTRXL,
    LAST,
    LSTM,
    MASKED,
    MID,
    ONE_OF_4,
    S5,
    VECTOR,
    Setting,
    assert_close,
    case,
    quick_jit,
)

R2D2_SMALL = R2D2Config(optimizer=FAST, discount=0.9, burn_in=2, n_step=2)
UNSCALED = dataclasses.replace(R2D2_SMALL, rescale_values=False, target_rate=0.01)
SETTINGS = {
    "r2d2": Setting(R2D2_SMALL, VECTOR, ONE_OF_4, LSTM),
    "r2d2-s5": Setting(R2D2_SMALL, VECTOR, ONE_OF_4, S5),
    "r2d2-gtrxl": Setting(R2D2_SMALL, VECTOR, ONE_OF_4, GTRXL),
    "r2d2-masked": Setting(UNSCALED, MASKED, ONE_OF_4, dataclasses.replace(GRU, duelling=True)),
}

DISCOUNT, ETA = 0.9, 0.7
SGD = OptimizerConfig(name="sgd", learning_rate=0.5)


def linear_network():
    """h = x w + u h, values = h v: recurrent, and simple to repeat in plain Python."""

    def apply(key, params, timestep, state):
        kept = jnp.where(timestep.first()[:, None], 0, state)
        state = timestep.observation @ params["w"] + params["u"] * kept
        return state @ params["v"], state

    def unroll(key, params, timestep, state):
        outputs = []
        for t in range(len(timestep.step_type)):
            now = jax.tree.map(lambda x, t=t: x[t], timestep)
            output, state = apply(key, params, now, state)
            outputs.append(output)
        return jnp.stack(outputs), state

    return Network(random_params, apply, unroll, lambda batch_size: jnp.zeros((batch_size, 2)))


def random_params(key):
    keys = jax.random.split(key, 2)
    shapes = {"w": (3, 2), "v": (2, 4)}
    drawn = {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=True)}
    return drawn | {"u": jnp.float32(0.8)}


ONLINE, TARGET = (jax.tree.map(np.asarray, random_params(jax.random.PRNGKey(i))) for i in (1, 2))


def make(policy=Greedy, **config):
    plain = {"discount": DISCOUNT, "priority_max_share": ETA, "optimizer": SGD}
    cfg = R2D2Config(**{**plain, "burn_in": 2, "n_step": 2, "max_grad_norm": 0.0, **config})
    return R2D2(cfg, VECTOR, ONE_OF_4, lambda *_: linear_network(), policy)


def make_batch(step_types, weights=None, seed=0):
    """One item per column; `step_types` is [B][T+1]. Ends in odd columns are truncations."""
    rng = np.random.default_rng(seed)
    step_type = np.array(step_types, np.int32).T
    shape = step_type.shape
    ends = np.where(step_type == LAST, np.arange(shape[1]) % 2, 1).astype(np.float32)
    reward = np.where(step_type == FIRST, 0, 3 * rng.normal(size=shape)).astype(np.float32)
    observation = rng.normal(size=(*shape, 3)).astype(np.float32)
    timestep = TimeStep(step_type, reward, ends, observation)
    counts = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), shape), initial_counts(shape[1]))
    state = R2D2State(counts, rng.normal(size=(*shape, 2)).astype(np.float32))
    action = R2D2Output(rng.integers(0, 4, shape).astype(np.int32))
    weights = np.ones(shape[1], np.float32) if weights is None else np.array(weights, np.float32)
    return Batch(Transition(timestep, action, state, np.zeros_like(step_type)), weights)


STEP_TYPES = [
    [MID, MID, MID, MID, MID, MID, MID],  # no boundary
    [MID, MID, MID, LAST, FIRST, MID, MID],  # a truncation inside
    [MID, LAST, FIRST, MID, MID, MID, LAST],  # an end in the burn-in, a termination at the end
    [FIRST, MID, MID, MID, LAST, FIRST, LAST],  # truncations inside and at the end
    [MID, MID, LAST, FIRST, MID, LAST, FIRST],  # a termination where learning starts
]


def h(x, eps=1e-3):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + eps * x


def inverse_h(x, eps=1e-3):
    root = np.sqrt(1 + 4 * eps * (abs(x) + 1 + eps))
    return np.sign(x) * (((root - 1) / (2 * eps)) ** 2 - 1)


def slow_values(params, batch, column, fixed=0):
    """Values of every step of one item, from the stored state of its first step.

    In the first ``fixed`` steps the online network brings the state up to date.
    """
    timestep, state = batch.trajectory.timestep, batch.trajectory.agent_state.core[0, column]
    values, chosen = [], params
    for t in range(len(timestep.step_type)):
        params = ONLINE if t < fixed else chosen
        if timestep.step_type[t, column] == FIRST:
            state = np.zeros(2)
        state = np.float64(timestep.observation[t, column]) @ params["w"] + params["u"] * state
        values.append(state @ params["v"])
    return values


def slow_td_errors(batch, column, burn_in, n, rescaled):
    """TD errors of one item's transitions after the burn-in; None where there is no transition."""
    online, target = (slow_values(p, batch, column) for p in (ONLINE, TARGET))
    trajectory = jax.tree.map(lambda x: x[:, column], batch.trajectory)
    steps, length = trajectory.timestep, len(online) - 1
    errors = []
    for t in range(burn_in, length):
        if steps.step_type[t + 1] == FIRST:
            errors.append(None)
            continue
        total, worth, end = 0.0, 1.0, t
        while end < min(t + n, length) and (end == t or steps.step_type[end] != LAST):
            end += 1
            total += worth * steps.reward[end]
            worth *= DISCOUNT * steps.discount[end]
        value = target[end][np.argmax(online[end])]
        total += worth * (inverse_h(value) if rescaled else value)
        chosen = online[t][trajectory.agent_output.action[t]]
        errors.append((h(total) if rescaled else total) - chosen)
    return errors


@pytest.mark.parametrize("rescaled", [True, False])
@pytest.mark.parametrize(("burn_in", "n"), [(2, 2), (0, 3), (3, 1)])
def test_loss_and_priorities_are_those_of_plain_python(rescaled, burn_in, n):
    weights = [1, 0.5, 2, 0.1, 1]
    batch = make_batch(STEP_TYPES, weights)
    agent = make(burn_in=burn_in, n_step=n, rescale_values=rescaled)
    loss, (logs, priorities) = quick_jit(agent.loss)(ONLINE, TARGET, batch)
    total = 0.0
    for column, weight in enumerate(weights):
        found = slow_td_errors(batch, column, burn_in, n, rescaled)
        errors = np.array([e for e in found if e is not None])
        total += weight * (0.5 * errors**2).sum()
        expected = ETA * abs(errors).max() + (1 - ETA) * abs(errors).mean()
        np.testing.assert_allclose(priorities[column], expected, rtol=1e-4)
    # A sum over time, and a mean over the five sequences.
    np.testing.assert_allclose(loss, total / 5, rtol=1e-4)
    np.testing.assert_allclose(logs["loss"], total / 5, rtol=1e-4)
    np.testing.assert_allclose(logs["priority"], np.mean(priorities), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("burn_in", "length"), [(0, 6), (2, 6), (2, 3), (5, 6)])
def test_the_default_constants_are_those_of_a_sum_over_time(burn_in, length):
    """The first update of SEED RL's program: Adam with eps 1e-3, of gradients of norm up to 40."""
    defaults = R2D2Config(burn_in=burn_in, discount=DISCOUNT)
    agent = make(burn_in=burn_in, optimizer=defaults.optimizer, max_grad_norm=40.0)
    assert defaults.max_grad_norm == 40 and defaults.optimizer.learning_rate == 1e-4
    batch = make_batch([steps[: length + 1] for steps in STEP_TYPES])
    batch.trajectory.timestep.observation[:] *= 1e-3  # for gradients near eps
    batch.trajectory.agent_state.core[:] *= 1e-3
    params = jax.tree.map(jnp.asarray, ONLINE)
    state = agent.initial_learner_state(jax.random.PRNGKey(0), params)
    state = state._replace(target_params=jax.tree.map(jnp.asarray, TARGET))
    found, _, _ = quick_jit(agent.learner_step)(params, state, batch)

    items = [
        (column, slow_td_errors(batch, column, burn_in, 2, rescaled=True))
        for column in range(len(STEP_TYPES))
    ]
    old = [slow_values(ONLINE, batch, column) for column, _ in items]

    def loss(changed):
        """The sum over time, in the mean over items; targets and burn-in are those of ONLINE."""
        total = 0.0
        for column, errors in items:
            new = slow_values(changed, batch, column, fixed=burn_in)
            actions = batch.trajectory.agent_output.action[:, column]
            for t, error in enumerate(errors, burn_in):
                if error is not None:
                    moved = new[t][actions[t]] - old[column][t][actions[t]]
                    total += 0.5 * (error - moved) ** 2
        return total / len(items)

    def slope(name, index):
        change = np.zeros(np.shape(ONLINE[name]))
        change[index] = 1e-3
        up, down = (loss({**ONLINE, name: ONLINE[name] + sign * change}) for sign in (1, -1))
        return (up - down) / 2e-3

    grads = {
        name: np.reshape([slope(name, i) for i in np.ndindex(np.shape(x))], np.shape(x))
        for name, x in ONLINE.items()
    }
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    for name, grad in grads.items():
        grad = grad * min(1, 40 / norm)
        step = np.asarray(found[name], np.float64) - ONLINE[name]
        np.testing.assert_allclose(step, -1e-4 * grad / (abs(grad) + 1e-3), rtol=0.01, atol=3e-7)


def test_targets_worked_by_hand():
    agent = make(n_step=2, discount=0.5, rescale_values=True, rescaling_eps=1.0)
    # Two actions, four steps; the online network prefers action 0, then 1, 1, 0.
    values = np.array([[2, 1], [0, 3], [1, 4], [5, 0]], np.float32)[:, None]
    # With eps 1, h(3) = 1 + 3 = 4 and h(8) = 2 + 8 = 10, so the target's values are 3 and 8.
    target_values = np.array([[0, 0], [0, 0], [7, 4], [10, 7]], np.float32)[:, None]
    reward = np.array([9, 1, -1, 4], np.float32)[:, None]
    step = TimeStep(np.full((4, 1), MID), reward, np.ones((4, 1)), np.zeros((4, 1, 3)))
    targets = agent.targets(values, target_values, step)[:, 0]
    # 1 - 1/2 + 3/4 = 5/4; -1 + 4/2 + 8/4 = 3; the last: 4 + 8/2 = 8.
    np.testing.assert_allclose(targets, [0.5 + 1.25, 4.0, 10.0], rtol=1e-6)


def test_priorities_worked_by_hand():
    td_error = np.array([[1, 0], [-4, 0], [0, 0], [1, 0]], np.float32)
    valid = np.array([[True, False], [True, False], [False, False], [True, False]])
    # Of column 0: 0.7 * 4 + 0.3 * (1 + 4 + 1) / 3; column 1 holds no transition.
    np.testing.assert_allclose(make().priorities(td_error, valid), [3.4, 0.0], rtol=1e-6)


@pytest.mark.launchpad
@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("n", [1, 3])
def test_td_errors_are_those_of_rlax(n):
    rlax = pytest.importorskip("rlax")
    batch = make_batch([[MID] * 7] * 3)
    batch.trajectory.timestep.discount[4, 1] = 0.0
    agent = make(n_step=n, burn_in=1)
    learned = jax.tree.map(lambda x: x[1:], batch.trajectory)
    values, target_values = (agent.values(p, batch.trajectory) for p in (ONLINE, TARGET))
    expected = jax.vmap(
        functools.partial(
            rlax.transformed_n_step_q_learning, n=n, tx_pair=rlax.SIGNED_HYPERBOLIC_PAIR
        ),
        in_axes=1,
        out_axes=1,
    )(
        values[:-1],
        learned.agent_output.action[:-1],
        target_values[1:],
        jnp.argmax(values[1:], axis=-1),
        learned.timestep.reward[1:],
        learned.timestep.discount[1:] * DISCOUNT,
    )
    chosen = np.take_along_axis(
        np.asarray(values[:-1]), learned.agent_output.action[:-1, :, None], axis=-1
    )[..., 0]
    found = agent.targets(values, target_values, learned.timestep) - chosen
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def lstm_case():
    c = case("r2d2")  # an LSTM, burn_in 2, on five transitions
    target = c.init(jax.random.PRNGKey(9))
    return c, target


def test_no_gradient_passes_through_the_burn_in():
    c, target = lstm_case()

    def loss(observation, core):
        trajectory = c.batch.trajectory
        timestep = trajectory.timestep._replace(observation=observation)
        state = trajectory.agent_state._replace(core=core)
        trajectory = trajectory._replace(timestep=timestep, agent_state=state)
        return c.agent.loss(c.params, target, c.batch._replace(trajectory=trajectory))[0]

    observation = c.batch.trajectory.timestep.observation
    core = c.batch.trajectory.agent_state.core
    compiled = quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, (by_observation, by_core) = compiled(observation, core)
    assert np.all(by_observation[:2] == 0)
    assert all(np.all(x == 0) for x in jax.tree.leaves(by_core))
    assert np.all(np.abs(by_observation[2:5]).sum((1, 2)) > 0)
    # The burn-in still changes the value.
    assert compiled(observation + np.eye(6)[0][:, None, None], core)[0] != value
    assert compiled(observation, jax.tree.map(lambda x: x + 0.5, core))[0] != value


def test_the_gradient_is_that_of_a_sequence_that_begins_after_the_burn_in():
    """It equals learning without burn-in from the states that both networks reach after it."""
    c, target = lstm_case()
    trajectory = c.batch.trajectory
    grads, _ = quick_jit(jax.grad(c.agent.loss, has_aux=True))(c.params, target, c.batch)
    later = R2D2(dataclasses.replace(c.agent.cfg, burn_in=0), *c.agent._arguments[1:])
    before, after = (jax.tree.map(lambda x, s=s: x[s], trajectory) for s in (slice(2), slice(2, 6)))
    core = jax.tree.map(lambda x: x[0], trajectory.agent_state.core)

    def loss(params, online_core, target_core):
        values, _ = later.network.unroll(None, params, after.timestep, online_core)
        target_values, _ = later.network.unroll(None, target, after.timestep, target_core)
        targets = jax.lax.stop_gradient(later.targets(values, target_values, after.timestep))
        chosen = jnp.take_along_axis(values[:-1], after.agent_output.action[:-1, :, None], axis=-1)
        valid = after.timestep.step_type[1:] != FIRST
        return 0.5 * jnp.sum((targets - chosen[..., 0]) ** 2, where=valid) / valid.shape[1]

    cores = [c.agent.network.unroll(None, p, before.timestep, core)[1] for p in (c.params, target)]
    assert_close(grads, quick_jit(jax.grad(loss))(c.params, *cores), atol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_replayed_sequence_gives_the_actors_own_outputs():
    network = functools.partial(q_network, cfg=NetworkConfig(core="lstm", core_size=8))
    with SyncEnv("rlstack.envs.toy:MemoryCue", 4, seed=3) as env:
        agent = R2D2(R2D2Config(burn_in=0), *env.spec[:2], network, Greedy)
        params = agent.initial_params(jax.random.PRNGKey(0))
        acted = []

        class Source:
            def get_params(self, newer_than=-1):
                return (0, params) if newer_than < 0 else None

        class Spy(Inferencer):
            def inference(self, env_ids, timestep):
                answer = super().inference(env_ids, timestep)
                core = answer.agent_state.core
                acted.append(jax.jit(agent.network.apply)(None, params, timestep, core)[0])
                return answer

        replay = InProcessReplay(
            ReplayConfig(sampler="prioritized", batch_size=4, unroll_length=9, max_size=40),
            4,
            seed=0,
        )
        key = jax.random.PRNGKey(1)
        actor = Actor(env, Spy(InferencerConfig(), agent, Source(), 4, key), replay)
        for _ in range(24):
            actor.step()
        for _ in range(5):
            sample = replay.sample()
            trajectory = sample.batch.trajectory
            values = np.asarray(jax.jit(agent.values)(params, trajectory))
            starts, env_ids = np.divmod(sample.keys.astype(int), 4)
            assert (trajectory.timestep.step_type[1:] == FIRST).any()  # episodes begin in unrolls
            for column, (start, env_id) in enumerate(zip(starts, env_ids, strict=True)):
                own = np.stack([acted[start + t][env_id] for t in range(10)])
                # Equal bit for bit, except that XLA's newer CPU runtime may fuse a scan and a
                # single step differently; then the last bit may differ.
                exact = jax.__version__.startswith("0.5.")
                np.testing.assert_allclose(
                    values[:, column], own, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7
                )
            np.testing.assert_array_equal(values.argmax(-1), trajectory.agent_output.action)
    replay.close()


def test_a_weight_scales_its_items_gradient():
    gradient = quick_jit(jax.grad(make().loss, has_aux=True))

    def of(weights):
        return gradient(ONLINE, TARGET, make_batch(STEP_TYPES, weights))[0]

    one = of([1, 0, 0, 0, 0])
    assert_close(of([3, 0, 0, 0, 0]), jax.tree.map(lambda x: 3 * x, one))
    assert all(np.all(x == 0) for x in jax.tree.leaves(of([0] * 5)))
    assert all(np.any(x != 0) for x in jax.tree.leaves(one))


@pytest.mark.slow
@pytest.mark.chosen
def test_each_environment_has_a_chance_of_its_own_for_ever():
    cfg = R2D2Config(epsilon_base=0.5, epsilon_alpha=4.0)
    policy = AGENTS[R2D2Config].policy(cfg, 5)
    assert isinstance(policy, EpsilonGreedy)
    seen = []

    def spy():
        def act(key, distribution, counts):
            seen.append(np.asarray(policy.epsilon(counts)))
            return distribution.mode()

        return act

    agent = make(spy)
    params = jax.tree.map(jnp.asarray, ONLINE)
    state = agent.initial_state(5)
    for kind in ([FIRST] * 5, [MID, LAST, MID, MID, MID], [MID, FIRST, MID, MID, FIRST]):
        step_type = np.array(kind, np.int32)
        state = agent.reset_state(state, step_type == FIRST)
        # The core is reset; the environment's id stays.
        assert np.all(state.core[step_type == FIRST] == 0)
        assert np.all(state.core[step_type == MID] != 0)
        step = TimeStep(step_type, np.zeros(5), np.ones(5), np.ones((5, 3), np.float32))
        _, state = agent.actor_step(jax.random.PRNGKey(0), params, step, state)
    # 0.5 ** (1 + 4 i / 4)
    np.testing.assert_allclose(seen, [[0.5, 0.25, 0.125, 0.0625, 0.03125]] * 3, rtol=1e-6)
    assert state.counts.episodes.tolist() == [0, 1, 0, 0, 0]


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"recurrent.*lstm"):
        R2D2(R2D2Config(), VECTOR, ONE_OF_4, q_network, Greedy)
    batch = make_batch([[MID] * 3])
    with pytest.raises(ValueError, match=r"burn_in \(2\).*2 transitions"):
        make().loss(ONLINE, TARGET, batch)
    for field, value in (
        ("discount", 2.0),
        ("burn_in", -1),
        ("n_step", 0),
        ("rescaling_eps", 0.0),
        ("priority_max_share", 1.5),
        ("target_period", 0),
        ("target_rate", -1.0),
    ):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(R2D2Config(), **{field: value})
