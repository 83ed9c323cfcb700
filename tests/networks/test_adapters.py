"""Networks from models of Flax and Equinox; and stateless networks of plain functions."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.exploration import Greedy
from rlstack.networks import from_equinox, from_flax, from_functions
from rlstack.rpc import codec
from rlstack.stateful_params import StatefulParams, is_stateful, training, weights_of
from tests.agent_cases import (
    FAST,
    MID,
    ONE_OF_4,
    VECTOR,
    Setting,
    acted_batch,
    assert_close,
    leaves_differ,
    quick_jit,
    random_timesteps,
    step_types,
)
from tests.docs.pages import blocks

KEY = jax.random.PRNGKey(3)


def plain_linen():
    linen = pytest.importorskip("flax.linen")
    return from_flax(linen.Sequential([linen.Dense(8), jnp.tanh, linen.Dense(4)]), VECTOR)


def of_page(name):
    """The network that the page on networks makes of a library's model."""
    text = next(x.text for x in blocks("docs/tutorials/own_network.md") if f"# {name}.py" in x.text)
    module = sys.modules[name] = ModuleType(name)  # dataclasses look their module up
    exec(text, module.__dict__)
    return module.make(VECTOR, ONE_OF_4)


def linen_with_state():
    pytest.importorskip("flax.linen")
    return of_page("my_flax_net")


def nnx_with_state():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, size, rngs):
            self.first = nnx.Linear(*VECTOR.shape, size, rngs=rngs)
            self.norm = nnx.BatchNorm(size, momentum=0.95, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.last = nnx.Linear(size, 4, rngs=rngs)

        def __call__(self, x, train):
            x = jnp.tanh(self.norm(self.first(x), use_running_average=not train))
            return self.last(self.dropout(x, deterministic=not train))

    return from_flax(nnx.bridge.to_linen(Net, 8), VECTOR, "train")


def plain_equinox():
    eqx = pytest.importorskip("equinox")
    return from_equinox(lambda key: eqx.nn.MLP(*VECTOR.shape, 4, 8, 1, key=key), VECTOR)


def equinox_with_state():
    pytest.importorskip("equinox")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a mode of batch norm that is not named
        return of_page("my_equinox_net")


def equinox_with_dropout():
    eqx = pytest.importorskip("equinox")

    def make(key):
        first, last = jax.random.split(key)
        layers = [eqx.nn.Linear(*VECTOR.shape, 8, key=first), eqx.nn.Dropout(0.5)]
        return eqx.nn.Sequential([*layers, eqx.nn.Linear(8, 4, key=last)])

    return from_equinox(make, VECTOR)


def plain_functions():
    def init(rng_key, observation):
        return {"w": jax.random.normal(rng_key, (observation.shape[-1], 4))}

    return from_functions(init, lambda params, _, observation: observation @ params["w"], VECTOR)


PLAIN = [plain_functions, plain_linen, plain_equinox]
WITH_STATE = [linen_with_state, nnx_with_state, equinox_with_state, equinox_with_dropout]
# Flax is in the current lane only; Equinox is in both.
LATER = [pytest.mark.slow, pytest.mark.chosen]
EQUINOX_LATER = pytest.param(equinox_with_state, marks=LATER)
TIMESTEP = random_timesteps(VECTOR, np.full((2, 3), MID))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "make", [*PLAIN, linen_with_state, nnx_with_state, EQUINOX_LATER, equinox_with_dropout]
)
def test_apply_and_unroll_agree_and_rows_do_not_mix(make):
    network = make()
    params = quick_jit(network.init)(KEY)
    values, state = quick_jit(network.unroll)(None, params, TIMESTEP, ())
    assert values.shape == (2, 3, 4) and state == ()
    row = jax.tree.map(lambda x: x[1, 2:], TIMESTEP)
    assert_close(network.apply(None, params, row, ())[0][0], values[1, 2])
    other = quick_jit(network.init)(jax.random.PRNGKey(4))
    assert leaves_differ(weights_of(other), weights_of(params))
    codec.register_records(jax.eval_shape(network.init, KEY))
    assert_close(codec.decode(codec.encode(params)), params, atol=0, rtol=0)


