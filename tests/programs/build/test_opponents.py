"""Runs against frozen opponents: the games they play, the steps learned from, the results."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.entities import RaggedTransformerConfig
from rlstack.envs import SyncEnv
from rlstack.envs.opponents import ITSELF
from rlstack.networks import NetworkConfig
from rlstack.programs.build import opponents
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.cli import commands as cli
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.env_config import EnvConfig, OpponentsConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run import train
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session.run_dir import RunDir
from rlstack.replay import ReplayConfig
from rlstack.storage import checkpoint
from tests.entity.inverted import games
from tests.programs.running import (
    TOPOLOGIES,
    failures,
    nothing_left,
    params,
    run,
    same,
    series,
    small,
)

GAME = EnvConfig(
    "rlstack.entity.inverted:PythonGame",
    num_envs=4,
    options={"game": f"{games.__name__}:Bidding", "agents": 2},
)
EXPERIMENT = Experiment(
    preset="bidding",
    agent=PPOConfig(num_epochs=1, num_minibatches=1),
    env=GAME,
    network=NetworkConfig(entities=RaggedTransformerConfig(d_model=8, num_layers=0, num_heads=1)),
    replay=ReplayConfig(sampler="fifo", batch_size=4, unroll_length=5, max_size=8),
    frames=64,
    evaluator=EvaluatorConfig(episodes=4, num_envs=4),
    checkpoint_period=32,
)
pytestmark = pytest.mark.timeout(120, method="thread")


def opponent(path, seed, network=EXPERIMENT.network):
    """Writes the directory of a run without training, because training would take longer."""
    experiment = dataclasses.replace(EXPERIMENT, network=network)
    directory = RunDir.create(path, "bidding", seed)
    directory.write_config(to_json(experiment))
    with SyncEnv(GAME.name, 2, options=GAME.options) as pool:
        agent = make_agent(experiment, pool.spec)
    params = agent.initial_params(jax.random.PRNGKey(seed))
    state = {"learner": {"params": params}}
    checkpoint.save(directory.checkpoints, 7, state, {"env_frames": 7})
    return directory.path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opponents")
    return tuple(str(opponent(folder / name, i)) for i, name in enumerate(("old", "older")))


def met(runs, share=1.0, **more):
    return OpponentsConfig(runs, share, **more)


def against(runs, share=0.5, **changes):
    """Trains against each of two runs in a quarter of the environments; evaluates against both."""
    env = dataclasses.replace(GAME, opponents=met(runs, share), eval_opponents=met(runs))
    return dataclasses.replace(EXPERIMENT, env=env, **changes)


@pytest.mark.slow
@pytest.mark.chosen
def test_steps_of_opponents_are_neither_counted_nor_remembered(runs):
    program = SingleProcessRun(opponents.resolved(against(runs)))
    try:
        env = program.env
        assert env.opponents == (ITSELF, ITSELF, "old@7", "older@7")
        assert len(env._pool.env_ids) == 6
        frozen = [player._params for player in env._players]
        before = jax.tree.map(np.copy, frozen)
        added, add = [], program.player.replay.add
        program.player.replay.add = lambda ids, step: (added.append(step), add(ids, step))
        for _ in range(24):
            program.player.actor.step()
            while program.player.replay.can_sample():
                program.learner.step(program.player.replay.sample())
        assert program.learner.version >= 4
        assert program.env_frames == sum((s.timestep.step_type != 0).sum() for s in added) == 76
        for step in added:  # a game's two agents, then the learner's seats in two games
            agent = step.timestep.observation["features"]["Me"][:, 0, 0]
            np.testing.assert_array_equal(agent, [0, 1, 0, 0])
            assert step.params_version.shape == (4,)
        acting = [player._inferencer._params for player in env._players]
        assert same(jax.tree.leaves(acting), jax.tree.leaves(before))
        assert not same(jax.tree.leaves(acting[0]), jax.tree.leaves(program.learner.params))
    finally:
        program.close()


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_tells_its_returns_by_opponent_and_resumes(runs, tmp_path, capsys):
    directory = tmp_path / "run"
    experiment = dataclasses.replace(
        against(runs), evaluator=EvaluatorConfig(episodes=8, num_envs=4, period=32), log_period=16
    )
    result = run(experiment, directory)
    told = result.eval_return_by_opponent
    assert list(told) == ["old@7", "older@7"]
    assert np.mean(list(told.values())) == pytest.approx(result.eval_return_mean)
    assert json.loads((directory / "result.json").read_text()) == result._asdict()
    for name in told:
        assert len(series(directory, f"evaluator/return_against/{name}")) == 2
    # The config names checkpoints, so the opponents stay the same and can be loaded from anywhere.
    kept = from_json((directory / "config.json").read_text()).env.opponents.runs
    assert kept == tuple(f"{run}/checkpoints/step_000000000007" for run in runs)
    resumed = train.resume(directory, frames=128, stream=io.StringIO())
    assert resumed.env_frames >= 128 and list(resumed.eval_return_by_opponent) == list(told)

    found = train.evaluate(directory, episodes=4, against=[runs[1], kept[0]])
    assert found.opponents == ("older@7", "old@7") * 2
    assert cli.main("eval", [str(directory), "--episodes", "2", "--against", runs[0]]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["eval_return_by_opponent"] == {"old@7": line["eval_return_mean"]}


@pytest.mark.slow
@pytest.mark.chosen
def test_what_opponents_do_is_the_same_for_the_same_seed_and_sampled_or_best(runs):
    def played(greedy, seed=3):
        cfg = dataclasses.replace(GAME, opponents=met(runs, greedy=greedy))
        with make_env(cfg, seed) as env:
            env.reset()
            totals = []
            for _ in range(8):
                timestep = env.step({"bid": np.ones((4, 1), np.int32)})
                totals.append(timestep.observation["features"]["__global__"][:, 0, 0])
            return np.array(totals)

    sampled, best = played(False), played(True)
    np.testing.assert_array_equal(sampled, played(False))
    assert (sampled != played(False, seed=4)).any()
    np.testing.assert_array_equal(best, played(True, seed=4))


def test_opponents_that_cannot_play_are_refused_before_anything_starts(runs, tmp_path):
    def refused(experiment, message):
        with pytest.raises(ValueError, match=message):
            train.run(experiment, tmp_path / "none", stream=io.StringIO())
        assert not (tmp_path / "none").exists()

    refused(against((str(tmp_path / "gone"),)), "env.opponents: .*gone must be a run.*no such dir")
    empty = RunDir.create(tmp_path / "empty", "bidding", 1)
    empty.write_config(to_json(EXPERIMENT))
    refused(against((str(empty.path),)), "has no checkpoint")
    large = NetworkConfig(entities=RaggedTransformerConfig(d_model=16, num_layers=0, num_heads=1))
    other = str(opponent(tmp_path / "other", 1))
    config = dataclasses.replace(EXPERIMENT, network=large)
    (tmp_path / "other" / "config.json").write_text(to_json(config))
    judged = dataclasses.replace(GAME, eval_opponents=met((other,)))
    refused(dataclasses.replace(EXPERIMENT, env=judged), "other.* must have an agent that fits")
    refused(against(runs, share=0.25), r"share must leave whole games of 2 .* 0.25 of 4 .*is 0.5")
    refused(
        against((*runs, other), share=0.5),
        "each of the 3 opponents .*; got 2 environments with opponents",
    )
    alone = dataclasses.replace(GAME, options={"game": GAME.options["game"]}, opponents=met(runs))
    refused(dataclasses.replace(EXPERIMENT, env=alone), "game of several agents.*agents = 1")
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\]; got 0"):
        OpponentsConfig(share=0)


def test_one_game_stays_in_one_worker(runs):
    cfg = dataclasses.replace(GAME, num_envs=3, type="process", num_workers=2, opponents=met(runs))
    with make_env(cfg, 0) as env:
        assert env.reset().first().all()
        assert env.step({"bid": np.ones((3, 1), np.int32)}).reward.tolist() == [1, 1, 2]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lock_step_programs_with_opponents_equal_a_single_process(runs, tmp_path, topology):

    def changed(name):
        return small(against(runs), name, 64, program={"pacing": "lock_step"})

    with nothing_left():
        expected = run(changed("single_process"), tmp_path / "single")
        result = run(changed(topology), tmp_path / "several")
    assert failures(tmp_path / "several") == []
    assert result.learner_steps == expected.learner_steps > 1
    assert result.eval_return_by_opponent == expected.eval_return_by_opponent
    assert len(result.eval_return_by_opponent) == 2
    assert same(params(tmp_path / "several"), params(tmp_path / "single"))


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_actors_in_processes_play_against_opponents(runs, tmp_path, topology):
    program = {"launch": "processes", "num_actors": 2}
    with nothing_left():
        result = run(small(against(runs), topology, 256, program=program), tmp_path / "run")
    assert failures(tmp_path / "run") == []
    assert result.learner_steps > 1
    assert len(result.eval_return_by_opponent) == 2


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
def test_asynchronous_actors_play_against_opponents(runs):
    env = dataclasses.replace(GAME, wait_num=2, opponents=met(runs))
    experiment = dataclasses.replace(EXPERIMENT, env=env)
    program = SingleProcessRun(opponents.resolved(experiment))
    try:
        for _ in range(40):
            program.player.actor.step()
            while program.player.replay.can_sample():
                program.learner.step(program.player.replay.sample())
        assert program.learner.version >= 2
        assert program.player.actor.episodes >= 4
    finally:
        program.close()
