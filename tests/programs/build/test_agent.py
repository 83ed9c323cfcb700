"""The agent of an experiment explores as it did in training, and is judged as its config says."""

import dataclasses

import jax
import numpy as np
import pytest

from rlstack import exploration
from rlstack.acting.actor import transition_spec
from rlstack.agents.sqil import SQILConfig
from rlstack.configs.exploration import PolicyConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.programs.build import opponents
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.evaluation import make_evaluator
from rlstack.programs.build.policies.evaluation import SetEvaluator, follower
from rlstack.programs.build.policies.members import Member, counts_of, divide
from rlstack.programs.build.policies.player import fixed_agent
from rlstack.programs.build.policies.policy import load
from rlstack.programs.build.restored import counts_at
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.env_config import OpponentsConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.seats.sides import find, sides_of
from rlstack.storage import checkpoint
from tests.agent_cases import MID, random_timesteps
from tests.programs.multi_policy.cases import chain

KEY = jax.random.PRNGKey(0)
ROWS = 2000


@pytest.fixture(scope="module")
def experiment():
    """DQN on eight CartPoles; epsilon goes from 1 to 0.2 in 800 frames: 100 steps of each."""
    base = preset("cartpole-dqn")
    agent = dataclasses.replace(base.agent, epsilon_frames=800, epsilon_end=0.2)
    env = dataclasses.replace(base.env, num_envs=8)
    return dataclasses.replace(base, agent=agent, env=env)


@pytest.fixture(scope="module")
def spec(experiment):
    return environment_spec(experiment)


def random_share(agent, spec):
    """The estimated probability of a random action: half of them are the better one of two."""
    params = agent.initial_params(KEY)
    one = random_timesteps(spec.observation, [MID])
    timestep = jax.tree.map(lambda x: np.repeat(x, ROWS, axis=0), one)
    state = agent.initial_state(ROWS)
    actions = agent.actor_step(jax.random.PRNGKey(1), params, timestep, state)[0].action
    return 2 * min(np.mean(actions == 0), np.mean(actions == 1))


@pytest.mark.parametrize(("steps", "epsilon"), [(0, 1.0), (50, 0.6), (100, 0.2), (9999, 0.2)])
def test_frozen_params_explore_as_at_the_end_of_their_training(experiment, spec, steps, epsilon):
    agent = make_agent(experiment, spec, after=exploration.RunCounts(steps, None))
    assert abs(random_share(agent, spec) - epsilon) < 0.06
    greedy = make_agent(experiment, spec, greedy=True, after=exploration.RunCounts(steps))
    assert random_share(greedy, spec) == 0.0


def test_an_agent_that_does_not_count_keeps_its_policy(spec):
    agent = make_agent(preset("cartpole-ppo"), spec, after=exploration.RunCounts(50))
    assert agent.policy == exploration.Sample()


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"env_frames": 85, "episodes": 17}, (8, 1)),
        ({"env_frames": 85}, (8, None)),  # of an earlier version of rlstack
        ({}, (4, None)),
    ],
)
def test_a_checkpoint_has_the_counts_of_each_environment(experiment, tmp_path, told, wanted):
    path = checkpoint.save(tmp_path, 47, {"x": np.zeros(1)}, told)
    assert counts_at(path, experiment, 10) == wanted


def test_steps_learned_from_data_are_not_acted(experiment, tmp_path):
    replay = dataclasses.replace(experiment.replay, batch_size=64, unroll_length=1)
    both = dataclasses.replace(experiment, replay=replay, data="d", offline_updates=10)
    told = {"env_frames": 640 + 80, "episodes": 16}
    path = checkpoint.save(tmp_path, 720, {"x": np.zeros(1)}, told)
    assert counts_at(path, both) == (10, 2)  # of each of eight environments


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cartpole-scripted", {"policy": PolicyConfig("epsilon_greedy")}, "must be left out"),
        (
            "cartpole-random",
            {"policy_factory": "rlstack.exploration:Sample"},
            "must be left out",
        ),
        (
            "cartpole-dqn",
            {"agent": SQILConfig(), "normalisation": NormalisationConfig(reward_scale=0.1)},
            "normalisation must leave rewards as they are for SQIL",
        ),
    ],
)
def test_options_that_an_agent_would_ignore_are_refused(spec, name, changes, message):
    replay = dataclasses.replace(preset("cartpole-dqn").replay, sampler="uniform")
    experiment = dataclasses.replace(preset(name), replay=replay, **changes)
    with pytest.raises(ValueError, match=message):
        make_agent(experiment, spec)


