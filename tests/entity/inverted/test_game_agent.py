"""A run trained on a game that owns its loop, and the run's agent playing in that loop."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack import distributions
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.entities import RaggedTransformerConfig
from rlstack.entity import ObsSpace
from rlstack.entity.inverted import PythonGame
from rlstack.envs import SyncEnv
from rlstack.networks import NetworkConfig
from rlstack.networks.base import ActorCriticOutput, recurrent
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.evaluation import make_evaluator
from rlstack.programs.build.restored import newest_checkpoint, read_params
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.game_agent import from_run, team_from_run
from rlstack.replay import ReplayConfig
from rlstack.storage import checkpoint
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


BIDDING = dataclasses.replace(
    EXPERIMENT,
    env=EnvConfig(
        "rlstack.entity.inverted:PythonGame",
        num_envs=2,
        options={"game": "tests.entity.inverted.games:Bidding", "agents": 2},
    ),
    network_factory="tests.entity.inverted.test_game_agent:remembering",
    evaluator=EvaluatorConfig(episodes=4, num_envs=2),
)


def remembering(obs_spec, action_spec):
    """A network whose choices depend on its past observations and their order."""

    def encode(observation):
        parts = [x.reshape((len(x), -1)) for x in jax.tree.leaves(observation["features"])]
        return 0.3 * jnp.concatenate(parts, axis=-1)

    def decode(hidden, observation):
        large = hk.initializers.RandomNormal(5.0)
        logits = hk.Linear(
            sum(distributions.num_parameters(spec) for spec in jax.tree.leaves(action_spec)),
            w_init=large,
        )(hidden)
        return ActorCriticOutput(logits, hk.Linear(1)(hidden)[..., 0])

    return recurrent(encode, lambda: hk.GRU(8), decode, obs_spec)


def leave_run(path, experiment):
    """Writes the directory of an untrained run; training would take longer."""
    directory = RunDir.create(path, experiment.preset, 1)
    directory.config.write_text(to_json(experiment))
    with SyncEnv(PythonGame, 2, options=experiment.env.options) as pool:
        agent = make_agent(experiment, pool.spec)
    params = agent.initial_params(jax.random.PRNGKey(6))  # params whose choices vary
    checkpoint.save(directory.checkpoints, 2, {"learner": {"params": params}}, {})
    return directory.path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return leave_run(tmp_path_factory.mktemp("inverted") / "run", EXPERIMENT)


class Counted:
    """Forwards to an agent for a given number of games."""

    def __init__(self, agent, num_games):
        self.agent, self.num_games, self.scores = agent, num_games, []

    def act(self, observation):
        return None if len(self.scores) == self.num_games else self.agent.act(observation)

    def idle(self):
        self.agent.idle()

    def game_over(self, observation):
        self.scores.append(observation.score)
        self.agent.game_over(observation)


@pytest.mark.slow
@pytest.mark.chosen
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


@pytest.mark.slow
@pytest.mark.chosen
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


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", ["all", "sparse"])
def test_recurrent_state_is_the_same_as_in_training(tmp_path, how):
    """The state covers a whole game, including ticks that ask only other agents."""
    path = leave_run(tmp_path / "run", BIDDING)
    game = games.Bidding(how)
    team = team_from_run(path, game.obs_space, game.action_space, 2)
    watched = [Counted(player, 2) for player in team]
    game.play(watched)
    with SyncEnv(PythonGame, 2, options={**BIDDING.env.options, "how": how}) as pool:
        params = read_params(newest_checkpoint(RunDir.open(path), BIDDING), BIDDING, pool.spec)
        wanted = make_evaluator(BIDDING, pool.spec).evaluate(params, pool)
    scores = [agent.scores for agent in watched]
    np.testing.assert_allclose(scores, wanted.returns.reshape((2, 2)))
    assert how == "all" or scores[1] == [4.0, 4.0]  # without those ticks 2


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(100)
def test_forget_resets_the_recurrent_state(tmp_path):
    game = games.Bidding()
    path = leave_run(tmp_path / "run", BIDDING)
    player = from_run(path, game.obs_space, game.action_space)

    def bids(ticks):
        seen = [game.see(0, tick, [0.0, 0.0]) for tick in ticks]
        return [int(player.act(observation)["bid"].indices[0]) for observation in seen]

    first = bids(range(4))
    assert bids(range(4)) != first  # the recurrent state continues
    player.forget()
    assert bids(range(4)) == first