@pytest.mark.parametrize("make", PLAIN)
def test_a_model_without_state_has_plain_params(make):
    network = make()
    assert network.new_state is None and not is_stateful(network.init(KEY))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("make", WITH_STATE)
def test_a_model_with_state_or_dropout_has_two_modes(make):
    network = make()
    params = quick_jit(network.init)(KEY)
    assert isinstance(params, StatefulParams)
    unroll = quick_jit(network.unroll)
    evaluated = [unroll(key, params, TIMESTEP, ())[0] for key in (None, KEY)]
    assert_close(*evaluated, atol=0, rtol=0)
    learned = [unroll(None, training(KEY, params, i), TIMESTEP, ())[0] for i in (0, 0, 1)]
    assert_close(*learned[:2], atol=0, rtol=0)
    assert np.abs(learned[0] - learned[2]).max() > 0  # other units are dropped
    new = quick_jit(network.new_state)(training(KEY, params), TIMESTEP, ())
    assert jax.tree.structure(new) == jax.tree.structure(params.state)
    moved = unroll(None, params._replace(state=new), TIMESTEP, ())[0]
    if make is equinox_with_dropout:
        assert new == {}
    else:
        assert np.abs(moved - evaluated[0]).max() > 1e-3


@pytest.mark.parametrize("make", [linen_with_state, nnx_with_state, EQUINOX_LATER])
def test_batch_norm_is_that_of_the_batch_in_training_and_the_running_one_after(make):
    """After many passes over one batch, the running statistics are those of the batch."""
    network = make()
    params = quick_jit(network.init)(KEY)
    new_state = quick_jit(network.new_state)
    for _ in range(300):
        params = params._replace(state=new_state(training(KEY, params), TIMESTEP, ()))
    outputs = network.unroll(None, params, TIMESTEP, ())[0]
    moved = TIMESTEP._replace(observation=TIMESTEP.observation + 5.0)
    kept = network.unroll(None, params, moved, ())[0]
    assert np.abs(kept - outputs).max() > 0.1  # the statistics do not follow the data
    for _ in range(300):
        params = params._replace(state=new_state(training(KEY, params), moved, ()))
    assert_close(network.unroll(None, params, moved, ())[0], outputs, atol=1e-3)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("make", [*PLAIN, *WITH_STATE])
def test_an_agent_learns_from_a_batch(make):
    network = make()
    cfg = DQNConfig(optimizer=FAST, target_rate=0.1)
    agent = DQN(cfg, VECTOR, ONE_OF_4, lambda *_: network, Greedy)
    params = quick_jit(agent.initial_params)(KEY)
    learner_state = agent.initial_learner_state(KEY, params)
    case = SimpleNamespace(
        key=KEY,
        setting=Setting(cfg, VECTOR, ONE_OF_4),
        agent=agent,
        act=quick_jit(agent.actor_step),
    )
    batch = acted_batch(case, params, step_types())
    new_params, new_state, output = quick_jit(agent.learner_step)(params, learner_state, batch)
    assert jax.tree.structure((new_params, new_state)) == jax.tree.structure(
        (params, learner_state)
    )
    assert leaves_differ(weights_of(new_params), weights_of(params))
    assert np.isfinite(output.logs["loss"])


def test_a_flax_module_with_state_needs_the_name_of_an_argument():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, learns=False):
            return linen.BatchNorm(use_running_average=not learns)(x)

    with pytest.raises(ValueError, match="Net has the collections batch_stats"):
        from_flax(Net(), VECTOR)
    with pytest.raises(ValueError, match="one of x, learns; got 'train'"):
        from_flax(Net(), VECTOR, "train")
