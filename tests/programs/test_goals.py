"""Goals in hindsight in each topology: learning, resuming, and what is refused."""

import dataclasses
import io

import jax
import numpy as np
import pytest

import rlstack
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.sac import SACConfig
from rlstack.agents.td3 import TD3Config
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.storage import checkpoint
from tests.programs import running

pytestmark = pytest.mark.timeout(180)
_LATER = [pytest.mark.slow, pytest.mark.chosen]
REPLAY = {"batch_size": 64, "max_size": 20_000, "min_size": 400, "samples_per_insert": 16.0}


def bits(topology, frames=2400, count=5, **changes):
    """DQN on five bits."""
    experiment = preset("bitflip-her")
    agent = dataclasses.replace(experiment.agent, epsilon_frames=2000, target_rate=0.05)
    return running.small(
        dataclasses.replace(experiment, agent=agent),
        topology,
        frames,
        env={"num_envs": 4, "options": {"bits": count}},
        replay={**REPLAY, **changes.pop("replay", {})},
        **{"program": {"pacing": "lock_step"}, **changes},
    )


def solved(run_dir, experiment, episodes=512):
    """The share of episodes in which the greedy policy reaches the goal."""
    policy = rlstack.load(run_dir)
    cfg = dataclasses.replace(experiment.env, num_envs=episodes)
    with running.make_env(cfg, 99) as env:
        timestep, reached = env.reset(), np.zeros(episodes, bool)
        over = reached.copy()
        while not over.all():
            timestep = env.step(policy.act(timestep.observation))
            now = (timestep.reward == 0) & ~over & ~timestep.first()
            reached = np.where(over, reached, now) if "Reach" in cfg.name else reached | now
            over |= timestep.last()
    return reached.mean()


@pytest.mark.parametrize(
    "topology",
    ["single_process", *(pytest.param(t, marks=_LATER) for t in ("fused", *running.TOPOLOGIES))],
)
def test_bits_are_flipped_to_their_goals_in_each_topology(topology, tmp_path):
    replay = {"service": "table"} if topology == "distributed" else {}
    experiment = bits(topology, frames=6000, count=8, replay=replay)
    with running.nothing_left():
        running.run(experiment, tmp_path / "run")
    assert solved(tmp_path / "run", experiment) > 0.7


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", ["bitflip-her", "reach-her"])
def test_presets_reach_all_goals_and_none_without_hindsight(name, tmp_path):
    """Random actions end at one goal in 3,000 and in 2,000."""
    experiment = preset(name)
    running.run(experiment, tmp_path / "run")
    assert solved(tmp_path / "run", experiment) > 0.98
    options = {**experiment.replay.item_processor_options, "share": 0.0}
    replay = dataclasses.replace(experiment.replay, item_processor_options=options)
    running.run(dataclasses.replace(experiment, replay=replay), tmp_path / "without")
    assert solved(tmp_path / "without", experiment) < 0.02


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", running.TOPOLOGIES)
def test_a_program_in_lock_step_equals_a_single_process(topology, tmp_path):
    replay = {"service": "table"} if topology == "distributed" else {}
    running.run(bits("single_process"), tmp_path / "single")
    running.run(bits(topology, replay=replay), tmp_path / "nodes")
    assert running.same(running.params(tmp_path / "single"), running.params(tmp_path / "nodes"))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["fused", "single_process"])
def test_a_resumed_run_equals_an_uninterrupted_one(topology, tmp_path):
    """Runs in one process restart their environments where they are resumed, so both are."""
    half, whole = bits(topology, frames=1200), bits(topology)
    for name, experiment in (("one", half), ("other", half)):
        running.run(experiment, tmp_path / name)
        train.resume(tmp_path / name, frames=2400, stream=io.StringIO())
    assert running.same(running.params(tmp_path / "one"), running.params(tmp_path / "other"))
    if topology == "fused":
        running.run(whole, tmp_path / "whole")
        path = checkpoint.latest(tmp_path / "whole/checkpoints")
        assert path is not None
        assert running.same(running.params(tmp_path / "one"), running.params(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("agent", [SACConfig, TD3Config, DQNConfig])
@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_agents_of_transitions_learn_from_other_goals(agent, sampler, tmp_path):
    replay = {**REPLAY, "sampler": sampler, "unroll_length": 3}
    if agent is DQNConfig:
        experiment = bits("fused", replay=replay)
    else:
        base = dataclasses.replace(preset("reach-her"), agent=agent(random_frames=400))
        experiment = running.small(base, "fused", 1600, env={"num_envs": 4}, replay=replay)
    running.run(experiment, tmp_path / "run")
    assert np.isfinite(running.series(tmp_path / "run", "learner/loss")).all()


def test_a_config_keeps_the_options_of_its_processor():
    experiment = preset("reach-her")
    again = from_json(to_json(experiment))
    assert again == experiment
    assert again.replay.item_processor_options == {
        "reward": "rlstack.jax_envs.goals:point_reward",
        "strategy": "future",
        "share": 0.8,
    }


def test_what_does_not_fit_is_told_before_the_start(tmp_path):
    cartpole = preset("cartpole-dqn")
    hindsight = preset("reach-her").replay
    changes = {
        "item_processor": hindsight.item_processor,
        "item_processor_options": hindsight.item_processor_options,
    }
    experiment = dataclasses.replace(
        cartpole, replay=dataclasses.replace(cartpole.replay, **changes)
    )
    with pytest.raises(ValueError, match=r"item_processor .*achieved_goal and desired_goal"):
        running.run(experiment, tmp_path / "run")
    with_data = dataclasses.replace(experiment, data="somewhere")
    with pytest.raises(ValueError, match=r"somewhere|item_processor"):
        running.run(with_data, tmp_path / "data")
    assert jax.tree.leaves(changes)
