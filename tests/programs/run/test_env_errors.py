"""Runs in one process whose environments fail: what is saved, and what the user reads."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest

from rlstack.acting.evaluator import Evaluator
from rlstack.checks import EnvCrash, EnvError, ExitError, WrongKindError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.__main__ import main
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session.callbacks import Callback
from rlstack.storage import checkpoint

FAULTY = "tests.envs.faulty:Faulty"
pytestmark = pytest.mark.timeout(120)


def faulty(frames=2000, **options):
    env = EnvConfig(
        FAULTY, num_envs=4, type="for_loop", options=options, eval_options={"fault": "none"}
    )
    return dataclasses.replace(
        preset("cartpole-ppo"),
        env=env,
        frames=frames,
        log_period=100,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("fault", "error", "text", "frames"),
    [
        (
            "raise",
            EnvCrash,
            r"Env \d \(Faulty\): step raised ArithmeticError.*faulty\.py:\d+: raise Arith.*\)",
            792,
        ),
        ("nan", EnvError, r"Env \d \(\S*Faulty\): the reward must be finite", 796),
    ],
)
def test_an_error_in_a_step_is_raised_after_everything_is_saved(
    tmp_path, fault, error, text, frames
):
    run_dir, flag = tmp_path / "run", tmp_path / "flag"
    # Numbers from a step are checked when the actor takes it, so the step before it has counted.
    # The episodes of other environments are short, so that no flag is needed to come this far.
    experiment = faulty(fault=fault, at=200, length=200, flag=str(flag))
    with pytest.raises(error, match=rf"{text}(.|\n)*saved at frame {frames}.*--resume {run_dir}"):
        train.run(experiment, run_dir, stream=io.StringIO())
    saved = checkpoint.latest(run_dir / "checkpoints")
    assert checkpoint.read_metadata(saved)["env_frames"] == frames
    assert not (run_dir / "result.json").exists()
    result = train.resume(run_dir, stream=io.StringIO())  # the flag exists: no second fault
    assert result.env_frames >= 2000
    assert result.learner_steps >= 6  # 4 without the updates of the first part


def test_an_error_before_the_first_frame_does_not_promise_a_checkpoint(tmp_path):
    with pytest.raises(EnvCrash, match=r"told to fail") as caught:
        train.run(faulty(fault="raise", at=1), tmp_path / "run", stream=io.StringIO())
    assert "saved" not in str(caught.value)


def test_a_process_pool_goes_on_and_counts_its_restarts(tmp_path):
    experiment = faulty(400, fault="raise", at=5, flag=str(tmp_path / "flag"))
    env = dataclasses.replace(experiment.env, type="process", num_workers=1)
    loop = SingleProcessRun(dataclasses.replace(experiment, env=env))
    try:
        for _ in range(20):
            loop.player.actor.step()
        assert loop.stats()["env/restarts"] == 1
    finally:
        loop.close()


def test_the_options_of_pools_reach_them():
    env = dataclasses.replace(
        faulty().env, type="process", num_workers=1, step_timeout=7.0, start_timeout=8.0,
        max_restarts=2, restart_window=9.0, check_finite=False,
    )  # fmt: skip
    with make_env(env, 0) as pool:
        cfg = pool._config
    assert (cfg.step_timeout, cfg.start_timeout, cfg.max_restarts) == (7.0, 8.0, 2)
    assert (cfg.restart_window, cfg.check_finite) == (9.0, False)


@pytest.mark.slow
@pytest.mark.chosen
def test_an_endless_environment_does_not_hang_the_evaluation(tmp_path):
    experiment = faulty(length=10**9)
    experiment = dataclasses.replace(
        experiment, evaluator=EvaluatorConfig(episodes=2, num_envs=2, max_steps=50)
    )
    stream = io.StringIO()
    result = train.run(experiment, tmp_path / "run", stream=stream)
    assert result.eval_return_mean == 50
    assert "evaluating" in stream.getvalue()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--env.name", "builtins:dict"], "must return a gymnasium.Env or a dm_env.Environment"),
        (["--env.name", "rlstack.jax_envs.toy:Catch"], "environments in JAX need --env.type jax"),
        (["--env.name", "brax/ant"], "names an environment in JAX, which needs --env.type jax"),
        (["--env.name", "Catch-bsuite"], "names an environment in JAX, which needs --env.type jax"),
        (["--env.name", "builtins:len"], "the builder raised TypeError"),
        (["--env.name", "math:pi"], "must name a callable"),
        (["--env.name", FAULTY, "--env.type", "cpp"], "must be an id of EnvPool"),
        (["--network-factory", "math:pi"], "Network or PolicyAndCritic of rlstack.networks; got"),
        (["--network-factory", "rlstack.exploration:Sample"], "does not take these arguments"),
        (["--network-factory", "operator:eq"], "it returned bool"),
        (["--policy-factory", "math:pi"], "() -> Policy of rlstack.exploration; got float"),
        (["--policy-factory", "time:time"], "it returned float"),
        (["--env.name", "tests.envs.toy:PointMass"], "PPO"),
    ],
)
def test_an_object_of_a_wrong_kind_is_one_line(args, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "cartpole-dqn" if text == "PPO" else "cartpole-ppo"
    text = "one discrete choice" if text == "PPO" else text
    code = main(["train", name, *args, "--frames", "10", "--run-dir", str(tmp_path / "run")])
    shown = capsys.readouterr().err
    assert code == 1
    assert "Traceback" not in shown
    line = shown.strip().splitlines()[-1]
    assert line.startswith("rlstack train: ") and text in line


def test_a_factory_of_a_wrong_kind_is_a_type_error():
    experiment = dataclasses.replace(preset("cartpole-ppo"), policy_factory="builtins:int")
    with make_env(dataclasses.replace(experiment.env, num_envs=1), 0) as env:
        with pytest.raises(WrongKindError, match="policy_factory builtins:int must be") as caught:
            make_agent(experiment, env.spec)
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("fault_at", [1, 5])
def test_an_exit_in_a_step_ends_as_an_error_does(tmp_path, fault_at, capsys):
    options = ("fault", "leave", "at", str(fault_at))
    command = (
        *("train", "cartpole-ppo", "--run-dir", str(tmp_path / "run"), "--frames", "400"),
        *("--env.name", FAULTY, "--env.type", "for_loop", "--env.num-envs", "4"),
        *("--env.options", *options, "--env.eval-options", "fault", "none"),
    )
    assert main(command) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "SystemExit" in x]
    assert "step raised SystemExit: 0" in line and "faulty.py:" in line
    assert bool(checkpoint.latest(tmp_path / "run" / "checkpoints")) == (fault_at > 1)


def leave(*_):
    sys.exit(0)


class LeavingPart:
    """Whatever an option names; each of its functions exits."""

    def __init__(self, *_):
        pass

    __call__ = write = leave


class LeavingCallback(Callback):
    on_update = leave


class LeavingEvaluator(Evaluator):
    evaluate = leave


HERE = "tests.programs.run.test_env_errors:"


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"step_processor": f"{HERE}LeavingPart"}, False),  # before the first frame is counted
        ({"evaluator": EvaluatorConfig(episodes=10, factory=f"{HERE}LeavingEvaluator")}, True),
        ({"step_processor": f"{HERE}leave"}, False),
        ({"network_factory": f"{HERE}leave"}, False),
    ],
)
def test_an_exit_of_a_hook_is_an_error_with_its_line(tmp_path, options, saved):
    experiment = dataclasses.replace(faulty(400), **options)
    with pytest.raises(ExitError, match=r"SystemExit: 0 \(in \S*test_env_errors.py:\d+: sys.exit"):
        train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert bool(checkpoint.latest(tmp_path / "run" / "checkpoints")) == saved


class FailingPart:
    """A step processor or evaluator that raises an ordinary exception after some calls."""

    def __init__(self, *_):
        self._calls = 0

    def __call__(self, step):
        self._calls += 1
        if self._calls > 200:
            raise RuntimeError("a mistake of the user's")
        return step


class FailingEvaluator(Evaluator):
    def evaluate(self, *_):
        raise KeyError("a mistake of the user's")


def at_first(_num_envs):
    def process(_step):
        raise RuntimeError("a mistake of the user's")

    return process


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"step_processor": f"{HERE}FailingPart"}, True),
        (
            {
                "evaluator": EvaluatorConfig(
                    episodes=10, period=1200, factory=f"{HERE}FailingEvaluator"
                )
            },
            True,
        ),
        ({"step_processor": f"{HERE}at_first"}, False),  # nothing is learned that could be lost
    ],
)
def test_a_run_is_saved_after_an_exception_of_a_hook(tmp_path, options, saved):
    stream = io.StringIO()
    experiment = dataclasses.replace(faulty(4000), **options)
    with pytest.raises((RuntimeError, KeyError), match="a mistake of the user's"):
        train.run(experiment, tmp_path / "run", stream=stream)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert bool(newest) == saved
    told = "To continue it: rlstack train --resume" in stream.getvalue()
    assert told == saved


def test_an_exit_of_a_callback_or_a_logger_is_told_and_the_run_goes_on(tmp_path):
    stream = io.StringIO()
    experiment = dataclasses.replace(faulty(400), loggers=("jsonl", f"{HERE}LeavingPart"))
    train.run(experiment, tmp_path / "run", callbacks=[LeavingCallback()], stream=stream)
    told = stream.getvalue()
    assert "callback LeavingCallback.on_update raised ExitError: SystemExit: 0 (in " in told
    assert "LeavingPart raised ExitError: SystemExit: 0 (in " in told
