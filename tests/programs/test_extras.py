"""Extras of steps from the environments to the learner, in each topology and kind of replay."""

import dataclasses
import io

import jax
import numpy as np
import pytest

import rlstack
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.sac import SACConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import CriticConfig, NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.networks.base import dummy_timestep
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.run import train
from rlstack.replay import ReplayConfig
from rlstack.storage import jsonl
from rlstack.storage.datasets import Dataset, DatasetWriter
from rlstack.types import EnvSpec, Transition
from tests.envs import costly
from tests.programs import running

pytestmark = pytest.mark.timeout(180)
_LATER = [pytest.mark.slow, pytest.mark.chosen]
QUEUE = ReplayConfig(sampler="fifo", batch_size=4, unroll_length=8, max_size=8)
TABLE = ReplayConfig(
    sampler="uniform",
    batch_size=16,
    unroll_length=3,
    period=1,
    max_size=200,
    min_size=50,
    samples_per_insert=4.0,
)
PLACES = {
    "single_process": ("single_process", "tests.envs.costly:Costly", "auto", QUEUE),
    "single_process-uniform": ("single_process", "tests.envs.costly:CostlyDm", "process", TABLE),
    "heavy_env": ("heavy_env", "tests.envs.costly:Costly", "auto", TABLE),
    "light_env": ("light_env", "tests.envs.costly:two_seats", "auto", QUEUE),
    "distributed": ("distributed", "tests.envs.costly:Costly", "auto", QUEUE),
    "distributed-uniform": ("distributed", "tests.envs.costly:JaxCostly", "jax", TABLE),
    "fused": ("fused", "tests.envs.costly:JaxCostly", "jax", QUEUE),
    "fused-uniform": ("fused", "tests.envs.costly:JaxCostly", "jax", TABLE),
    "fused-game": ("fused", "tests.envs.costly:JaxCostlyGame", "jax", QUEUE),
}


def costs(topology, env, kind, replay, **changes):
    return Experiment(
        preset="costs",
        agent=costly.CostConfig(),
        env=EnvConfig(env, num_envs=4, type=kind),
        replay=replay,
        topology=topology,
        frames=1200,
        log_period=200,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        program=ProgramConfig(num_actors=1, launch="threads"),
        **changes,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_LATER if name.endswith(("uniform", "game")) else [])
        for name in PLACES
    ],
)
def test_the_learner_gets_the_extras_that_the_environments_made(name, tmp_path):
    running.run(costs(*PLACES[name]), tmp_path / "run")
    lines = [line for line in jsonl.read(tmp_path / "run/metrics.jsonl") if "learner/loss" in line]
    assert {line["learner/differing"] for line in lines} == {0}
    for end in ("firsts", "terminations", "truncations"):
        assert np.mean([line[f"learner/{end}"] for line in lines]) > 0.02
    assert 1 < np.mean([line["learner/level"] for line in lines]) < 3
    assert lines[-1]["learner/loss"] < 1  # it is about 9 for costs of 0


@pytest.mark.slow
@pytest.mark.chosen
def test_agents_go_on_after_a_resume(tmp_path):
    experiment = costs(*PLACES["single_process-uniform"])
    running.run(dataclasses.replace(experiment, frames=600), tmp_path / "run")
    train.resume(tmp_path / "run", frames=1200, stream=io.StringIO())
    lines = [line for line in jsonl.read(tmp_path / "run/metrics.jsonl") if "learner/loss" in line]
    assert lines[-1]["env_frames"] >= 1200
    assert {line["learner/differing"] for line in lines} == {0}


def test_recordings_keep_extras(tmp_path):
    rng = np.random.default_rng(0)
    with running.make_env(EnvConfig("tests.envs.costly:Costly", num_envs=3), seed=1) as pool:
        header = {"name": "costly", "type": "auto", "options": {}}
        path = tmp_path / "data"
        with DatasetWriter(path, pool.spec, 3, 100, env=header, source={}) as writer:
            timestep = pool.reset()
            while not writer.done:
                action = rng.integers(0, 3, 3).astype(np.int32)
                acted = costly.CostOutput(action)
                writer.add(None, Transition(timestep, acted, (), np.zeros(3, np.int32)))
                timestep = pool.step(action)
            writer.finish()
        found, _ = Dataset(path).read(np.arange(100), pool.spec)
    assert costly.differing(found) == 0
    assert found.extras["cost"].max() > 3


