"""The evaluator node evaluates once at the end, however late it learns that the run is over."""

import dataclasses
import threading

import jax
import pytest

from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.program.base import EVALUATING, Setup
from rlstack.programs.program.evaluator import EvaluatorNode
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import codec
from tests.programs.running import ppo


class Coordinator:
    """A coordinator that never reports that the run is over."""

    def __init__(self):
        self.judgements = []

    def report(self, *_):
        return {"phase": EVALUATING, "env_frames": 7, "checkpoints": 0, "evaluations": 0}

    def evaluated(self, env_frames, returns, lengths, last, opponents, cut, metrics):
        self.judgements.append((env_frames, len(returns), len(lengths), last, metrics))


class Learner:
    def __init__(self, params):
        self.params = codec.encode(params)

    def get_params(self, newer_than):
        return 0, self.params


@pytest.mark.timeout(60)
def test_the_last_judgement_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr("rlstack.programs.session.timing.REPORT_PERIOD", 0.0)
    experiment = ppo("heavy_env")
    with make_env(dataclasses.replace(experiment.env, num_envs=1), 0) as env:
        setup = Setup(experiment, RunDir(tmp_path), env.spec)
    learner = Learner(make_agent(experiment, env.spec).initial_params(jax.random.PRNGKey(0)))
    coordinator = Coordinator()
    EvaluatorNode(setup, {"": learner}, coordinator, threading.Event()).run()
    assert coordinator.judgements == [(7, 2, 2, True, {})]
