"""`rlstack.load`: the policy of a run in a loop of one's own."""

import dataclasses

import gymnasium
import jax
import numpy as np
import pytest
from dm_env import specs

import rlstack
from rlstack.checks import WrongKindError
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.entity.games import GAMES
from rlstack.envs.toy import MemoryCue
from rlstack.programs.config.encoding import to_json
from rlstack.programs.run.evaluation import evaluate
from rlstack.storage import checkpoint
from tests.programs import running
from tests.programs.tools.test_play import sweeper

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    """A run of recurrent PPO with normalised observations."""
    directory = tmp_path_factory.mktemp("policy") / "memory"
    normalisation = NormalisationConfig(observations=True)
    running.run(running.recurrent("single_process", normalisation=normalisation), directory)
    return directory


@pytest.fixture(scope="module")
def valuing(tmp_path_factory):
    """A run of DQN on Gymnasium's CartPole, with an evaluation before the end."""
    directory = tmp_path_factory.mktemp("policy") / "dqn"
    experiment = running.dqn("single_process", frames=1000)
    evaluator = dataclasses.replace(experiment.evaluator, period=500)
    running.run(dataclasses.replace(experiment, evaluator=evaluator), directory)
    return directory


def episodes(policy, envs):
    """Plays one episode in each environment, as a batch; returns the returns."""
    steps = [env.reset() for env in envs]
    returns, over = np.zeros(len(envs)), np.zeros(len(envs), bool)
    while not over.all():
        actions = policy.act(np.stack([step.observation for step in steps]))
        for i, env in enumerate(envs):
            if not over[i]:
                steps[i] = env.step(actions[i])
                returns[i] += steps[i].reward
                over[i] = steps[i].last()
    return returns


def cues(experiment, count=2):
    assert experiment.seed == 1
    first = 442508401  # of SeedSequence([1, crc32(b"evaluator") % 2**31, 0]), 30 bits
    return [MemoryCue(seed=first + i, **experiment.env.options) for i in range(count)]


@pytest.mark.slow
@pytest.mark.chosen
def test_a_loop_of_ones_own_gives_the_returns_of_the_evaluation(remembering):
    policy = rlstack.load(remembering)
    expected = evaluate(remembering).returns
    assert episodes(policy, cues(policy.experiment)).tolist() == expected.tolist()
    policy.reset()
    one_by_one = []
    for env in cues(policy.experiment):
        step, total = env.reset(), 0.0
        while not step.last():
            step = env.step(policy.act(step.observation))
            total += step.reward
        policy.reset()
        one_by_one.append(total)
    assert one_by_one == expected.tolist()
    assert policy.env_frames >= 3000


@pytest.mark.slow
@pytest.mark.chosen
def test_the_state_lasts_until_a_reset(remembering):
    policy = rlstack.load(remembering)
    seen = np.random.default_rng(0).normal(size=(3, *policy.spec.observation.shape))
    first = [policy.predict(seen).value for _ in range(3)]
    assert not np.array_equal(first[0], first[1])
    policy.reset(np.array([True, False, True]))
    mixed = policy.predict(seen).value
    assert np.array_equal(mixed[[0, 2]], first[0][[0, 2]])
    assert mixed[1] not in (first[0][1], first[2][1])
    with pytest.raises(ValueError, match=r"must have the 3 environments of the last call.*got 1"):
        policy.act(seen[0])
    with pytest.raises(ValueError, match=r"rows must have shape \(3,\).*got \(2,\)"):
        policy.reset([True, False])
    policy.reset()
    single = policy.predict(seen[0])
    assert single.value == pytest.approx(float(first[0][0]), abs=1e-6)
    assert single.probabilities["action"].sum() == pytest.approx(1, abs=1e-6)
    assert single.action.shape == () and single.action_values == {}


@pytest.mark.slow
@pytest.mark.chosen
def test_it_takes_the_observations_of_gymnasium_and_gives_its_actions(valuing):
    policy = rlstack.load(valuing, params="best")
    assert policy.env_frames <= 1000
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=3)
    for _ in range(5):
        found = policy.predict(observation.astype(np.float64))
        values = found.action_values["action"]
        assert values.shape == (1, 2) and found.value == pytest.approx(values.max())
        assert found.action == values.argmax()
        observation, *_ = env.step(found.action)  # Gymnasium checks the action


@pytest.mark.slow
@pytest.mark.chosen
def test_sampling_explores_as_at_the_end_of_training(valuing):
    experiment = rlstack.load(valuing).experiment
    spec = rlstack.EnvSpec(specs.Array((4,), np.float32), specs.DiscreteArray(2, np.int32))

    def share(**changes):
        """The share of actions that are not the best one."""
        agent = dataclasses.replace(experiment.agent, **changes)
        (valuing / "config.json").write_text(to_json(dataclasses.replace(experiment, agent=agent)))
        policy = rlstack.load(valuing, greedy=False, spec=spec)
        actions = policy.act(np.zeros((4000, 4)))
        best = rlstack.load(valuing, spec=spec).act(np.zeros(4))
        again = rlstack.load(valuing, greedy=False, spec=spec).act(np.zeros((4000, 4)))
        assert np.array_equal(actions, again)
        other = rlstack.load(valuing, greedy=False, spec=spec, seed=1).act(np.zeros((4000, 4)))
        assert not np.array_equal(actions, other)
        return (actions != best).mean()

    before = (valuing / "config.json").read_text()
    try:
        # Half of the random actions are the best one. Training had 1,000 frames.
        end = {"epsilon_start": 1.0, "epsilon_end": 0.2}
        assert share(**end, epsilon_frames=500) == pytest.approx(0.1, abs=0.03)
        assert share(**end, epsilon_frames=10_000_000) == pytest.approx(0.5, abs=0.05)
    finally:
        (valuing / "config.json").write_text(before)


def test_wrong_observations_are_named(valuing, tmp_path):
    policy = rlstack.load(valuing)
    for wrong, text in (
        (np.zeros(3), r"observation must have shape \(4,\).*got \(3,\)"),
        (np.zeros((2, 2, 4)), r"must have shape \(4,\).*got \(2, 2, 4\)"),
        ({"a": np.zeros(4)}, "must hold numbers; got dict"),
    ):
        with pytest.raises(ValueError, match=text):
            policy.act(wrong)
    with pytest.raises(ValueError, match="there is no such directory"):
        rlstack.load(tmp_path / "none")


@pytest.mark.slow
@pytest.mark.chosen
def test_games_are_played_by_their_arrays(tmp_path):
    running.run(sweeper(), tmp_path / "run")
    policy = rlstack.load(tmp_path / "run")
    game = GAMES["MineSweeper"](**policy.experiment.env.options)
    step = game.reset()
    while not step.last():
        found = policy.predict(step.observation)
        assert set(found.action) == set(found.probabilities) == set(game.action_spec())
        step = game.step(found.action)
    with pytest.raises(WrongKindError, match=r"got Observation.*game_agent\.from_run"):
        policy.act(game.last_observation)


def test_params_are_those_of_the_checkpoint(valuing):
    policy = rlstack.load(valuing)
    path = checkpoint.latest(valuing / "checkpoints")
    assert policy.env_frames == checkpoint.read_metadata(path)["env_frames"]
    assert running.same(jax.tree.leaves(policy.params), running.params(valuing))
