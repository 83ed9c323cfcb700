"""Suites: their data, their protocols in the experiments, and environments that exist."""

import dataclasses
import importlib.util

import pytest

from rlstack.jax_envs.factory import NAMED
from rlstack.programs.study.benchmark import suites
from rlstack.programs.study.benchmark.suites import AgentRow, Protocol, Suite, Task

NAMES = suites.names()
ROWS = [
    pytest.param(suite, task, agent, id=f"{suite.name}-{task.name}-{agent}")
    for suite in map(suites.read, NAMES)
    for agent in suite.agents
    for task in suite.tasks
]


def one(name, task, agent, frames=0):
    suite = suites.read(name)
    (found,) = (row for row in suite.tasks if row.name == task)
    return suite.experiment(found, agent, frames)


def test_the_benchmarks_of_the_field_are_there():
    expected = "minatar5 mujoco5 atari5 atari5-sticky atari-pong-breakout bsuite brax4 playground "
    expected += "craftax dmc-easy procgen jaxmarl offline offline-own smoke"
    assert set(NAMES) == set(expected.split())
    games = [task.env for task in suites.read("atari5").tasks]
    # Aitchison et al. (2023), table of the subset of five games.
    assert games == ["BattleZone-v5", "DoubleDunk-v5", "NameThisGame-v5", "Phoenix-v5", "Qbert-v5"]


@pytest.mark.parametrize("name", NAMES)
def test_references_name_tasks_and_have_sources(name):
    suite = suites.read(name)
    tasks = {task.name: task for task in suite.tasks}
    assert len(tasks) == len(suite.tasks)
    for reference in suite.references:
        assert reference.scores and set(reference.scores) <= set(tasks), reference.name
        assert reference.source.startswith("https://") and reference.protocol
        if reference.unit == "score":
            assert all(tasks[task].range for task in reference.scores)
    if suite.ranges:
        assert suite.normalisation is not None
        lacking = [task.name for task in suite.tasks if not (task.range or task.recorded)]
        assert lacking == (["Seaquest"] if name == "minatar5" else [])
        assert all(task.range[0] < task.range[1] for task in suite.tasks if task.range)


@pytest.mark.parametrize(("suite", "task", "agent"), ROWS)
def test_experiments_follow_the_protocol(suite, task, agent):
    experiment, protocol = suite.experiment(task, agent), suite.protocol
    assert experiment.evaluator.epsilon == protocol.epsilon
    assert experiment.evaluator.episodes == protocol.episodes
    assert experiment.evaluator.num_envs == protocol.num_envs
    assert experiment.env.name == task.env or not task.env
    if budget := task.frames or suite.frames:
        assert experiment.frames == budget
    if protocol.sticky_actions is not None and experiment.env.type != "jax":  # Atari
        options = experiment.env.options
        assert options["repeat_action_probability"] == protocol.sticky_actions
        assert options["frame_skip"] == protocol.frame_skip == 4
        played = {**options, **experiment.env.eval_options}
        assert played["episodic_life"] is not protocol.whole_games
        assert played["reward_clip"] is False
        assert "repeat_action_probability" not in experiment.env.eval_options


def test_sticky_actions_are_those_of_machado():
    experiment = one("atari5-sticky", "Qbert", "ppo")
    assert experiment.env.options["repeat_action_probability"] == 0.25
    assert experiment.env.options["full_action_space"] is True
    assert experiment.env.options["episodic_life"] is False
    assert experiment.frames * 4 == 200_000_000
    assert one("atari5", "Qbert", "ppo").frames * 4 == 40_000_000


def test_what_falls_with_the_frames_follows_another_budget():
    whole, tenth = (one("minatar5", "Asterix", "pqn", frames) for frames in (0, 1_000_000))
    assert whole.agent.optimizer.anneal_steps == 10_000_000 // (128 * 32) * 2 * 32
    assert tenth.agent.optimizer.anneal_steps == round(whole.agent.optimizer.anneal_steps / 10)
    assert (whole.agent.epsilon_frames, tenth.agent.epsilon_frames) == (1_000_000, 100_000)
    assert (whole.frames, tenth.frames) == (10_000_000, 1_000_000)


def test_evaluations_have_the_epsilon_of_the_protocol():
    suite = suites.read("atari5")
    nearly = dataclasses.replace(suite.protocol, epsilon=0.05)
    found = dataclasses.replace(suite, protocol=nearly).experiment(suite.tasks[0], "dqn")
    assert found.evaluator.epsilon == 0.05
    assert "random with probability 0.05" in str(nearly)
    assert "takes its best actions" in str(suite.protocol)


def test_any_preset_can_be_an_agent_whose_environment_is_replaced():
    found = one("mujoco5", "Ant", "pendulum-sac")
    assert (found.env.name, found.env.num_envs) == ("Ant-v4", 4)
    assert found.frames == 1_000_000
    with pytest.raises(ValueError, match="did you mean 'cartpole-ppo'"):
        one("mujoco5", "Ant", "cartpol-ppo")


def test_mistakes_name_the_way_out():
    with pytest.raises(ValueError, match=r"did you mean 'minatar5'.*--list"):
        suites.read("minatar4")
    with pytest.raises(ValueError, match="--agent must be one of ppo, pqn, dqn"):
        suites.read("minatar5").agent("")
    protocol = Protocol("p")
    own = Suite(
        "own", "t", "t", "s", 10, protocol, (Task("a", "A-v1"),), {"x": AgentRow("cartpole-ppo")}
    )
    assert own.agent("") is own.agents["x"]
    assert suites.missing(dataclasses.replace(own, needs=("json", "no_such_module"))) == [
        "no_such_module"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_environments_exist_where_their_library_is_installed(name):
    suite = suites.read(name)
    if suites.missing(suite):
        pytest.skip("its library is not installed")
    known = set(NAMED)
    if importlib.util.find_spec("gymnax"):
        import gymnax

        known |= set(gymnax.registered_envs)
    from rlstack.envs.cpp import library

    known |= set(library.names())
    for task in suite.tasks:
        env = suite.experiment(task, next(iter(suite.agents))).env
        newest = "MarlGrid-2AgentEmpty9x9-v0" if name == "craftax" else "HalfCheetah-v5"
        if not env.name.startswith("rlstack.") and newest not in known:
            pytest.skip("this EnvPool is too old")
        assert env.name in known or env.name.startswith("rlstack."), env.name