def test_an_agent_with_levels_explores_where_there_are_none():
    base = preset("cartpole-ppo")
    leveled = dataclasses.replace(base, env=dataclasses.replace(base.env, levels=8))
    spec = environment_spec(base)
    agent = make_agent(leveled, spec, after=exploration.RunCounts(5, 1))
    assert transition_spec(agent, spec).agent_output.action.shape == ()


def test_the_frames_of_several_policies_are_those_of_all_their_rows(tmp_path):
    path = checkpoint.save(tmp_path, 800, {"x": np.zeros(1)}, {"env_frames": 800, "episodes": 80})
    # Four games with two policies that learn: eight rows. The rule of the third seat has no frames.
    assert counts_of(path, chain()) == (100, 10)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, experiment, spec):
    """The directory of a run that made 400 frames, 50 in each environment."""
    directory = RunDir.create(tmp_path_factory.mktemp("frozen") / "old", "old", 0)
    directory.write_config(to_json(experiment))
    state = {"learner": {"params": make_agent(experiment, spec).initial_params(KEY)}}
    checkpoint.save(directory.checkpoints, 400, state, {"env_frames": 400})
    return directory.path


def frozen_in_a_set(run_dir, experiment, spec):
    cfg = MemberConfig(run=str(opponents.checkpoint_of(run_dir, "run")))
    return fixed_agent(Member("old", "frozen", cfg, (0,), experiment), spec)[0]


def opponent(run_dir, experiment, spec):
    return opponents._Frozen(str(run_dir), spec, OpponentsConfig((str(run_dir),)), 1, 0, 0)._agent


def loaded(run_dir, experiment, spec):
    return load(run_dir, greedy=False, spec=spec).agent


def in_a_game(run_dir, experiment, spec):
    (side,) = sides_of([find("watch", run_dir)], spec, 1, greedy=False, seed=0)
    return side.policies[0].agent


@pytest.mark.parametrize("way", [frozen_in_a_set, opponent, loaded, in_a_game])
def test_whoever_plays_a_run_explores_as_at_the_end_of_its_training(run_dir, experiment, spec, way):
    # Another run has other environments and plays longer; the schedule is that of its own.
    other = dataclasses.replace(experiment, env=dataclasses.replace(experiment.env, num_envs=2))
    assert abs(random_share(way(run_dir, other, spec), spec) - 0.6) < 0.06


def judged_with(experiment, epsilon):
    cfg = dataclasses.replace(experiment.evaluator, epsilon=epsilon)
    return dataclasses.replace(experiment, evaluator=cfg)


def test_an_evaluation_takes_random_actions_at_the_rate_of_its_epsilon(experiment, spec):
    judged = judged_with(experiment, 0.3)
    assert abs(random_share(make_evaluator(judged, spec).agent, spec) - 0.3) < 0.06
    assert random_share(make_evaluator(experiment, spec).agent, spec) == 0.0
    assert random_share(make_agent(judged, spec, greedy=True), spec) == 0.0  # of `rlstack play`
    with pytest.raises(ValueError, match=r"EvaluatorConfig: epsilon must be in \[0, 1\]; got 2"):
        judged_with(experiment, 2.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pendulum-td3", "evaluator.epsilon must be 0 for continuous actions"),
        (
            "cartpole-random",
            "evaluator.epsilon must be 0 for an agent that follows a rule or acts at",
        ),
    ],
)
def test_an_epsilon_that_means_nothing_is_refused_before_training(name, words):
    experiment = judged_with(preset(name), 0.05)
    with pytest.raises(ValueError, match=words):
        make_agent(experiment, environment_spec(experiment))


@pytest.mark.parametrize("name", ["cartpole-impala", "cartpole-ppo", "cartpole-random"])
def test_a_prioritized_sampler_is_refused_for_agents_without_priorities(name):
    experiment = preset(name)
    replay = dataclasses.replace(experiment.replay, sampler="prioritized")
    experiment = dataclasses.replace(experiment, replay=replay)
    spec = environment_spec(experiment)
    words = "sampler must not be prioritized for .*, which gives .* Use --replay.sampler uniform"
    with pytest.raises(ValueError, match=words):
        make_agent(experiment, spec)
    make_agent(experiment, spec, greedy=True)  # runs of earlier versions can be evaluated


def test_policies_of_a_set_are_judged_with_epsilon_and_rules_as_they_are():
    experiment = judged_with(chain(), 0.05)
    division, spec = divide(experiment), environment_spec(experiment)
    judge = SetEvaluator(experiment, division, spec, {})
    for name in ("retailer", "distributor"):
        assert judge._evaluators[name].agent.policy == exploration.Greedy(0.05)
        follows = follower(division.members[name], spec, 4)
        assert follows.agent.policy == exploration.Greedy(0.05)
    follower(division.members["factory"], spec, 4)
