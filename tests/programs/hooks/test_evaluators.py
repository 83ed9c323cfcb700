"""Evaluation by index, the best checkpoint, evaluators of the user's own, and the matrix."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from rlstack.acting.evaluator import Evaluation
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.build import opponents
from rlstack.programs.build.best import BestCheckpoint
from rlstack.programs.build.environments import make_evaluation_env
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from rlstack.programs.cli.commands import main
from rlstack.programs.cli.env_options import take_vary
from rlstack.programs.run import evaluation, train
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from tests.programs.hooks import own
from tests.programs.running import metrics, ppo

OWN = "tests.programs.hooks.own"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with two evaluations, judged by its shortest episode."""
    experiment = ppo("single_process", frames=2000)
    cfg = EvaluatorConfig(episodes=4, num_envs=2, period=1000, factory=own.Shortest)
    directory = tmp_path_factory.mktemp("judged") / "run"
    experiment = dataclasses.replace(experiment, evaluator=cfg)
    result = train.run(experiment, directory, stream=io.StringIO())
    assert result.eval_episodes == 1
    return directory


@pytest.mark.slow
@pytest.mark.chosen
def test_ones_own_evaluator_judges_and_its_numbers_are_logged(run_dir):
    judged = [line for line in metrics(run_dir) if "evaluator/episode_return" in line]
    assert len(judged) == 2
    for line in judged:
        assert line["evaluator/episode/longest"] >= line["evaluator/episode_return"]


def test_the_best_params_are_kept_and_used(run_dir, capsys):
    (path,) = checkpoint.paths(run_dir / "checkpoints" / "best")
    told = checkpoint.read_metadata(path)
    judged = [line for line in metrics(run_dir) if "evaluator/episode_return" in line]
    best = max(line["evaluator/episode_return"] for line in judged)
    result = json.loads((run_dir / "result.json").read_text())
    assert told["eval_return_mean"] == max(best, result["eval_return_mean"])
    assert main("eval", [str(run_dir), "--params", "best"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_return_mean"] == told["eval_return_mean"]
    # An opponent may be the best checkpoint.
    assert opponents.checkpoint_of(run_dir / "checkpoints" / "best", "opponents") == path
    assert opponents._names((str(run_dir / "checkpoints" / "best"),)) == [
        f"run@{told['env_frames']}"
    ]


def test_only_a_better_return_replaces_the_best(tmp_path):
    directory = RunDir(tmp_path)

    def offer(best, frames, *returns):
        best.offer(frames, {"w": np.ones(2)}, Evaluation(np.array(returns), np.array([1, 1])))
        return [checkpoint.read_metadata(p)["step"] for p in checkpoint.paths(directory.best)]

    first = BestCheckpoint(directory)
    assert offer(first, 500, 1.0, 3.0) == [500]
    assert offer(first, 600, 2.0, 2.0) == [500]
    assert offer(first, 700, np.nan, 9.0) == [500]
    # A resumed run may be at earlier frames; it knows the best of the command before it.
    again = BestCheckpoint(directory)
    assert offer(again, 100, 1.0, 2.0) == [500]
    assert offer(again, 200, 5.0, 6.0) == [200]


@pytest.mark.parametrize("kind", ["cpp", "for_loop", "thread"])
def test_episodes_by_index_depend_on_neither_params_nor_the_number_of_environments(kind):
    experiment = ppo("single_process", env={"type": kind})

    def first_steps(num_envs, key):
        cfg = EvaluatorConfig(episodes=6, num_envs=num_envs, by_index=True)
        judged = dataclasses.replace(experiment, evaluator=cfg)
        with make_evaluation_env(judged) as env:
            evaluator = make_evaluator(judged, env.spec)
        seen = []
        play = evaluator.evaluate

        def noted(params, env, progress):
            start = env.reset

            def reset():
                timestep = start()
                seen.append(timestep.observation)
                return timestep

            env.reset = reset
            return play(params, env, progress)

        evaluator.evaluate = noted
        params = evaluator.agent.initial_params(jax.random.PRNGKey(key))
        found = evaluate(judged, evaluator, params)
        assert len(found.returns) == len(found.lengths) == 6
        return np.concatenate(seen), found.returns

    starts, returns = first_steps(3, key=0)
    fewer, same = first_steps(2, key=0)
    others, different = first_steps(3, key=1)
    assert np.array_equal(starts, fewer) and np.array_equal(starts, others)
    assert np.array_equal(returns, same)
    assert not np.array_equal(returns, different)
    assert len(np.unique(starts, axis=0)) == 6


def test_the_matrix_has_a_line_for_each_combination(run_dir, capsys):
    name = "env.options.max_episode_steps"  # or without the prefix
    args = ["--vary", name, "5", "7", "--episodes", "2", "--by-index", "True"]
    assert main("eval", [str(run_dir), *args]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["options"] for line in lines] == [
        {"max_episode_steps": 5},
        {"max_episode_steps": 7},
    ]
    assert [line["eval_return_mean"] for line in lines] == [5.0, 7.0]
    with pytest.raises(ValueError, match="no_such"):
        list(evaluation.matrix(run_dir, {"no_such": [1]}))
    with pytest.raises(
        ValueError, match=r"eval_options must be names of arguments; got .*env\.name"
    ):
        list(evaluation.matrix(run_dir, {"env.name": ["Acrobot-v1"]}))
    with pytest.raises(ValueError, match="--vary: must be the name of an option"):
        take_vary(["RUN", "--vary", "length"])
    assert take_vary(["RUN", "--vary", "a", "1", "x", "--seed", "2"]) == (
        {"a": [1, "x"]},
        ["RUN", "--seed", "2"],
    )
