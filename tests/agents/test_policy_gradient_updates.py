"""IMPALA, A2C and REINFORCE: the params that an update changes, preset sizes, and configs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.a2c import A2C, A2CConfig
from rlstack.agents.impala import Impala, ImpalaConfig
from rlstack.agents.reinforce import ReinforceConfig
from rlstack.exploration import Sample
from rlstack.families.policy_gradient import PolicyGradientOutput, masked_mean, standardised
from rlstack.networks import NetworkConfig, actor_critic
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.presets import preset
from rlstack.types import Batch, TimeStep, Trajectory
from tests.agent_cases import (
    IMAGE,
    ONE_OF_4,
    VECTOR,
    assert_close,
    quick_jit,
)
from tests.agents.test_policy_gradient import COLUMNS, PARAMS, TRUNCATED, batched, make, unrolls


@pytest.mark.parametrize(
    "component", ["torso_optimizer", "policy_head_optimizer", "value_head_optimizer"]
)
def test_a_component_moves_by_its_own_learning_rate_and_others_do_not(component):
    network = functools.partial(actor_critic, cfg=NetworkConfig(hidden_sizes=(8,)))
    base = A2CConfig(max_grad_norm=0.0, optimizer=OptimizerConfig(name="sgd", learning_rate=0.01))
    own = dataclasses.replace(base, **{component: OptimizerConfig(name="sgd", learning_rate=0.03)})
    agents = [A2C(cfg, VECTOR, ONE_OF_4, network, Sample) for cfg in (base, own)]
    params = agents[0].initial_params(jax.random.PRNGKey(0))
    grads = jax.tree.map(jnp.ones_like, params)
    moved = [
        agent.apply_gradients(
            params, agent.initial_learner_state(jax.random.PRNGKey(0), params), grads
        )[0]
        for agent in agents
    ]
    tripled = set()
    for module, leaves in params.items():
        part = component.removesuffix("_optimizer")
        factor = 3 if part in module else 1
        tripled |= {module} if factor == 3 else set()
        for name, old in leaves.items():
            once, more = (np.asarray(new[module][name] - old) for new in moved)
            np.testing.assert_allclose(more, factor * once, rtol=1e-3)
    assert tripled and tripled != set(params)


def test_three_updates_follow_the_gradient_clipped_by_its_global_norm():
    trajectory = unrolls(COLUMNS, TRUNCATED)
    sgd = OptimizerConfig(name="sgd", learning_rate=0.5)
    agent = make(Impala, max_grad_norm=0.1, optimizer=sgd)
    params, batch = PARAMS, batched(trajectory)
    state = agent.initial_learner_state(jax.random.PRNGKey(0), params)
    learn, gradient = quick_jit(agent.learner_step), quick_jit(jax.grad(agent.loss, has_aux=True))
    for _ in range(3):
        grads, _ = gradient(params, batched(trajectory))
        norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(grads)))
        assert norm > 0.1
        expected = jax.tree.map(lambda p, g, n=norm: p - 0.5 * 0.1 / n * g, params, grads)
        params, state, output = learn(params, state, batch)
        assert_close(params, expected)
        np.testing.assert_allclose(output.logs["grad_norm"], norm, rtol=1e-5)


def test_means_are_of_what_the_mask_keeps():
    x, mask = np.array([[1.0, np.inf], [3.0, 8.0]]), np.array([[True, False], [True, True]])
    assert masked_mean(x, mask) == 4.0
    assert masked_mean(x, np.zeros((2, 2), bool)) == 0.0
    kept = np.array([1.0, 3.0, 8.0])
    expected = (kept - 4.0) / kept.std()
    np.testing.assert_allclose(standardised(x, mask)[mask], expected, rtol=1e-6)
    assert standardised(x, mask)[0, 1] == 0


def test_the_deep_torso_of_the_paper_fits_the_preset():
    """The network is traced, not compiled: XLA takes long for fifteen convolutions."""
    experiment = preset("pong-impala")
    network = functools.partial(actor_critic, cfg=experiment.network)
    agent = Impala(experiment.agent, IMAGE, ONE_OF_4, network, Sample)
    params = jax.eval_shape(agent.initial_params, jax.random.PRNGKey(0))
    assert sum("conv" in module for module in params) == 15  # paper, figure 3
    state = jax.eval_shape(agent.initial_learner_state, jax.random.PRNGKey(0), params)
    leading = (experiment.replay.unroll_length + 1, experiment.replay.batch_size)
    assert leading == (21, 32)
    timestep = TimeStep(
        *(jax.ShapeDtypeStruct(leading, kind) for kind in (np.int32, np.float32, np.float32)),
        jax.ShapeDtypeStruct((*leading, *IMAGE.shape), np.uint8),
    )
    floats = jax.ShapeDtypeStruct(leading, np.float32)
    action = jax.ShapeDtypeStruct(leading, np.int32)
    output = PolicyGradientOutput(action, floats, floats)
    trajectory = Trajectory(timestep, output, (), action)
    weights = jax.ShapeDtypeStruct((32,), np.float32)
    learned, _, output = jax.eval_shape(
        agent.learner_step, params, state, Batch(trajectory, weights)
    )
    assert learned == params and output.logs["loss"].shape == ()


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (ImpalaConfig, {"discount": 1.1}),
        (ImpalaConfig, {"clip_c": 0.0}),
        (ImpalaConfig, {"clip_rho": 0.5}),  # less than clip_c
        (ImpalaConfig, {"vtrace_lambda": 1.5}),
        (A2CConfig, {"gae_lambda": -0.1}),
        (A2CConfig, {"entropy_cost": -1.0}),
        (ReinforceConfig, {"max_grad_norm": -1.0}),
    ],
)
def test_configs_out_of_range_are_refused(config, changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=rf"{config.__name__}: {name} must be .*got"):
        config(**changes)
