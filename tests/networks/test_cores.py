"""Cores over whole sequences: minGRU, S5 and GTrXL against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.configs.network import CriticConfig
from rlstack.math.recurrences import in_parallel, linear_scan, step_by_step
from rlstack.networks import NetworkConfig, actor_critic, q_network, recurrent
from rlstack.networks.configured import core_of
from rlstack.networks.scanned import hippo
from rlstack.types import TimeStep
from tests.agent_cases import ONE_OF_4, VECTOR, assert_close, leaves_differ, quick_jit

KEY = jax.random.PRNGKey(0)
CORES = ("mingru", "s5", "gtrxl")
SIZE, FEATURES, MEMORY = 8, 6, 3


def core_network(kind, layers=2, size=SIZE, features=FEATURES, memory=MEMORY):
    """A network that is its core, and nothing else."""
    own = {"core_memory": memory, "core_heads": 2} if kind == "gtrxl" else {}
    cfg = NetworkConfig(core=kind, core_size=size, core_layers=layers, **own)
    spec = specs.Array((features,), np.float32)
    return recurrent(lambda x: x, functools.partial(core_of, cfg), lambda x, _: x, spec)


def random_params(network, seed=1):
    """Params of which none is 0 or 1, so that each counts."""
    params = quick_jit(network.init)(KEY)
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    moved = [np.asarray(x + rng.normal(scale=0.3, size=x.shape), np.float32) for x in leaves]
    return jax.tree.unflatten(structure, moved)


def sequence(first, seed=0, features=FEATURES):
    """Random steps ``[T, B]``, of which some begin episodes."""
    first = np.asarray(first, bool)
    seen = np.random.default_rng(seed).normal(size=(*first.shape, features)).astype(np.float32)
    zeros = np.zeros(first.shape, np.float32)
    return TimeStep(np.where(first, 0, 1).astype(np.int32), zeros, zeros + 1, seen)


# T = 11; the rows begin episodes often, at the start and inside, at neighbouring steps, and never.
FIRST = np.zeros((11, 4), bool)
FIRST[[2, 5, 9], 0] = FIRST[[0, 8], 1] = FIRST[[3, 4, 5, 10], 2] = True


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(p, x):
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-5) * p["scale"] + p["offset"]


def dense(p, x):
    return x @ p["w"] + p.get("b", 0)


def mingru_layer(p, name, x, h):
    gates = dense(p[f"{name}/gates"], layer_norm(p[f"{name}/norm"], x))
    z, c = sigmoid(gates[:SIZE]), gates[SIZE:]
    h = (1 - z) * h + z * c
    return x + h, h


def s5_layer(p, name, x, h):
    own, u = p[name], layer_norm(p[f"{name}/norm"], x)
    rates = -np.exp(own["log_decay"]) + 1j * own["frequency"]
    decay = np.exp(rates * np.exp(own["log_step"]))
    entered = dense(p[f"{name}/enter"], u)
    half = SIZE // 2
    state = decay * (h[:half] + 1j * h[half:])
    state = state + (decay - 1) / rates * (entered[:half] + 1j * entered[half:])
    h = np.concatenate([state.real, state.imag])
    y = gelu(dense(p[f"{name}/leave"], h) + own["passed"] * u)
    return x + y * sigmoid(dense(p[f"{name}/gate"], y)), h


def scanned(layer, p, first, seen):
    """One row, step by step, from a state of zeros."""
    states, outputs = [np.zeros(SIZE)] * 2, []
    for is_first, x in zip(first, seen, strict=True):
        states = [np.zeros(SIZE)] * 2 if is_first else states
        x = dense(p["core/input"], x)
        for i in range(2):
            x, new = layer(p, f"core/layer_{i}", x, states[i])
            states = [new if j == i else old for j, old in enumerate(states)]
        outputs.append(x)
    return outputs, states


def gru_gate(p, name, x, y):
    of_y, of_x = np.split(y @ p[f"{name}/of_result"]["w"], 3), x @ p[f"{name}/of_input"]["w"]
    r, z = sigmoid(of_y[0] + of_x[:SIZE]), of_y[1] + of_x[SIZE:]
    z = sigmoid(z - p[name]["bias"])
    return (1 - z) * x + z * np.tanh(of_y[2] + (r * x) @ p[f"{name}/of_kept"]["w"])


def attended(p, name, inputs):
    """What the last of these layer inputs finds in them, all of one episode, head by head."""
    normed = [layer_norm(p[f"{name}/norm"], x) for x in inputs]
    found = []
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        query = (normed[-1] @ p[f"{name}/query"]["w"])[part]
        logits, values = [], []
        for distance, x in enumerate(reversed(normed)):
            rates = [10_000.0 ** (-2 * i / SIZE) for i in range(SIZE // 2)]
            place = [np.sin(distance * r) for r in rates] + [np.cos(distance * r) for r in rates]
            of_place = (np.array(place) @ p[f"{name}/position"]["w"])[part]
            key = (x @ p[f"{name}/key"]["w"])[part]
            logits.append(
                (query + p[name]["content_bias"][head]) @ key
                + (query + p[name]["position_bias"][head]) @ of_place
            )
            values.append((x @ p[f"{name}/value"]["w"])[part])
        weights = np.exp(np.array(logits) / 2)  # the root of 4, the size of a head
        found.append(np.array(values).T @ weights / weights.sum())
    return np.concatenate(found) @ p[f"{name}/result"]["w"]


def gtrxl(p, first, seen):
    histories, outputs = ([], []), []
    for is_first, x in zip(first, seen, strict=True):
        histories = ([], []) if is_first else histories
        x = dense(p["core/input"], x)
        for i, history in enumerate(histories):
            name = f"core/layer_{i}"
            history.append(x)
            y = np.maximum(attended(p, name, history[-MEMORY - 1 :]), 0)
            x = gru_gate(p, f"{name}/gate", x, y)
            y = dense(p[f"{name}/dense_in"], layer_norm(p[f"{name}/norm_2"], x))
            y = np.maximum(dense(p[f"{name}/dense_out"], np.maximum(y, 0)), 0)
            x = gru_gate(p, f"{name}/gate_2", x, y)
        outputs.append(x)
    kept = [np.array(history[-MEMORY:]) for history in histories]
    empty = np.zeros((MEMORY - len(kept[0]), SIZE))
    return outputs, (np.array([np.concatenate([empty, x]) for x in kept]), len(kept[0]))


LOOPS = {
    "mingru": functools.partial(scanned, mingru_layer),
    "s5": functools.partial(scanned, s5_layer),
    "gtrxl": gtrxl,
}


@pytest.mark.parametrize("kind", CORES)
def test_a_core_has_the_outputs_and_states_of_a_loop_in_numpy(kind):
    network = core_network(kind)
    params, timestep = random_params(network), sequence(FIRST)
    outputs, state = quick_jit(network.unroll)(None, params, timestep, network.initial_state(4))
    for row in range(4):
        wanted, last = LOOPS[kind](params, FIRST[:, row], timestep.observation[:, row])
        np.testing.assert_allclose(outputs[:, row], wanted, rtol=1e-4, atol=1e-5)
        found = jax.tree.leaves(jax.tree.map(lambda x, row=row: x[row], state))
        for ours, other in zip(found, last, strict=True):
            np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CORES)
def test_at_every_boundary_the_state_is_that_of_the_episode_played_alone(kind):
    network = core_network(kind)
    params, timestep = random_params(network), sequence(FIRST)
    unroll = jax.jit(network.unroll)
    for row, length in ((0, 11), (1, 11), (2, 5), (2, 11), (3, 11)):
        begins = np.flatnonzero(FIRST[:length, row])
        begin = begins[-1] if len(begins) else 0
        part = jax.tree.map(lambda x, r=row, n=length: x[:n, r : r + 1], timestep)
        alone = jax.tree.map(lambda x, b=begin: x[b:], part)
        alone = alone._replace(step_type=np.ones_like(alone.step_type))  # no reset at all
        together = unroll(None, params, part, network.initial_state(1))
        outputs, state = unroll(None, params, alone, network.initial_state(1))
        assert_close(together[1], state, rtol=1e-5, atol=1e-6)
        assert_close(together[0][begin:], outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", CORES)
def test_single_steps_and_parts_are_the_unroll_and_rows_are_independent(kind):
    network = core_network(kind)
    params, timestep = random_params(network), sequence(FIRST)
    apply, unroll = quick_jit(network.apply), jax.jit(network.unroll)
    start = unroll(None, params, sequence(np.zeros((5, 4)), 7), network.initial_state(4))[1]
    outputs, last = unroll(None, params, timestep, start)
    state, singles = start, []
    for t in range(11):
        step = jax.tree.map(lambda x, t=t: x[t], timestep)
        found, state = apply(None, params, step, state)
        singles.append(found)
    assert_close(np.stack(singles), outputs)
    assert_close(state, last)
    early, late = (jax.tree.map(lambda x, s=s: x[s], timestep) for s in (slice(4), slice(4, None)))
    first, middle = unroll(None, params, early, start)
    second, end = unroll(None, params, late, middle)
    assert_close((np.concatenate([first, second]), end), (outputs, last))
    row = jax.tree.map(lambda x: x[:, 2:3], timestep)
    alone = unroll(None, params, row, jax.tree.map(lambda x: x[2:3], start))
    assert_close(alone, (outputs[:, 2:3], jax.tree.map(lambda x: x[2:3], last)))


@pytest.mark.parametrize("kind", CORES)
def test_nothing_crosses_the_beginning_of_an_episode_not_even_a_gradient(kind):
    network = core_network(kind, memory=16)
    params, timestep = random_params(network), sequence(FIRST)

    def late(seen):  # the outputs from the last beginning on of rows 0 to 2
        steps = timestep._replace(observation=seen)
        outputs = network.unroll(None, params, steps, network.initial_state(4))[0]
        return outputs[9:, 0].sum() + outputs[8:, 1].sum() + outputs[10, 2].sum()

    grads = quick_jit(jax.grad(late))(timestep.observation)
    for row, begin in ((0, 9), (1, 8), (2, 10)):
        assert not grads[:begin, row].any() and np.abs(grads[begin:, row]).max() > 1e-3
    assert not grads[:, 3].any()
    huge = timestep.observation.copy()
    huge[:9, 0] *= 1e6
    unroll = quick_jit(network.unroll)
    for state in (network.initial_state(4), jax.tree.map(jnp.ones_like, network.initial_state(4))):
        outputs = unroll(None, params, timestep._replace(observation=huge), state)[0]
        usual = unroll(None, params, timestep, network.initial_state(4))[0]
        assert_close(outputs[9:, 0], usual[9:, 0], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", CORES)
def test_gradients_stay_finite_and_reach_back_over_many_steps(kind):
    network = core_network(kind, memory=200)
    params = quick_jit(network.init)(KEY)
    timestep = sequence(np.zeros((160, 2)))

    def loss(params, seen):
        steps = timestep._replace(observation=seen)
        outputs = network.unroll(None, params, steps, network.initial_state(2))[0]
        return jnp.square(outputs[-1]).mean()

    of_params, of_seen = quick_jit(jax.grad(loss, (0, 1)))(params, timestep.observation)
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in jax.tree.leaves(of_params))
    sizes = np.abs(of_seen).max(axis=(1, 2))
    assert np.isfinite(sizes).all() and sizes[0] > 1e-4 * sizes[-1]


def test_a_linear_recurrence_has_these_numbers_and_gradients():
    decay, inputs, state = (jnp.array(x, jnp.float32) for x in ([0.5, 0, 2], [1, 2, 3], 4))
    for way in (step_by_step, in_parallel):
        folded = np.array([1 + 0.5 * 4, 2, 3], np.float32)
        np.testing.assert_array_equal(way(decay, folded, reverse=False), [3, 2, 7])
        np.testing.assert_array_equal(way(decay, inputs, reverse=True), [1 + 0.5 * 2, 2, 3])
    np.testing.assert_array_equal(linear_scan(decay, inputs, state), [3, 2, 7])
    found = jax.grad(lambda *given: linear_scan(*given).sum(), (0, 1, 2))(decay, inputs, state)
    # h2 = 2 h1 + 3 and h1 = 2: a change of input 1 counts three times.
    for ours, wanted in zip(found, ([4, 9, 2], [1, 3, 1], 0.5), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    turned = linear_scan(*(jnp.array(x, jnp.complex64) for x in ([1j, 1j], [1, 0], 1)))
    np.testing.assert_allclose(turned, [1 + 1j, -1 + 1j])


@pytest.mark.parametrize(
    ("length", "shape"), [(1, ()), (2, (3, 2)), (7, ()), (7, (3, 2)), (128, (3, 2))]
)
def test_both_ways_of_a_recurrence_and_their_gradients_are_equal(length, shape):
    rng = np.random.default_rng(length)
    decay, inputs = rng.uniform(-1, 1, (2, length, *shape)) + 1j * rng.uniform(
        -0.5, 0.5, (2, length, *shape)
    )
    decay[length // 2] = 0
    state = rng.normal(size=shape) + 1j
    given = [jnp.asarray(x, jnp.complex64) for x in (decay, inputs, state)]

    def by(way):
        def loss(decay, inputs, state):
            folded = inputs.at[0].add(decay[0] * state)
            return jnp.square(jnp.abs(way(decay, folded, reverse=False))).sum()

        return quick_jit(jax.value_and_grad(loss, (0, 1, 2)))(*given)

    def loss(*given):
        return jnp.square(jnp.abs(linear_scan(*given))).sum()

    ours = quick_jit(jax.value_and_grad(loss, (0, 1, 2)))(*given)
    assert_close(ours, by(step_by_step), rtol=1e-3, atol=1e-4)
    assert_close(ours, by(in_parallel), rtol=1e-3, atol=1e-4)


def test_s5_begins_with_the_eigenvalues_of_hippo():
    frequency, vectors = hippo(2)  # [[-1/2, -s], [s, -1/2]] with s = sqrt(3) / 2
    np.testing.assert_allclose(frequency, [np.sqrt(3) / 2])
    np.testing.assert_allclose(np.abs(vectors), np.full((2, 1), np.sqrt(0.5)))
    frequency, vectors = hippo(6)
    matrix = -0.5 * np.eye(6)
    for n in range(6):
        for k in range(n):
            matrix[n, k] = -np.sqrt((2 * n + 1) * (2 * k + 1)) / 2
            matrix[k, n] = -matrix[n, k]
    rebuilt = 2 * ((vectors * (-0.5 + 1j * frequency)) @ vectors.conj().T).real
    np.testing.assert_allclose(rebuilt, matrix, atol=1e-12)
    network = core_network("s5", layers=1, size=6)
    params = quick_jit(network.init)(KEY)["core/layer_0"]
    np.testing.assert_allclose(params["frequency"], frequency, rtol=1e-6)
    np.testing.assert_allclose(params["log_decay"], np.log(0.5), rtol=1e-6)
    assert (params["log_step"] >= np.log(1e-3)).all() and (params["log_step"] <= np.log(0.1)).all()


def test_the_first_gates_of_mingru_keep_inputs_for_up_to_a_thousand_steps():
    params = quick_jit(core_network("mingru", layers=1, size=512).init)(KEY)
    biases = np.asarray(params["core/layer_0/gates"]["b"])
    steps = np.exp(-biases[:512])
    assert 1 <= steps.min() < 1.1 and 900 < steps.max() <= 1000
    assert abs(np.median(steps) - np.sqrt(1000)) < 12
    assert not biases[512:].any()


def test_the_first_gates_of_gtrxl_let_the_input_pass():
    # Near 0, sigmoid(-2) = 0.119 of the result enters, and the rest of the input stays.
    network = core_network("gtrxl", layers=1, features=SIZE)
    params = quick_jit(network.init)(KEY)
    assert (params["core/layer_0/gate"]["bias"] == 2).all()
    silent = jax.tree.map(jnp.zeros_like, params)
    silent["core/input"]["w"] = jnp.eye(8)
    for gate in ("gate", "gate_2"):
        silent[f"core/layer_0/{gate}"] = params[f"core/layer_0/{gate}"]
    timestep = sequence([[True]], features=SIZE)
    outputs = quick_jit(network.unroll)(None, silent, timestep, network.initial_state(1))[0]
    kept = (1 - 0.1192029) ** 2
    np.testing.assert_allclose(outputs, kept * timestep.observation, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", CORES)
def test_states_are_zero_have_a_row_for_each_environment_and_few_options(kind):
    network = core_network(kind, layers=3, size=10, memory=5)
    state = network.initial_state(7)
    assert not any(np.any(x) for x in jax.tree.leaves(state))
    wanted = [(7, 3, 5, 10), (7,)] if kind == "gtrxl" else [(7, 10)] * 3
    assert [x.shape for x in jax.tree.leaves(state)] == wanted
    params = quick_jit(network.init)(KEY)
    assert {name.split("/")[0] for name in params} == {"core"}
    after = quick_jit(network.unroll)(None, params, sequence(np.zeros((2, 7))), state)[1]
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", CORES)
def test_policy_and_value_may_have_cores_of_different_kinds(kind):
    critic = CriticConfig(core=kind, core_size=12)
    cfg = NetworkConfig(hidden_sizes=(8,), core="lstm", core_size=5, critic=critic)
    network = actor_critic(VECTOR, ONE_OF_4, cfg)
    params = quick_jit(network.init)(KEY)
    assert {"cores/~/core/linear", "cores/~/value_core/layer_0/norm"} <= set(params)
    timestep = sequence(FIRST, features=3)
    outputs, state = quick_jit(network.unroll)(None, params, timestep, network.initial_state(4))
    alone = quick_jit(network.unroll)(
        None, params, jax.tree.map(lambda x: x[9:, :1], timestep), network.initial_state(1)
    )
    assert_close(jax.tree.map(lambda x: x[9:, :1], outputs), alone[0])
    assert_close(jax.tree.map(lambda x: x[:1], state), alone[1])
    assert leaves_differ(params, quick_jit(network.init)(jax.random.PRNGKey(1)))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"core": "lstm", "core_memory": 8}, "core_memory must be 64"),
        ({"core_heads": 2}, "core_heads must be 4"),
        ({"core": "gtrxl", "core_size": 10}, "core_size must be a multiple of 4 for"),
        ({"core": "gtrxl", "core_memory": 0}, "core_memory"),
        ({"core": "s5", "core_size": 7}, "core_size must be a multiple of 2 for"),
        ({"core": "gtrxl", "critic": CriticConfig(core_size=10)}, "multiple of 4"),
    ],
)
def test_senseless_options_are_refused(options, field):
    with pytest.raises(ValueError, match=field):
        NetworkConfig(**options)


def test_options_of_gtrxl_fit_where_one_of_both_cores_is_one():
    of_policy = NetworkConfig(core="gtrxl", core_memory=8, critic=CriticConfig(core="lstm"))
    assert of_policy.of_critic().core_memory == 64
    of_value = NetworkConfig(core_memory=8, critic=CriticConfig(core="gtrxl"))
    assert of_value.of_critic().core_memory == 8


@pytest.mark.slow
@pytest.mark.chosen
def test_action_values_have_these_cores_too():
    for kind in CORES:
        cfg = NetworkConfig(hidden_sizes=(8,), core=kind, core_size=8, duelling=True)
        network = q_network(VECTOR, ONE_OF_4, cfg)
        params = quick_jit(network.init)(KEY)
        assert "core/input" not in params or kind == "gtrxl"  # features have the core's size
        outputs, _ = quick_jit(network.unroll)(
            None, params, sequence(FIRST, features=3), network.initial_state(4)
        )
        assert outputs.shape == (11, 4, 4) and np.isfinite(outputs).all()
