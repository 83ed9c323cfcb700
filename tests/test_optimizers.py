"""Optimizers by config and by component."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlstack.agents.bc import BCConfig
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.fixed import RandomConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.sac import SACConfig
from rlstack.optimizers import (
    OptimizerConfig,
    catalogue,
    component_fields,
    component_optimizer,
    make_optimizer,
    optimizer_step,
    require_component,
)

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


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", [0, 0.2, 0.4, 0.325, 0.25, 0.175, 0.1, 0.1]),
        ("cosine", [0, 0.2, 0.4, 0.356066, 0.25, 0.143934, 0.1, 0.1]),
        ("exponential", [0, 0.2, 0.4, 0.4 / 2**0.5, 0.2, 0.2 / 2**0.5, 0.1, 0.1]),
        ("constant", [0, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4]),
    ],
)
def test_schedules_with_a_warm_up(schedule, rates):
    cfg = OptimizerConfig("sgd", 0.4, 6, schedule=schedule, warmup_steps=2, final_learning_rate=0.1)
    sizes = [-float(u["~"]["policy_head_log_std"][0]) for u in moves(make_optimizer(cfg), 8)]
    np.testing.assert_allclose(sizes, rates, atol=1e-6)
    unwarmed = dataclasses.replace(cfg, anneal_steps=4, warmup_steps=0)
    sizes = [-float(u["~"]["policy_head_log_std"][0]) for u in moves(make_optimizer(unwarmed), 6)]
    np.testing.assert_allclose(sizes, rates[2:], atol=1e-6)


def test_arguments_are_those_of_optax():
    cfg = OptimizerConfig("sgd", 0.1, arguments={"momentum": 0.5, "nesterov": True})
    reference = optax.sgd(0.1, momentum=0.5, nesterov=True)
    for ours, theirs in zip(moves(make_optimizer(cfg), 3), moves(reference, 3), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_laprop_clips_by_the_params_and_takes_the_momentum_of_scaled_gradients():
    arguments = {"b1": 0.5, "b2": 0.75, "agc": 0.25}
    optimizer = make_optimizer(OptimizerConfig("laprop", 0.1, arguments=arguments))
    params = {"w": jnp.array([3.0, 4.0]), "zero": jnp.zeros(2)}
    state, square, momentum = optimizer.init(params), np.zeros(2), np.zeros(2)
    for step, gradient in enumerate(([6.0, 8.0], [0.3, -0.1], [0.0, 2.0]), start=1):
        grads = {"w": jnp.array(gradient), "zero": jnp.array(gradient)}
        updates, state = optimizer.update(grads, state, params)
        # A quarter of the params' norm of 5 is the largest norm.
        gradient = np.array(gradient) / max(np.linalg.norm(gradient) / 1.25, 1)
        square = 0.75 * square + 0.25 * gradient**2
        scaled = gradient / np.sqrt(square / (1 - 0.75**step))
        momentum = 0.5 * momentum + 0.5 * scaled
        wanted = -0.1 * momentum / (1 - 0.5**step)
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-5)
        assert np.isfinite(updates["zero"]).all()
        assert np.any(updates["zero"])  # params of 0 can move


def test_an_eps_of_none_is_optaxs_except_for_the_usual_three():
    (ours,) = moves(make_optimizer(OptimizerConfig("adabelief", 0.1)))
    (theirs,) = moves(optax.adabelief(0.1))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    (ours,) = moves(make_optimizer(OptimizerConfig("adam", 0.1)))
    (theirs,) = moves(optax.adam(0.1, eps=1e-5))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@functools.cache
def stepped(name, scheduled):
    """Two steps of an optimizer that one component has, beside sgd; returns the params."""
    rate = {"anneal_steps": 10} if scheduled else {}
    cfg = OptimizerConfig(name, 1.0 if name in ("dog", "dowg", "cocob") else 0.01, **rate)
    optimizer = component_optimizer(SGD, {("torso",): cfg}, 0.0)
    params = {"torso/linear": {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}, "head": {"w": jnp.ones(3)}}
    state = optimizer.init(params)
    for _ in range(2):
        grads = jax.tree.map(lambda x: 0.3 + x**2, params)
        params, state, _ = optimizer_step(optimizer, params, state, grads)
    return params


@pytest.mark.parametrize("name", ["adam", "lion", "muon", "rmsprop", "schedule_free_adamw", "sm3"])
def test_optimizers_move_the_params_of_their_component(name):
    params = stepped(name, catalogue.takes_schedule(name))
    assert np.isfinite(np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])).all()
    assert all(float(jnp.abs(x - 1).max()) > 1e-4 for x in jax.tree.leaves(params))
    np.testing.assert_array_equal(params["head"]["w"], stepped("adam", True)["head"]["w"])


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", list(catalogue.optimizers()))
def test_every_optimizer_of_optax_needs_only_gradients(name):
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(stepped(name, False)))
    if catalogue.takes_schedule(name):
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(stepped(name, True)))


def test_the_list_has_the_well_known_ones():
    usual = [
        "adafactor",
        "adam",
        "adamw",
        "lion",
        "muon",
        "nadam",
        "prodigy",
        "rmsprop",
        "schedule_free_adamw",
        "sgd",
    ]
    assert set(usual) <= set(catalogue.optimizers())
    assert not {"lbfgs", "scale_by_learning_rate", "dpsgd"} & set(catalogue.optimizers())


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
        {"schedule": "cosin", "anneal_steps": 5},
        {"warmup_steps": -1},
        {"anneal_steps": 5, "warmup_steps": 5},
        {"anneal_steps": 0, "schedule": "cosine"},
        {"final_learning_rate": 0.0, "schedule": "exponential", "anneal_steps": 5},
        {"final_learning_rate": 1e-5},
        {"anneal_steps": 5, "name": "sm3"},
        {"warmup_steps": 5, "name": "rprop"},
    ],
)
def test_configs_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        OptimizerConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"name": "admw"}, "name must be one of optax's; got 'admw'; did you mean 'adamw'?"),
        ({"name": "zzzz"}, "there are acprop, adabelief"),
        ({"name": "lbfgs"}, "name must be one of optax's; got 'lbfgs'"),
        ({"name": "sgd", "arguments": {"momentun": 0.9}}, "did you mean 'momentum'?"),
        ({"name": "lion", "arguments": {"nesterov": True}}, "those of lion; got 'nesterov'"),
        ({"name": "sign_sgd", "arguments": {"momentum": 0.9}}, "got 'momentum'"),
        ({"name": "sgd", "arguments": {"learning_rate": 1.0}}, "an option of its own"),
        ({"name": "adamw", "arguments": {"mask": True}}, "got 'mask'"),
        ({"name": "adam", "arguments": {"b1": "high"}}, "its default 0.9; got 'high'"),
        ({"name": "sgd", "arguments": {"nesterov": 1}}, "its default False; got 1"),
    ],
)
def test_unknown_names_and_arguments_are_refused_with_the_nearest(changes, hint):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**changes)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_negative_norm_is_refused():
    with pytest.raises(ValueError, match=r"max_grad_norm.*-1"):
        component_optimizer(SGD, {}, -1.0)


def test_a_component_without_a_module_is_refused():
    # no part of policy_torso/linear begins with "torso"
    with pytest.raises(ValueError, match=r"torso or core.*policy_head"):
        moves(component_optimizer(SGD, {("torso", "core"): SGD}, 0.0))


def test_an_agent_names_its_components():
    assert component_fields(PPOConfig) == ("torso", "policy_head", "value_head")
    assert component_fields(DQNConfig) == ("torso", "value_head")
    assert component_fields(SACConfig) == ("policy", "critics", "temperature")
    assert component_fields(BCConfig) == ("torso", "policy_head")
    require_component(PPOConfig, "torso")
    with pytest.raises(ValueError, match=r"^DQNConfig: .* are torso, value_head; got critics\.$"):
        require_component(DQNConfig, "critics")
    with pytest.raises(ValueError, match="RandomConfig: the agent has no components"):
        require_component(RandomConfig, "torso")


@pytest.mark.parametrize(
    "name", [name for name in catalogue.optimizers() if catalogue.takes_schedule(name)]
)
def test_the_learning_rates_of_a_step_are_logged(name):
    falling = OptimizerConfig(name, learning_rate=0.1, anneal_steps=4)
    optimizer = component_optimizer(falling, {("policy_head", "value_head"): SGD}, 0.5)
    params = {"torso/linear": {"w": jnp.ones((2, 2))}, "policy_head": {"w": jnp.ones((2, 2))}}
    opt_state = optimizer.init(params)
    for rate in (0.1, 0.075, 0.05):
        params, opt_state, logs = optimizer_step(optimizer, params, opt_state, params)
        assert logs.keys() == {"learning_rate", "learning_rate/policy_head"}
        np.testing.assert_allclose(logs["learning_rate"], rate, rtol=1e-6)
        np.testing.assert_allclose(logs["learning_rate/policy_head"], 0.1, rtol=1e-6)


def test_an_optimizer_of_optax_has_no_learning_rate_to_log():
    optimizer = optax.sgd(0.1)
    *_, logs = optimizer_step(optimizer, PARAMS, optimizer.init(PARAMS), PARAMS)
    assert logs == {}
