"""Every agent finds the params of each of its components."""

import dataclasses
import re

import jax
import pytest

from agents import AGENTS
from rlstack.optimizers import OptimizerConfig, catalogue, component_fields
from tests.agent_cases import settings
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


def test_the_page_has_every_agent_component_and_optimizer():
    page = text_of("docs/optimizers.md")
    rows = dict(re.findall(r"^\| ([A-Z][^|]*) \| (`.*`) \|$", page, re.M))
    found = {
        agent: re.findall(r"`(\w+)`", row)
        for names, row in rows.items()
        for agent in names.split(", ")
    }
    components = {
        entry.agent.__name__: list(component_fields(config)) for config, entry in AGENTS.items()
    }
    assert found == {name: fields for name, fields in components.items() if fields}
    listed = page.split("needs only gradients and params: ")[1].split(".\n")[0]
    assert re.findall(r"`(\w+)`", listed) == list(catalogue.optimizers())
