"""An agent that counts in replay how often it learned from a step, in each topology."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.registry import register
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import actor_critic
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.fused_config import FusedConfig
from rlstack.replay import ReplayConfig
from rlstack.types import LearnerOutput
from tests.envs import costly
from tests.programs import running

pytestmark = pytest.mark.timeout(120)


@dataclasses.dataclass(frozen=True)
class CountConfig:
    """Nothing to choose."""


class Output(NamedTuple):
    action: Any
    visits: Any


@register(CountConfig, network=actor_critic)
class CountAgent(costly.CostAgent):
    """Acts at random, and adds 1 to all steps that it learns from."""

    writes_back = True

    def actor_step(self, rng_key, params, timestep, state):
        output, state = super().actor_step(rng_key, params, timestep, state)
        return Output(output.action, jnp.zeros(timestep.reward.shape, jnp.int32)), state

    def learner_step(self, params, learner_state, batch):
        visits = batch.trajectory.agent_output.visits
        logs = {"loss": params.sum(), "visits": visits.mean(), "most": visits.max() * 1.0}
        return params, learner_state, LearnerOutput(logs, updates=Output(None, visits + 1))


def counting(topology, **changes):
    replay = {"service": "table"} if topology == "distributed" else {}
    return Experiment(
        preset="counts",
        agent=CountConfig(),
        env=EnvConfig("tests.envs.costly:JaxCostly", num_envs=4, type="jax"),
        replay=ReplayConfig(
            **{
                "sampler": "uniform",
                "batch_size": 16,
                "unroll_length": 1,
                "max_size": 100,
                "samples_per_insert": 8.0,
                **replay,
                **changes,
            }
        ),
        topology=topology,
        frames=1200,
        log_period=200,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        fused=FusedConfig(call_seconds=1e-4),  # a call writes one line of logs: many short calls
        program=ProgramConfig(num_actors=1, launch="threads", pacing="lock_step"),
    )


@pytest.mark.parametrize(
    "topology",
    [
        "single_process",
        "fused",
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.chosen])
            for name in ("distributed", "heavy_env", "light_env")
        ),
    ],
)
def test_steps_know_how_often_they_were_learned_from(topology, tmp_path):
    """A step is in two items, each drawn about eight times while it is held: 8 on average."""
    with running.nothing_left():
        running.run(counting(topology), tmp_path / "run")
    visits = running.series(tmp_path / "run", "learner/visits")[1:]
    assert 4 < np.mean(visits) < 9
    assert max(running.series(tmp_path / "run", "learner/most")) > 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"service": "reverb"}, "replay.service must be table for CountAgent"),
        ({"sampler": "fifo", "samples_per_insert": None}, "replay.sampler must be uniform or"),
    ],
)
def test_what_cannot_be_written_to_is_refused(changes, message):
    experiment = counting("distributed", **changes)
    with running.make_env(experiment.env, 0) as env:
        spec = env.spec
    with pytest.raises(ValueError, match=f"Experiment: {message}"):
        make_agent(experiment, spec)