# The critic's entry is of the observation, or of the extras.
CRITICS = {
    "ppo": (PPOConfig(num_epochs=2, num_minibatches=2), QUEUE, {}),
    "ppo-recurrent": (
        PPOConfig(num_epochs=2, num_minibatches=2),
        QUEUE,
        {"core": "gru", "core_size": 5, "critic": CriticConfig(core="gru")},
    ),
    "sac": (SACConfig(), TABLE, {}),
}


def asymmetric(name, topology, kind, env):
    agent, replay, network = CRITICS[name]
    return dataclasses.replace(
        costs(topology, env, kind, replay),
        agent=agent,
        network=NetworkConfig(hidden_sizes=(8,), critic_observation="cost", **network),
        normalisation=NormalisationConfig(observations=True),
        frames=600,
    )


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        pytest.param("sac", "single_process", marks=_LATER),
        pytest.param("ppo-recurrent", "distributed", marks=_LATER),
        pytest.param("ppo", "fused", marks=_LATER),
        pytest.param("sac", "fused", marks=pytest.mark.slow),
        pytest.param("ppo-recurrent", "fused", marks=pytest.mark.slow),
    ],
)
def test_a_critic_that_sees_an_extra(name, topology, tmp_path):
    kind = "jax" if topology == "fused" else "auto"
    env = "tests.envs.costly:JaxCostly" if kind == "jax" else "tests.envs.costly:Costly"
    experiment = asymmetric(name, topology, kind, env)
    running.run(experiment, tmp_path / "run")
    policy = rlstack.load(tmp_path / "run")
    seen = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    prediction = policy.predict(seen)
    assert prediction.action.shape == (4,)
    train.resume(tmp_path / "run", frames=900, stream=io.StringIO())
    assert from_json(to_json(experiment)) == experiment


def test_the_policy_does_not_depend_on_the_extra_and_the_value_does():
    experiment = asymmetric("ppo", "single_process", "auto", "tests.envs.costly:Costly")
    spec = EnvSpec(costly.OBSERVATION, costly.ACTION, costly.EXTRAS)
    agent = make_agent(experiment, spec)
    assert agent.obs_spec is costly.OBSERVATION
    params = agent.initial_params(jax.random.PRNGKey(0))
    step = dummy_timestep(spec.observation, 2, spec.extras)
    key, state = jax.random.PRNGKey(1), agent.initial_state(2)
    other = step._replace(extras={**step.extras, "cost": np.array([3, -2], np.float32)})
    one, two = (agent.actor_step(key, params, x, state)[0] for x in (step, other))
    np.testing.assert_array_equal(one.action, two.action)
    np.testing.assert_array_equal(one.behaviour_log_prob, two.behaviour_log_prob)
    assert (np.asarray(one.value) != two.value).all()
    level = step._replace(extras={**step.extras, "level": np.array([3, 2], np.int32)})
    np.testing.assert_array_equal(one.value, agent.actor_step(key, params, level, state)[0].value)


def test_one_name_for_two_entries_is_an_error():
    experiment = asymmetric("ppo", "single_process", "auto", "tests.envs.costly:Costly")
    spec = EnvSpec({"cost": costly.OBSERVATION, "x": costly.OBSERVATION}, costly.ACTION)
    with pytest.raises(ValueError, match="critic_observation 'cost' must be the name of one entry"):
        make_agent(experiment, spec._replace(extras=costly.EXTRAS))
    with pytest.raises(ValueError, match="critic_observation must name an entry"):
        make_agent(experiment, spec._replace(observation=costly.OBSERVATION))
