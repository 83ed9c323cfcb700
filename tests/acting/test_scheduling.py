"""The compiler options of acting: chosen for small networks, and without effect on results."""

import dataclasses

import jax
import numpy as np
import pytest

from rlstack.acting.inferencer import Inferencer, acting_options
from rlstack.acting.params import FixedParams
from rlstack.configs.acting import InferencerConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.presets import preset
from rlstack.types import EnvSpec
from tests.agent_cases import ONE_OF_4, VECTOR, random_timesteps

KEY = jax.random.PRNGKey(5)
SPEC = EnvSpec(VECTOR, ONE_OF_4)
NEWER = jax.__version_info__ >= (0, 10)


def agent_of(*sizes):
    chosen = preset("cartpole-ppo")
    network = dataclasses.replace(chosen.network, hidden_sizes=sizes)
    return make_agent(dataclasses.replace(chosen, network=network), SPEC)


@pytest.mark.parametrize(("sizes", "small"), [((64, 64), True), ((64, 1024), False)])
def test_it_is_for_small_layers(sizes, small):
    assert (acting_options(agent_of(*sizes)) is not None) is (small and NEWER)


def test_a_choice_of_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT")
    assert acting_options(agent_of(64, 64)) is None


@pytest.mark.slow
@pytest.mark.chosen
def test_no_result_changes(monkeypatch):
    agent = agent_of(64, 64)
    params = FixedParams(agent.initial_params(KEY))
    timesteps = [random_timesteps(SPEC.observation, np.ones(8, np.int32)) for _ in range(3)]

    def answers():
        inferencer = Inferencer(InferencerConfig(), agent, params, 8, KEY)
        return [inferencer.inference(None, timestep) for timestep in timesteps]

    chosen = answers()
    monkeypatch.setattr("rlstack.acting.inferencer.acting_options", lambda agent: None)
    for one, other in zip(jax.tree.leaves(chosen), jax.tree.leaves(answers()), strict=True):
        np.testing.assert_array_equal(one, other)
