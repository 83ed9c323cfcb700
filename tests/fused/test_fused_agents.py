"""Every agent runs in the topology fused, and agents learn there."""

import dataclasses
import io

import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents import AGENTS
from rlstack.agents.alphazero import AlphaZeroConfig
from rlstack.agents.fixed import ScriptedConfig
from rlstack.agents.maddpg import MADDPGConfig
from rlstack.agents.qmix import QMIXConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import PRESETS, preset
from rlstack.programs.run import train
from tests.programs.running import series, with_recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_TOYS = "tests.jax_envs.toy:"


def stay(observation):
    """A rule for Catch."""
    return jnp.ones(len(observation), jnp.int32)


def presets():
    """The first preset of each agent that learns by acting, on small environments."""
    found = {}
    for name in PRESETS:
        kind = type(preset(name).agent)
        if not AGENTS[kind].offline and not preset(name).may_convolve:
            found.setdefault(kind, name)
    return found


def tiny(name):
    experiment = preset(name)
    continuous = any(x in experiment.env.name.lower() for x in ("pendulum", "hopper", "cheetah"))
    env = EnvConfig(
        _TOYS + ("PointMass" if continuous else "Catch"), experiment.env.num_envs, "jax"
    )
    agent, replay = experiment.agent, experiment.replay
    if isinstance(agent, AlphaZeroConfig | QMIXConfig | MADDPGConfig):
        env = experiment.env  # its model, or joint rows
    if isinstance(agent, ScriptedConfig):
        agent = ScriptedConfig("tests.fused.test_fused_agents:stay")
    if replay.sampler != "fifo":
        replay = dataclasses.replace(
            replay, batch_size=16, min_size=100, max_size=2000, samples_per_insert=1.0
        )
    return dataclasses.replace(
        experiment,
        agent=agent,
        env=env,
        replay=replay,
        topology="fused",
        frames=max(1500, 4 * env.num_envs * replay.unroll_length),
        log_period=500,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
    )


@pytest.mark.parametrize("name", presets().values())
def test_the_agent_runs(tmp_path, name):
    experiment = with_recorded(tiny(name), tmp_path / "data")
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert result.env_frames >= 1500
    losses = series(tmp_path / "run", "learner/loss")
    assert losses or name in ("cartpole-random", "cartpole-scripted")  # these do not learn
    assert np.isfinite(losses).all()


def learned(experiment, directory):
    return train.run(experiment, directory, stream=io.StringIO()).eval_return_mean


@pytest.mark.chosen
def test_ppo_learns_to_catch(tmp_path):
    experiment = preset("cartpole-ppo")
    env = EnvConfig(_TOYS + "Catch", 8, "jax", options={"rows": 6})
    experiment = dataclasses.replace(experiment, env=env, topology="fused", frames=40_000)
    assert learned(experiment, tmp_path / "run") >= 0.9


@pytest.mark.chosen
@pytest.mark.parametrize("name", ["gymnax-cartpole-ppo"])
def test_cartpole_is_solved(tmp_path, name):
    pytest.importorskip("gymnax")
    assert learned(preset(name), tmp_path / "run") >= 475


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("agent", ["dqn", "pqn"])
def test_agents_of_action_values_solve_cartpole(tmp_path, agent, seed):
    pytest.importorskip("gymnax")
    experiment = dataclasses.replace(preset(f"gymnax-cartpole-{agent}"), seed=seed)
    assert learned(experiment, tmp_path / "run") >= 475
