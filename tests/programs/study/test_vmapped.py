"""Runs in one compiled program learn what each learns alone, and leave the same files."""

import dataclasses
import io
import json
import os
import signal

import numpy as np
import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.learning.learner import NonFiniteError
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.run import train as single
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.study import train, vmapped
from rlstack.programs.study.study import FailedTrialsError, Study
from rlstack.storage import checkpoint
from tests.fused.test_fused_run import dqn, ppo
from tests.programs.running import nothing_left, params, series

RATE = "agent.optimizer.learning_rate"
BSUITE, RETURN_AND_REGRET = "rlstack.jax_envs.bsuite", ("actor/episode_return", "episode/regret")


def go(study, directory, **options):
    return train.run(study, directory, stream=io.StringIO(), **options)


def files(directory):
    """The names of a run's files, without its checkpoints' frames."""
    return sorted(path.name for path in directory.iterdir() if path.name != "replay")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two seeds with two learning rates, in one program."""
    root = tmp_path_factory.mktemp("sets") / "set"
    base = ppo(
        evaluator=EvaluatorConfig(episodes=2, num_envs=2, period=700), updates=0, frames=1200
    )
    out = io.StringIO()
    with nothing_left():
        ended = train.run(Study(base, (1, 2), {RATE: (1e-3, 1e-2)}), root, stream=out)
    return base, root, ended, out.getvalue()


@pytest.mark.slow
@pytest.mark.chosen
def test_each_run_learns_what_it_learns_alone(trained, tmp_path):
    base, root, ended, _ = trained
    for one in ended[1], ended[2]:
        experiment = Study(base, (1,)).experiment(one.values, one.seed)
        alone = single.run(experiment, tmp_path / one.name, stream=io.StringIO())
        result = one.result
        assert (result.env_frames, result.learner_steps) == (alone.env_frames, alone.learner_steps)
        assert result.eval_return_mean == alone.eval_return_mean
        assert result.seed == experiment.seed
        wanted, found = params(tmp_path / one.name), params(root / one.name)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)
        assert files(root / one.name) == files(tmp_path / one.name)
        # Evaluations are due in the same iterations.
        name = "evaluator/episode_return"
        assert len(series(root / one.name, name)) == len(series(tmp_path / one.name, name)) == 2
        saved, other = (
            sorted(path.name for path in checkpoint.paths(d / "checkpoints"))
            for d in (root / one.name, tmp_path / one.name)
        )
        assert saved == other
    assert len({float(np.sum(params(root / one.name)[0])) for one in ended}) == 4


@pytest.mark.slow
@pytest.mark.chosen
def test_the_report_has_intervals_for_each_value(trained):
    _, root, ended, text = trained
    assert "one program trains those that differ in the seed, agent.optimizer.learning_rate" in text
    report = (root / "report.md").read_text()
    lines = report.split("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("| catch-fused learning_rate=")]
    assert len(rows) == 2
    for row in rows:
        assert "[" in row and "1: " in row and "2: " in row
    assert str(root / "report.md") in text
    for name in ("report.md", "report.html"):  # they can be shared
        found = (root / name).read_text()
        assert str(root.parent) not in found
        assert f"rlstack report {root.name}" in found
    config = json.loads((root / ended[0].name / "config.json").read_text())
    assert config["agent"]["optimizer"]["learning_rate"] == 1e-3


@pytest.mark.slow
@pytest.mark.chosen
def test_a_finished_set_stays_as_it_is_and_goes_on_with_a_new_budget(trained, tmp_path):
    _, root, ended, _ = trained
    before = {
        root / one.name: (root / one.name / "result.json").stat().st_mtime_ns for one in ended
    }
    again = train.resume(root, stream=io.StringIO())
    assert [one.result for one in again] == [one.result for one in ended]
    assert before == {path: (path / "result.json").stat().st_mtime_ns for path in before}
    longer = train.resume(root, {"frames": 2000}, stream=io.StringIO())
    assert all(one.result.env_frames >= 2000 for one in longer)
    # One of them is continued alone, from its own directory.
    alone = single.resume(root / longer[0].name, frames=2500, stream=io.StringIO())
    assert alone.env_frames >= 2500


@pytest.mark.slow
@pytest.mark.chosen
def test_dqn_runs_learn_what_they_learn_alone(tmp_path):
    base = dqn(updates=60)
    ended = go(Study(base, (1, 2, 3)), tmp_path / "set")
    for one in ended[::2]:
        alone = tmp_path / one.name
        result = single.run(Study(base, (1,)).experiment({}, one.seed), alone, stream=io.StringIO())
        assert result.env_frames == one.result.env_frames
        assert result.learner_steps == one.result.learner_steps == 60
        for x, y in zip(params(tmp_path / "set" / one.name), params(alone), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.slow
@pytest.mark.chosen
def test_runs_in_other_environments_learn_what_they_learn_alone(tmp_path):
    """Their options are numbers that only enter the computation; the sizes of arrays stay."""
    base = ppo(updates=40)
    base = dataclasses.replace(base, env=EnvConfig(f"{BSUITE}:MemoryChain", num_envs=8, type="jax"))
    length, scale = "env.options.memory_length", "env.options.reward_scale"
    assert vmapped.can_trace(base, length, (1, 4))
    assert not vmapped.can_trace(base, "env.options.num_bits", (1, 4))
    out = io.StringIO()
    values = {length: (1, 4), scale: (0.5, 2.0)}
    ended = train.run(Study(base, (1,), values), tmp_path / "set", stream=out)
    assert f"differ in the seed, {length}, {scale} only" in out.getvalue()
    for one in ended:
        run = tmp_path / "set" / one.name
        assert set(series(run, "actor/episode_length")) == {one.values[length] + 1}
        for mean, regret in zip(*map(series, [run] * 2, RETURN_AND_REGRET), strict=True):
            assert mean == pytest.approx(one.values[scale] * (1 - regret), abs=1e-5)
    for one in ended[1:3]:
        experiment = Study(base, (1,)).experiment(one.values, one.seed)
        alone = single.run(experiment, tmp_path / one.name, stream=io.StringIO())
        assert alone.env_frames == one.result.env_frames
        assert alone.eval_return_mean == one.result.eval_return_mean
        for x, y in zip(
            params(tmp_path / "set" / one.name), params(tmp_path / one.name), strict=True
        ):
            np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.slow
@pytest.mark.chosen
def test_options_that_cannot_be_traced_have_programs_of_their_own(tmp_path):
    base = ppo(updates=3)
    assert vmapped.can_trace(base, RATE, (1e-3, 1e-2))
    assert vmapped.can_trace(base, "agent.gae_lambda", (0.9, 0.95))
    assert not vmapped.can_trace(base, "agent.num_epochs", (1, 2))  # the length of a schedule
    assert not vmapped.can_trace(base, "agent.max_grad_norm", (0.5, 1.0))  # a condition in Python
    assert not vmapped.can_trace(base, "network.norm", ("none", "layer"))
    assert not vmapped.can_trace(base, "env.num_envs", (4, 8))
    out = io.StringIO()
    study = Study(base, (1, 2), {"agent.num_epochs": (1, 2)})
    ended = train.run(study, tmp_path / "set", stream=out)
    assert "there is one for each value of agent.num_epochs" in out.getvalue()
    assert [one.result.learner_steps for one in ended] == [3] * 4


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_that_gives_nan_does_not_end_the_others(tmp_path):
    base = ppo(updates=5)
    with pytest.raises(FailedTrialsError, match=r"1 of 2 runs failed(?s:.*)rlstack rerun"):
        go(Study(base, (1,), {RATE: (1e-3, 1e30)}), tmp_path / "set")
    good, bad = sorted(path for path in (tmp_path / "set").iterdir() if "seed=1" in path.name)
    assert (good / "result.json").exists() and not (bad / "result.json").exists()
    (dump,) = bad.glob("dump-*")
    assert not np.isfinite(list(single.rerun(dump).values())).all()
    assert issubclass(NonFiniteError, ArithmeticError)


@pytest.mark.slow
@pytest.mark.chosen
def test_an_interrupted_set_is_resumed_where_it_was(tmp_path, monkeypatch):
    calls = []
    call = vmapped.VmappedRuns.call

    def interrupting(self, *args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return call(self, *args)

    base = ppo(updates=40)
    with monkeypatch.context() as patch:
        patch.setattr(vmapped.VmappedRuns, "call", interrupting)
        with pytest.raises(Interrupted):
            go(Study(base, (1, 2)), tmp_path / "set")
    saved = [tmp_path / "set" / f"seed={seed}" for seed in (1, 2)]
    assert all(checkpoint.latest(path / "checkpoints") for path in saved)
    ended = train.resume(tmp_path / "set", stream=io.StringIO())
    whole = go(Study(base, (1, 2)), tmp_path / "whole")
    for one, other in zip(ended, whole, strict=True):
        assert one.result.learner_steps == other.result.learner_steps == 40
        assert one.result.env_frames == other.result.env_frames
        for x, y in zip(
            params(tmp_path / "set" / one.name),
            params(tmp_path / "whole" / other.name),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_eight_seeds_of_ppo_solve_catch(tmp_path):
    agent = PPOConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    base = dataclasses.replace(ppo(updates=0, frames=40_000), agent=agent)
    ended = go(Study(base, tuple(range(1, 9))), tmp_path / "set")
    assert min(one.result.eval_return_mean for one in ended) >= 0.9
