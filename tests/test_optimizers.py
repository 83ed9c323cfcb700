"""Optimizers by config and by component."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlstack.optimizers import OptimizerConfig, component_optimizer, make_optimizer

SGD = OptimizerConfig(name="sgd", learning_rate=0.1)
PARAMS = {
    "policy_torso/linear": {"w": jnp.ones(2)},
    "net/value_head": {"w": jnp.ones(2)},
    "~": {"policy_head_log_std": jnp.ones(2)},
}


def moves(optimizer, steps=1, gradient=1.0, params=PARAMS):
    state, moved = optimizer.init(params), []
    for _ in range(steps):
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        moved.append(updates)
    return moved


def test_every_name_is_its_optimizer():
    for name, reference in {
        "adam": optax.adam(1e-2, eps=1e-3),
        "adamw": optax.adamw(1e-2, eps=1e-3, weight_decay=0.1),
        "rmsprop": optax.rmsprop(1e-2, decay=0.7, eps=1e-3),
        "sgd": optax.sgd(1e-2),
    }.items():
        weight_decay = 0.1 if name == "adamw" else 0.0
        cfg = OptimizerConfig(name, 1e-2, eps=1e-3, decay=0.7, weight_decay=weight_decay)
        for ours, theirs in zip(moves(make_optimizer(cfg), 3), moves(reference, 3), strict=True):
            jax.tree.map(np.testing.assert_allclose, ours, theirs)


def test_the_rate_falls_linearly_to_zero():
    optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=0.4, anneal_steps=4))
    sizes = [-float(u["~"]["policy_head_log_std"][0]) for u in moves(optimizer, 6)]
    np.testing.assert_allclose(sizes, [0.4, 0.3, 0.2, 0.1, 0.0, 0.0], atol=1e-6)


def test_components_go_by_the_parts_of_module_names():
    optimizer = component_optimizer(
        SGD,
        {
            ("policy_head",): OptimizerConfig(name="sgd", learning_rate=0.2),
            ("value_head",): OptimizerConfig(name="sgd", learning_rate=0.3),
            ("policy_torso",): None,
        },
        max_grad_norm=0.0,
    )
    (updates,) = moves(optimizer)
    np.testing.assert_allclose(updates["~"]["policy_head_log_std"], -0.2)
    np.testing.assert_allclose(updates["net/value_head"]["w"], -0.3)
    np.testing.assert_allclose(updates["policy_torso/linear"]["w"], -0.1)


def test_params_in_records_and_lists_have_names_too():
    from rlstack.networks import ActorCriticOutput

    params = {"net": ActorCriticOutput(policy=[jnp.ones(2)], value=jnp.ones(1))}
    own = {("policy",): OptimizerConfig(name="sgd", learning_rate=0.2)}
    (updates,) = moves(component_optimizer(SGD, own, 0.0), params=params)
    np.testing.assert_allclose(updates["net"].policy[0], -0.2)
    np.testing.assert_allclose(updates["net"].value, -0.1)


@pytest.mark.parametrize("own", [{}, {("value_head",): SGD}])
def test_gradients_are_clipped_over_all_components_together(own):
    (updates,) = moves(component_optimizer(SGD, own, 0.5), gradient=10.0)
    np.testing.assert_allclose(optax.global_norm(updates), 0.05, rtol=1e-5)
    (updates,) = moves(component_optimizer(SGD, own, 0.5), gradient=0.01)
    np.testing.assert_allclose(updates["~"]["policy_head_log_std"], -0.001, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.0},
        {"eps": -1.0},
        {"anneal_steps": -1},
        {"decay": 1.0},
        {"weight_decay": 0.1},
        {"name": "lion"},
    ],
)
def test_configs_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        OptimizerConfig(**changes)


def test_a_negative_norm_is_refused():
    with pytest.raises(ValueError, match=r"max_grad_norm.*-1"):
        component_optimizer(SGD, {}, -1.0)


def test_a_component_without_a_module_is_refused():
    # no part of policy_torso/linear begins with "torso"
    with pytest.raises(ValueError, match=r"torso or core.*policy_head"):
        moves(component_optimizer(SGD, {("torso", "core"): SGD}, 0.0))
