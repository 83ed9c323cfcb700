"""Every agent finds the params of each of its components."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from rlstack.agents import AGENTS
from rlstack.optimizers import OptimizerConfig, catalogue, component_fields
from tests.agent_cases import Case, quick_jit, settings
from tests.docs.pages import text_of

NAMES = ["ppo-separate", "ppo-lstm", "ppo-entities", "dqn-duelling", "iqn", "r2d2", "sac", "td3"]
NAMES += ["ddpg", "bc-gru", "bc-structured"]
LION = OptimizerConfig("lion")  # its state has one copy of the params that it trains


def sizes(cfg, setting):
    """The number of params, and of those that lion trains."""
    entry = AGENTS[type(cfg)]

    def network(*specs):
        return entry.network(*specs, cfg=setting.network)

    agent = entry.agent(cfg, setting.obs_spec, setting.action_spec, network, lambda: None)
    key = jax.random.PRNGKey(0)
    params = jax.eval_shape(agent.initial_params, key)
    state = jax.eval_shape(agent.initial_learner_state, key, params)

    def count(tree):
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    return count(params), count(state.opt_state)


@pytest.mark.parametrize("name", NAMES)
def test_components_are_parts_of_the_params(name):
    setting = settings()[name]
    plain = dataclasses.replace(setting.cfg, optimizer=OptimizerConfig("sgd"))
    total, nothing = sizes(plain, setting)
    trained = [
        sizes(dataclasses.replace(plain, **{f"{component}_optimizer": LION}), setting)[1] - nothing
        for component in component_fields(type(plain))
    ]
    assert len(trained) >= 2
    assert all(0 < size < total for size in trained)
    steps = len(trained)  # each optimizer counts its steps, in one number
    assert sum(trained) <= total + steps


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", NAMES)
def test_the_log_of_a_learning_rate_has_the_name_of_the_component(name):
    setting = settings()[name]
    components = component_fields(type(setting.cfg))
    rates = {component: 0.1 + 0.1 * i for i, component in enumerate(components)}
    own = {f"{name}_optimizer": OptimizerConfig(learning_rate=rate) for name, rate in rates.items()}
    agent = Case(setting._replace(cfg=dataclasses.replace(setting.cfg, **own))).agent
    key = jax.random.PRNGKey(0)
    params = jax.eval_shape(agent.initial_params, key)
    state = jax.eval_shape(agent.initial_learner_state, key, params)
    # Rates do not depend on params. To compile the drawing of params would take most of the time.
    params, state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (params, state))
    *_, logs = quick_jit(agent.apply_gradients)(params, state, params)
    found = {log: float(rate) for log, rate in logs.items() if log.startswith("learning_rate/")}
    assert found == pytest.approx({f"learning_rate/{name}": rate for name, rate in rates.items()})


def test_the_page_has_every_agent_component_and_optimizer():
    page = text_of("docs/optimizers.md")
    rows = dict(re.findall(r"^\| ([A-Z][^|]*) \| (`.*`) \|$", page, re.M))
    found = {
        agent: re.findall(r"`(\w+)`", row)
        for names, row in rows.items()
        for agent in names.split(", ")
    }
    components = {
        entry.agent.__name__: list(component_fields(config))
        for config, entry in AGENTS.items()
        if config.__module__.startswith("rlstack.")
    }
    assert found == {name: fields for name, fields in components.items() if fields}
    listed = page.split("needs only gradients and params: ")[1].split(".\n")[0]
    assert re.findall(r"`(\w+)`", listed) == list(catalogue.optimizers())
