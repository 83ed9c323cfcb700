"""A run on a game that owns its loop, and its agent playing in that loop."""

import dataclasses

import jax
import numpy as np
import pytest

from agents.ppo import PPOConfig
from programs.components import make_agent, make_evaluator
from programs.experiment import EnvConfig, Experiment, to_json
from programs.game_agent import from_run, team_from_run
from programs.restored import newest_checkpoint, read_params
from programs.run_dir import RunDir
from rlstack import checkpoint
from rlstack.entity import ObsSpace
from rlstack.entity.inverted import PythonGame
from rlstack.envs import SyncEnv
from rlstack.evaluator import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.networks.ragged.config import RaggedTransformerConfig
from rlstack.replay import ReplayConfig
from tests.entity.inverted import games

GAME = "tests.entity.inverted.games:mine_sweeper"
EXPERIMENT = Experiment(
    preset="inverted",
    agent=PPOConfig(num_epochs=1, num_minibatches=1),
    env=EnvConfig("rlstack.entity.inverted:PythonGame", num_envs=2, options={"game": GAME}),
    network=NetworkConfig(entities=RaggedTransformerConfig(d_model=8, num_layers=1)),
    replay=ReplayConfig(sampler="fifo", batch_size=2, unroll_length=8, max_size=2),
    frames=2,
    evaluator=EvaluatorConfig(episodes=3, num_envs=1),
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """What a run that has learned nothing leaves behind; training would take longer."""
    directory = RunDir.create(tmp_path_factory.mktemp("inverted") / "run", "inverted", 1)
    directory.config.write_text(to_json(EXPERIMENT))
    with SyncEnv(PythonGame, 1, options={"game": GAME}) as pool:
        agent = make_agent(EXPERIMENT, pool.spec)
    params = agent.initial_params(jax.random.PRNGKey(3))
    checkpoint.save(directory.checkpoints, 2, {"learner": {"params": params}}, {})
    return directory.path


class Counted:
    """Passes on to an agent, for a number of games."""

    def __init__(self, agent, num_games):
        self.agent, self.num_games, self.scores = agent, num_games, []

    def act(self, observation):
        return None if len(self.scores) == self.num_games else self.agent.act(observation)

    def game_over(self, observation):
        self.scores.append(observation.score)
        self.agent.game_over(observation)


@pytest.mark.timeout(100)
def test_the_agent_plays_in_the_loop_as_the_evaluation_plays_it(run_dir):
    game = games.mine_sweeper(seed=5)
    agent = Counted(from_run(run_dir, game.obs_space, game.action_space), 3)
    game.play([agent])
    with SyncEnv(PythonGame, 1, options={"game": GAME}, seed=5) as pool:
        path = newest_checkpoint(RunDir.open(run_dir), EXPERIMENT)
        params = read_params(path, EXPERIMENT, pool.spec)
        wanted = make_evaluator(EXPERIMENT, pool.spec).evaluate(params, pool)
    np.testing.assert_allclose(agent.scores, wanted.returns)


@pytest.mark.timeout(100)
def test_sampled_agents_are_reproducible_and_checked(run_dir):
    def scores(seed):
        game = games.mine_sweeper(seed=5)
        team = team_from_run(run_dir, game.obs_space, game.action_space, 2, greedy=False, seed=seed)
        moves = []

        class Watched(Counted):
            def act(self, observation):
                actions = super().act(observation)
                if actions is not None:
                    moves.append(tuple(actions["Move"].labels))
                return actions

        game.play([Watched(team[1], 1)])
        return moves

    assert scores(1) == scores(1) != scores(2)
    with pytest.raises(ValueError):
        from_run(run_dir, ObsSpace(), games.ACTIONS)
    other = dataclasses.replace(games.OBS, global_features=("a", "b"))
    with pytest.raises(ValueError):
        from_run(run_dir, other, games.ACTIONS)
