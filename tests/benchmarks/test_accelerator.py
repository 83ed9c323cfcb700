"""The benchmark of accelerators in its small form, on the CPU."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import fused
from benchmarks.accelerator import __main__ as command
from benchmarks.accelerator import child, correctness, whole_runs
from benchmarks.accelerator.parts import FULL, MORE, QUICK, Part
from benchmarks.accelerator.settings import experiment_of, for_many_cores, in_topology
from rlstack.acting.inferencer import Inferencer
from rlstack.programs.config.presets import preset

ROOT = Path(__file__).resolve().parents[2]


def run(out, *args, code=0):
    """Runs the command; returns the JSON object that it prints, which is that of the file."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accelerator", "--quick", "--out", str(out), *args],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stdout + done.stderr
    if code == 2:
        return done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    return found


def test_parts_have_presets_and_fit_into_nine_minutes():
    names = [part.name for part in (*FULL, *MORE)]
    assert len(set(names)) == len(names)
    for part in (*FULL, *MORE, *QUICK):
        if part.preset:
            assert experiment_of(part.preset).preset == part.preset
    assert sum(part.seconds for part in FULL) < 510
    assert {part.kind for part in QUICK} < {part.kind for part in FULL}


@pytest.mark.parametrize("name", ["catch-ppo", "gymnax-cartpole-ppo"])
def test_compiled_ppo_has_the_constants_of_the_comparison_with_a_bare_loop(name):
    made = for_many_cores(experiment_of(name))
    other = fused.experiment(fused.Setting("CartPole-v1", made.env.num_envs, 1, 1))
    assert (made.agent, made.network, made.replay) == (other.agent, other.network, other.replay)
    assert made.env.num_envs >= 1024


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
def test_an_update_is_compared_between_two_devices():
    two = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    code = (
        "from benchmarks.accelerator import correctness\n"
        "cpu, device = correctness.devices()\n"
        "assert cpu != device\n"
        "print(correctness.update_errors('cartpole-dqn'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=two,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(0.0, 0.0)\n"


@pytest.mark.slow
@pytest.mark.chosen
def test_a_repetition_with_other_bits_is_noticed(monkeypatch):
    assert correctness.repeats_bit_for_bit("cartpole-dqn")
    step, state, batch = correctness._update_of("cartpole-dqn")
    traced = []

    def anew(params, learner_state, batch):
        traced.append(len(traced))  # the compiled function has another constant each time
        params = jax.tree.map(lambda x: x + np.float32(1e-6 * len(traced)), params)
        return step(params, learner_state, batch)

    monkeypatch.setattr(correctness, "_update_of", lambda name: (anew, state, batch))
    assert not correctness.repeats_bit_for_bit("cartpole-dqn")


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("topology", ["single_process", "heavy_env", "light_env"])
def test_each_topology_has_as_many_environments_as_a_batch_has_unrolls(topology, share):
    experiment = in_topology(experiment_of("breakout-gpu-ppo"), topology, share)
    env = experiment.env
    assert env.num_envs * experiment.num_actors == experiment.replay.batch_size == 96
    assert env.wait_num == (0 if share == 1 else env.num_envs // 2)
    assert env.num_workers == 0
    divided = in_topology(experiment_of("breakout-gpu-ppo"), topology, share, actors=4, workers=3)
    assert (divided.env.num_envs, divided.env.num_workers) == (24, 3)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_a_quick_run_goes_on_where_it_was(tmp_path):
    out = tmp_path / "found.json"
    found = run(out, "--only", "acting", "checkpoint")
    assert set(found["parts"]) == {"acting", "checkpoint"}
    assert all(part["passed"] for part in found["parts"].values())
    found["parts"]["acting"]["seconds"] = 123.0  # so that a repetition would show
    out.write_text(json.dumps(found))
    parts = run(out)["parts"]
    assert list(parts)[:2] == ["acting", "checkpoint"] and set(parts) == {p.name for p in QUICK}
    assert parts["acting"]["seconds"] == 123.0
    assert parts["updates"]["passed"] and parts["updates"]["largest_update_error"] == 0
    assert 0.1 < parts["learner/cartpole-dqn"]["ratio"] < 10
    assert 0.1 < parts["actor/cartpole-ppo"]["ratio"] < 10
    assert parts["actor/cartpole-ppo"]["calls_per_second_of_two_threads"] > 0
    assert 0 < parts["service"]["latency_ms_p50"] <= parts["service"]["latency_ms_p99"]
    assert parts["fused/catch-ppo"]["frames_per_second"] > 0


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
@pytest.mark.parametrize("acting", ["own", "shared"])
def test_runs_of_several_actors_tell_how_long_a_call_takes(monkeypatch, acting):
    chosen = preset("cartpole-ppo")
    program = dataclasses.replace(chosen.program, launch="threads")
    threads = dataclasses.replace(chosen, topology="heavy_env", program=program)
    monkeypatch.setattr(whole_runs, "experiment_of", lambda name: threads)
    inference = Inferencer.inference
    found = whole_runs.actors("cartpole-ppo", quick=True, acting=acting)
    assert found["frames_per_second"].keys() == found["inference_ms"].keys() == {"2"}
    assert found["frames_per_second"]["2"] > 100 and 0 < found["inference_ms"]["2"] < 1000
    assert found["num_envs"] == threads.env.num_envs * threads.num_actors
    assert Inferencer.inference is inference


def test_every_part_has_a_function_and_its_own_flags_of_xla(monkeypatch):
    assert {part.kind for part in (*FULL, *MORE, *QUICK)} <= child._KINDS.keys()
    seen = []

    def run(*args, env, **kwargs):
        seen.append(env.get("XLA_FLAGS"))
        return argparse.Namespace(returncode=0, stdout="{}", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    for mine, flags in (("", "--other"), ("--one", "--other"), ("--one", ""), ("", "")):
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        if flags:
            monkeypatch.setenv("XLA_FLAGS", flags)
        command._run(Part("service", xla_flags=mine), quick=True, limit=1.0)
    assert seen == ["--other", "--other --one", "--one", None]


@pytest.mark.timeout(60)
def test_a_part_that_does_not_exist_is_refused(tmp_path):
    assert "--only must name parts; got nothing." in run(
        tmp_path / "x.json", "--only", "nothing", code=2
    )
