"""Budgets, stop rules, loggers and evaluators of a user's own in programs of several nodes."""

import dataclasses
import json

import pytest

from programs.stop_config import StopConfig
from rlstack.acting.evaluator import EvaluatorConfig
from rlstack.exploration import PolicyConfig
from rlstack.storage import checkpoint
from tests.programs.hooks import own
from tests.programs.running import metrics, nothing_left, ppo, run

pytest.importorskip("launchpad")
pytestmark = [
    pytest.mark.reference,
    pytest.mark.slow,
    pytest.mark.chosen,
    pytest.mark.timeout(120, method="thread"),
]
OWN = "tests.programs.hooks.own"


@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_hooks_work_where_nodes_are_processes(tmp_path, topology):
    experiment = ppo(
        topology,
        frames=10**6,
        program={"launch": "processes"},
        policy=PolicyConfig("softmax", start=0.5),
        loggers=("jsonl", "tensorboard", "terminal", own.Lines, f"{OWN}:Failing"),
        stop=StopConfig(factory=own.After),
    )
    cfg = EvaluatorConfig(episodes=2, num_envs=2, factory=own.Shortest)
    with nothing_left():
        result = run(dataclasses.replace(experiment, evaluator=cfg), tmp_path / "run")
    assert result.ended_by == f"{OWN}:After: enough updates"
    assert result.eval_episodes == 1
    written = [json.loads(line) for line in (tmp_path / "run" / "own.jsonl").open()]
    assert written[-1] == {"closed": True}
    steps = [line["env_frames"] for line in metrics(tmp_path / "run")]
    assert [line["step"] for line in written[:-1]] == steps
    (best,) = checkpoint.paths(tmp_path / "run" / "checkpoints" / "best")
    told = checkpoint.read_metadata(best)
    assert told["eval_return_mean"] == result.eval_return_mean


@pytest.mark.parametrize("pacing", ["asynchronous", "lock_step"])
def test_a_program_makes_exactly_its_updates(tmp_path, pacing):
    experiment = ppo("heavy_env", frames=10**6, updates=5, program={"pacing": pacing})
    with nothing_left():
        result = run(experiment, tmp_path / "run")
    assert (result.learner_steps, result.ended_by) == (5, "updates")
