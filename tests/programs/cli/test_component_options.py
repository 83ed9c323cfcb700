"""--agent.COMPONENT-optimizer.*: a component's optimizer from the command line and the config."""

import json

import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.cli import commands
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def trained(monkeypatch):
    """A function that returns the agent's config which a command would train."""
    seen = []
    monkeypatch.setattr(train, "run", lambda experiment, *_, **__: seen.append(experiment))
    monkeypatch.setattr("rlstack.programs.cli.train._print_result", lambda _: 0)

    def config(*args):
        assert commands.main("train", list(args)) == 0
        return seen.pop().agent

    return config


def test_a_component_takes_the_agents_optimizer_with_changes(trained):
    agent = trained(
        *("cartpole-ppo", "--agent.value_head_optimizer.learning-rate=3e-3"),
        *("--agent.policy-head-optimizer.name", "sgd", "--agent.optimizer.warmup-steps", "10"),
        *("--agent.policy-head-optimizer.arguments", "momentum", "0.9", "nesterov", "True"),
        *("--agent.optimizer.arguments", "b1", "0.8", "--agent.clip-ratio", "0.3"),
    )
    assert agent.clip_ratio == 0.3
    steps = preset("cartpole-ppo").agent.optimizer.anneal_steps
    main = OptimizerConfig("adam", 1e-3, steps, warmup_steps=10, arguments={"b1": 0.8})
    assert agent.optimizer == main
    assert agent.torso_optimizer is None
    value = OptimizerConfig("adam", 3e-3, steps, warmup_steps=10, arguments={"b1": 0.8})
    assert agent.value_head_optimizer == value
    momentum = {"momentum": 0.9, "nesterov": True}
    policy = OptimizerConfig("sgd", 1e-3, steps, warmup_steps=10, arguments=momentum)
    assert agent.policy_head_optimizer == policy


def test_arguments_join_those_of_the_agents_optimizer(trained):
    agent = trained(
        *("cartpole-dqn", "--agent.optimizer.arguments", "b1", "0.8", "nesterov", "True"),
        *("--agent.torso-optimizer.arguments", "b2", "0.99"),
    )
    arguments = {"b1": 0.8, "nesterov": True, "b2": 0.99}
    assert agent.torso_optimizer.arguments == arguments


@pytest.mark.parametrize(
    ("name", "components"),
    [
        ("cartpole-impala", ["torso", "policy-head", "value-head"]),
        ("cartpole-iqn", ["torso", "value-head"]),
        ("pendulum-sac", ["policy", "critics", "temperature"]),
        ("pendulum-td3", ["policy", "critics"]),
    ],
)
def test_the_help_lists_the_components(name, components, capsys):
    with pytest.raises(SystemExit):
        commands.main("train", [name, "--help-all"])
    shown = capsys.readouterr().out
    for component in components:
        assert f"--agent.{component}-optimizer.learning-rate FLOAT" in shown


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--agent.critics-optimizer.name", "sgd"], "are torso, policy_head, value_head; got crit"),
        (["--agent.torso-optimizer.nam", "sgd"], "did you mean --agent.torso-optimizer.name?"),
        (["--agent.torso-optimizer.name", "lino"], "got 'lino'; did you mean 'lion'?"),
        (["--agent.torso-optimizer.arguments", "b3", "1"], "those of adam; got 'b3'"),
    ],
)
def test_a_mistake_is_one_line(args, hint, capsys):
    assert commands.main("train", ["cartpole-ppo", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_configs_as_files_keep_components_and_refuse_unknown_ones():
    experiment = preset("cartpole-ppo")
    tree = json.loads(to_json(experiment))
    tree["agent"]["torso_optimizer"] = {"name": "lion", "arguments": {"b1": 0.8}}
    read = from_json(json.dumps(tree))
    assert read.agent.torso_optimizer == OptimizerConfig("lion", arguments={"b1": 0.8})
    assert from_json(to_json(read)) == read
    tree["agent"]["critics_optimizer"] = None
    with pytest.raises(ValueError, match=r"PPOConfig: .* torso, policy_head, value_head; got crit"):
        from_json(json.dumps(tree))


def test_configs_of_earlier_versions_are_read():
    tree = json.loads(to_json(preset("cartpole-ppo")))
    fields = ("name", "learning_rate", "anneal_steps", "decay", "weight_decay")
    old = {field: tree["agent"]["optimizer"][field] for field in fields}
    tree["agent"]["optimizer"] = {**old, "name": "sgd", "eps": 1e-5}
    agent = from_json(json.dumps(tree)).agent
    assert isinstance(agent, PPOConfig)
    assert agent.optimizer.eps == 1e-5
