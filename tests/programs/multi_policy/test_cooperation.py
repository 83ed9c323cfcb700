"""QMIX and MADDPG train in each topology, resume and load; unsupported settings are refused."""

import dataclasses
import importlib.util
import io

import numpy as np
import pytest

import rlstack
from rlstack.agents.ppo import PPOConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.fused_config import FusedConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.config.presets.registry import on_policy_replay
from rlstack.programs.run import train
from tests.programs import running

pytestmark = pytest.mark.timeout(180)
_LATER = [pytest.mark.slow, pytest.mark.chosen]
GAME = {"game": "tests.envs.seats.parallel_envs:Dying", "joint": True}
DYING = EnvConfig("rlstack.envs.seats.pettingzoo:Parallel", num_envs=4, options=GAME)
REPLAY = {"batch_size": 16, "max_size": 400, "min_size": 40, "samples_per_insert": 2.0}


def dying(topology, frames=400, **changes):
    """QMIX on a game whose three seats leave one after the other."""
    experiment = dataclasses.replace(preset("twostep-qmix"), env=DYING, topology="single_process")
    replay = {**REPLAY, **changes.pop("replay", {})}
    program = {"program": {"pacing": "lock_step"}, **changes}
    return running.small(experiment, topology, frames, replay=replay, **program)


def two_step(topology="fused", core="none", frames=600):
    """QMIX or, with a core, QMIX on prioritized sequences."""
    base = preset("twostep-qmix")
    replay = {**REPLAY, "starts": "any", "unroll_length": 4, "sampler": "prioritized"}
    if core != "none":
        agent = dataclasses.replace(base.agent, burn_in=1)
        network = NetworkConfig(hidden_sizes=(8,), core=core, core_size=6)
        base = dataclasses.replace(base, agent=agent, network=network)
    else:
        replay = REPLAY
    fused = FusedConfig(call_seconds=0.01)
    return running.small(base, topology, frames, replay=replay, fused=fused, checkpoint_period=150)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_on_the_host_is_loaded_without_the_state_of_the_game(tmp_path):
    env = dataclasses.replace(DYING, options={**GAME, "critic_state": "joined"})
    experiment = dataclasses.replace(dying("single_process"), env=env)
    result = running.run(experiment, tmp_path / "run")
    assert result.env_frames >= 400
    losses = running.series(tmp_path / "run", "learner/loss")
    assert losses and np.isfinite(losses).all()
    assert running.series(tmp_path / "run", "episode/team_return")
    policy = rlstack.load(tmp_path / "run")
    action = policy.act({"observation": np.zeros((5, 3, 1), np.float32)})
    assert action.shape == (5, 3)
    assert action.min() >= 1  # the environment's own choices


@pytest.mark.parametrize("topology", [pytest.param(t, marks=_LATER) for t in running.TOPOLOGIES])
def test_a_program_in_lock_step_equals_a_single_process(topology, tmp_path):
    replay = {"service": "table"} if topology == "distributed" else {}
    running.run(dying("single_process"), tmp_path / "single")
    with running.nothing_left():
        running.run(dying(topology, replay=replay), tmp_path / "nodes")
    assert running.same(running.params(tmp_path / "single"), running.params(tmp_path / "nodes"))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_resumed_run_in_one_program_equals_an_uninterrupted_one(core, tmp_path):
    running.run(two_step(core=core, frames=300), tmp_path / "half")
    train.resume(tmp_path / "half", frames=600, stream=io.StringIO())
    running.run(two_step(core=core), tmp_path / "whole")
    assert running.same(running.params(tmp_path / "half"), running.params(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("name", "best"), [("twostep-qmix", 8.0), ("twostep-vdn", 7.0)])
def test_the_two_step_game_tells_qmix_from_vdn(name, best, seed, tmp_path):
    experiment = dataclasses.replace(preset(name), seed=seed)
    assert running.run(experiment, tmp_path / "run").eval_return_mean == best


@pytest.mark.slow
@pytest.mark.chosen
def test_maddpg_learns_to_cover(tmp_path):
    # Random actions give -53.
    experiment = dataclasses.replace(preset("cover-maddpg"), frames=60_000)
    assert running.run(experiment, tmp_path / "run").eval_return_mean > -40.0


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.skipif(importlib.util.find_spec("jaxmarl") is None, reason="needs JaxMARL")
@pytest.mark.parametrize("name", ["spread-qmix", "spread-maddpg"])
def test_presets_learn_simple_spread(name, tmp_path):
    # Random actions give -28.
    experiment = dataclasses.replace(preset(name), frames=80_000)
    assert running.run(experiment, tmp_path / "run").eval_return_mean > -23.0


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["single_process", "fused"])
def test_ppo_is_one_controller_of_all_seats(topology, tmp_path):
    base = dataclasses.replace(
        preset("twostep-qmix"), agent=PPOConfig(), replay=on_policy_replay(8, 16)
    )
    running.run(running.small(base, topology, 1000), tmp_path / "run")
    assert np.isfinite(running.series(tmp_path / "run", "learner/loss")).all()


def test_what_does_not_fit_is_told_before_the_start(tmp_path):
    base = preset("twostep-qmix")
    rows = dataclasses.replace(base, env=dataclasses.replace(base.env, options={}))
    with pytest.raises(ValueError, match=r"\[S\] choices .*--env.options joint True"):
        running.run(rows, tmp_path / "rows")
    catch = EnvConfig("rlstack.jax_envs.toy:Catch", 8, "jax", options={"joint": True})
    with pytest.raises(ValueError, match="joint must be left out"):
        running.run(dataclasses.replace(base, env=catch), tmp_path / "catch")
    policies = {"one": MemberConfig(seats=("first",)), "other": MemberConfig()}
    with pytest.raises(ValueError, match=r"seats must be among 0 to 0"):
        running.run(dataclasses.replace(base, policies=policies), tmp_path / "set")
