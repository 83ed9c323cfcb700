"""Behaviour cloning reaches its experts' returns from datasets of `rlstack record`."""

import dataclasses
import io
import statistics

import jax.numpy as jnp
import pytest

from rlstack.agents.bc import BCConfig
from rlstack.agents.fixed import ScriptedConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.run.offline import resolve_dataset
from rlstack.programs.run.record import record
from tests.learning.test_learning import SEEDS, toy


def catch(observation):
    """A rule for Catch: the paddle goes under the ball."""
    ball = observation[:, :-1].max(axis=1).argmax(axis=-1)
    paddle = observation[:, -1].argmax(axis=-1)
    return jnp.sign(ball - paddle) + 1


def cloned(experiment, data, directory, **changes):
    """Trains from a dataset; returns the result."""
    experiment = dataclasses.replace(experiment, data=str(data), **changes)
    return train.run(resolve_dataset(experiment), directory, stream=io.StringIO())


@pytest.mark.slow
@pytest.mark.chosen
def test_a_rule_for_catch_is_cloned(tmp_path):
    rule = ScriptedConfig("tests.learning.test_bc_learning:catch")
    expert = train.run(toy("Catch", rule, frames=256), tmp_path / "expert", stream=io.StringIO())
    assert expert.eval_return_mean == 1.0
    data, _ = record(tmp_path / "expert", frames=3_000)
    result = cloned(
        preset("bc"),
        data,
        tmp_path / "bc",
        env=toy("Catch", rule, frames=256).env,  # a function, which a dataset alone may not name
        agent=BCConfig(optimizer=OptimizerConfig(learning_rate=3e-3)),
        frames=60_000,
    )
    assert result.eval_return_mean > 0.9


def returns_from(data, tmp_path):
    found = [
        cloned(preset("cartpole-bc"), data, tmp_path / f"bc-{seed}", seed=seed).eval_return_mean
        for seed in SEEDS
    ]
    print(f"cartpole-bc: {found}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cartpole_is_cloned_from_20k_frames_of_ppo(tmp_path):
    expert = train.run(preset("cartpole-ppo"), tmp_path / "ppo", stream=io.StringIO())
    assert expert.eval_return_mean >= 499
    data, header = record(tmp_path / "ppo", frames=20_000)
    assert header.frames < 26_000
    assert statistics.median(returns_from(data, tmp_path)) >= 475


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cartpole_is_cloned_from_a_rule(tmp_path):
    rule = dataclasses.replace(preset("cartpole-scripted"), frames=1_000)
    assert train.run(rule, tmp_path / "rule", stream=io.StringIO()).eval_return_mean == 500
    data, _ = record(tmp_path / "rule", frames=20_000)
    assert statistics.median(returns_from(data, tmp_path)) >= 475
