"""Evaluations whose period is auto: when they come, and how little they take from training."""

import dataclasses
import io
import types

import numpy as np
import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.build.evaluation import Allowance
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets import preset
from rlstack.programs.program.base import RUNNING, SAVING
from rlstack.programs.program.evaluator import EvaluatorNode
from rlstack.programs.run import run_session, train
from rlstack.programs.session.callbacks import Callback
from rlstack.replay import ReplayConfig
from tests.programs.running import metrics, params, same

EVALUATION = "evaluator/episode_return"


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 50.0
        module = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("rlstack.programs.build.evaluation.time", module)
        self.load = 0.0
        monkeypatch.setattr("rlstack.programs.build.evaluation._load", lambda: self.load)

    def allowance(self, **options):
        return Allowance(0.02, clock=lambda: self.now, **options)

    def evaluation(self, steps, seconds=0.01, start=0.0, compiling=0.0):
        """Returns an evaluation of this number of steps that takes this time."""

        def evaluate(progress):
            self.now += start
            progress(0, 1)
            for step in range(steps):
                self.now += seconds + (compiling if step == 0 else 0.0)
                progress(int(step == steps - 1), 1)
            return "found"

        return evaluate


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def always(ended, total):
    return True


def test_evaluations_take_no_more_than_their_share(clock):
    allowance, made, spent, began = clock.allowance(), 0, 0.0, clock.now
    for _ in range(1000):
        clock.now += 1.0
        before = clock.now
        made += allowance.evaluate(clock.evaluation(steps=50), always) is not None
        spent += clock.now - before
        assert spent <= 0.3 + 0.02 * (clock.now - began) + 0.02
    assert 0.8 * 20 / 0.5 < made <= 20.5 / 0.5  # each takes half a second


def test_an_evaluation_that_takes_too_long_is_given_up_and_not_tried_again_soon(clock):
    allowance, spent, begun = clock.allowance(), 0.0, []
    for second in range(1000):
        clock.now += 1.0
        before = clock.now
        assert allowance.evaluate(clock.evaluation(steps=100_000), always) is None
        if clock.now > before:
            begun.append(second)
        spent += clock.now - before
    assert spent < 0.3 + 0.02 * 1030
    assert 3 <= len(begun) < 8


def test_what_the_first_evaluation_compiles_does_not_count(clock):
    allowance = clock.allowance()
    assert allowance.evaluate(clock.evaluation(steps=3, compiling=60.0), always) == "found"
    assert allowance.left == pytest.approx(0.3 + 0.02 * 60.03 - 0.02)
    assert allowance.evaluate(clock.evaluation(steps=3, compiling=60.0), always) is None


def test_on_a_busy_machine_a_short_run_may_take_longer(clock):
    slow = clock.evaluation(steps=3, seconds=0.3)
    assert clock.allowance().evaluate(slow, always) is None
    clock.load = 4.0
    assert clock.allowance().evaluate(slow, always) == "found"


@pytest.mark.parametrize("starts_once", [False, True])
def test_making_environments_counts_unless_it_is_done_once(clock, starts_once):
    allowance = clock.allowance(starts_once=starts_once)
    found = allowance.evaluate(clock.evaluation(steps=3, start=2.0), always)
    assert found == ("found" if starts_once else None)


def test_periods_are_words_or_numbers():
    base = preset("cartpole-ppo")

    def period(value, frames):
        cfg = dataclasses.replace(base.evaluator, period=value)
        experiment = dataclasses.replace(base, evaluator=cfg, frames=frames)
        assert from_json(to_json(experiment)) == experiment
        return experiment.evaluation_period

    assert base.evaluator.period == "auto" and base.evaluation_period == base.frames // 10
    assert period("auto", 2_000) == 5_000  # a short run has the last evaluation only
    assert [period(value, 10**6) for value in ("auto", "off", 0, 700)] == [100_000, 0, 0, 700]
    with pytest.raises(
        ValueError, match="period must be a whole number or one of auto, off; got 'often'"
    ):
        EvaluatorConfig(period="often")


class Seen(Callback):
    """Keeps the number of episodes of each evaluation."""

    def __init__(self):
        self.episodes = []

    def on_evaluation(self, frames, evaluation):
        self.episodes.append((frames, len(evaluation.returns)))


def catch(topology, period):
    """PPO on Catch in JAX."""
    return Experiment(
        preset="catch",
        agent=PPOConfig(num_epochs=2, num_minibatches=2),
        env=EnvConfig("rlstack.jax_envs.toy:Catch", 8, "jax"),
        network=NetworkConfig(hidden_sizes=(16,)),
        replay=ReplayConfig(sampler="fifo", batch_size=8, unroll_length=32, max_size=16),
        frames=12_000,
        topology=topology,
        evaluator=EvaluatorConfig(episodes=6, num_envs=2, period=period),
        loggers=("jsonl",),
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["single_process", "fused"])
def test_evaluations_come_by_default_and_change_nothing(tmp_path, monkeypatch, topology):
    monkeypatch.setattr(run_session, "_SHARE", 10.0)  # also on a busy machine
    seen = Seen()
    for period in ("auto", "off"):
        called = [seen] if period == "auto" else []
        out, directory = io.StringIO(), tmp_path / period
        train.run(catch(topology, period), directory, callbacks=called, stream=out)
    assert same(params(tmp_path / "auto"), params(tmp_path / "off"))
    auto, off = (
        [line for line in metrics(tmp_path / name) if EVALUATION in line]
        for name in ("auto", "off")
    )
    assert [line["env_frames"] // 1000 for line in auto] == [5, 10, 12]
    assert auto[-1][EVALUATION] == off[-1][EVALUATION] and len(off) == 1
    assert [episodes for _, episodes in seen.episodes] == [2, 2, 6]


def node(phases):
    """An evaluator's node in a program that goes through these phases."""
    made = object.__new__(EvaluatorNode)
    made._allowance = Allowance(1.0)
    states = iter(phases)
    made._program = types.SimpleNamespace(poll=lambda: types.SimpleNamespace(phase=next(states)))

    def evaluate(params, progress, brief):
        assert brief
        for step in range(4):
            progress(step, 3)
        return np.array(params)

    made._evaluate_params = evaluate
    return made


def test_a_program_that_ends_does_not_wait_for_an_evaluation():
    assert node([RUNNING] * 4)._evaluate_briefly(7) == 7
    assert node([RUNNING, RUNNING, SAVING])._evaluate_briefly(7) is None
