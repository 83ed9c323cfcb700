"""Memory cores in programs: trained, resumed, exported, and behind the inference service."""

import dataclasses
import io

import jax
import numpy as np
import pytest

import rlstack
from rlstack.agents.impala import ImpalaConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.r2d2 import R2D2Config
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.fused_config import FusedConfig
from rlstack.programs.run import train
from rlstack.programs.tools.export import export
from rlstack.programs.tools.greedy import greedy_function
from rlstack.replay import ReplayConfig
from tests.programs.running import TOPOLOGIES, nothing_left, params, recurrent, same, series, small
from tests.programs.tools.test_export import expected, untrained

pytestmark = pytest.mark.timeout(300, method="thread")

_LATER = [pytest.mark.slow, pytest.mark.chosen]
FIFO = ReplayConfig(sampler="fifo", batch_size=4, unroll_length=16, max_size=8)
SEQUENCES = ReplayConfig(
    sampler="prioritized",
    batch_size=8,
    unroll_length=12,
    period=6,
    max_size=200,
    min_size=10,
    samples_per_insert=2.0,
)
AGENTS = {
    "ppo": (PPOConfig(num_epochs=2, num_minibatches=2), FIFO),
    "impala": (ImpalaConfig(), FIFO),
    "r2d2": (R2D2Config(burn_in=4), SEQUENCES),
}
CORES = {
    kind: NetworkConfig(hidden_sizes=(16,), core=kind, core_size=8, core_layers=2)
    for kind in ("mingru", "s5")
}
CORES["gtrxl"] = dataclasses.replace(CORES["s5"], core="gtrxl", core_memory=6, core_heads=2)


def catch(agent, core, **changes):
    """A short run on Catch, four environments, episodes of four steps."""
    cfg, replay = AGENTS[agent]
    return Experiment(
        preset="cores",
        agent=cfg,
        env=EnvConfig("rlstack.jax_envs.toy:Catch", 4, "jax", options={"rows": 5, "columns": 3}),
        network=CORES[core],
        replay=replay,
        frames=10**6,
        log_period=200,
        checkpoint_period=10**6,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        loggers=("jsonl",),
        fused=FusedConfig(call_seconds=0.01),
        **changes,
    )


def run(experiment, directory):
    return train.run(experiment, directory, stream=io.StringIO())


PAIRS = [(agent, core) for agent in AGENTS for core in CORES]
QUICK_CORES = [pytest.param(core, marks=[] if core == "mingru" else _LATER) for core in CORES]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("agent", "core"), PAIRS)
def test_a_resumed_run_in_one_program_equals_one_that_was_not_interrupted(tmp_path, agent, core):
    run(catch(agent, core, topology="fused", updates=6), tmp_path / "half")
    result = train.resume(tmp_path / "half", updates=12, stream=io.StringIO())
    whole = run(catch(agent, core, topology="fused", updates=12), tmp_path / "whole")
    assert result.learner_steps == whole.learner_steps == 12
    assert result.env_frames == whole.env_frames
    assert same(params(tmp_path / "half"), params(tmp_path / "whole"))
    assert np.isfinite(series(tmp_path / "whole", "learner/loss")).all()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("agent", "core"), PAIRS)
def test_a_single_process_learns_what_one_program_learns(tmp_path, agent, core):
    for topology in ("fused", "single_process"):
        updates = 4 if agent != "r2d2" else None
        frames = 10**6 if updates else 600
        experiment = catch(agent, core, topology=topology, updates=updates or 0)
        run(dataclasses.replace(experiment, frames=frames), tmp_path / topology)
        assert np.isfinite(series(tmp_path / topology, "learner/loss")).all()
    if agent != "r2d2":  # its samples are drawn by other random numbers there
        for one, other in zip(*map(params, (tmp_path / "fused", tmp_path / topology)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("core", QUICK_CORES)
@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_actors_and_inference_services_keep_the_state(tmp_path, topology, core):
    experiment = dataclasses.replace(recurrent(topology), network=CORES[core], frames=1000)
    with nothing_left():
        result = run(small(experiment, topology, 1000), tmp_path / "run")
    assert result.env_frames >= 1000
    losses = series(tmp_path / "run", "learner/loss")
    assert losses and np.isfinite(losses).all()
    # If actors and learner disagreed about the state, the first ratios of PPO would not be near 1.
    assert abs(series(tmp_path / "run", "learner/kl")[0]) < 0.05


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("core", QUICK_CORES)
def test_the_function_that_is_exported_acts_as_the_loaded_policy(tmp_path, core):
    experiment = dataclasses.replace(recurrent("single_process"), network=CORES[core])
    untrained(experiment, tmp_path)
    function = greedy_function(rlstack.load(tmp_path))
    sizes = [port.shape for port in function.state]
    assert sizes == ([(2, 6, 8), ()] if core == "gtrxl" else [(8,), (8,)])
    seen, wanted = expected(tmp_path, steps=9)
    assert len(np.unique(wanted)) > 1
    call = jax.jit(function.call)
    state = {name: np.repeat(x[None], 3, 0) for name, x in function.initial_state.items()}
    for observation, actions in zip(seen, wanted, strict=True):
        action, state = call({"observation": observation}, state)
        np.testing.assert_array_equal(action["action"], actions)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("core", CORES)
def test_a_policy_is_exported_for_any_number_of_rows(tmp_path, core):
    pytest.importorskip("flatbuffers")
    experiment = dataclasses.replace(recurrent("single_process"), network=CORES[core])
    untrained(experiment, tmp_path)
    assert export(tmp_path, "stablehlo", tmp_path / "policy.stablehlo").batch is None
